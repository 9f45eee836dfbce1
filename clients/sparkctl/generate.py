"""`sparkctl generate`: text streams to standard output as it comes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from spark_client import Chunk, Client, Stream
from spark_client.errors import SparkClientError
from sparkctl.plain import write_json
from sparkctl.speaker import Speaker


def run(args: argparse.Namespace) -> int:
    """Generate and stream. Leaving early, also by Ctrl-C, cancels the request."""
    parser: argparse.ArgumentParser = args.parser
    if not args.chat and (args.system is not None or args.think):
        parser.error("--system and --think need --chat")
    if args.logprobs is not None and not args.json:
        parser.error("--logprobs needs --json")
    prompt = read_text(args.prompt, parser)
    with Client(args.socket, timeout=args.timeout, name="sparkctl") as client, _start(client, args, prompt) as stream:
        if args.json:
            stream.read()
            write_json(_document(stream))
        else:
            _write(stream)
        if args.stats:
            print(_stats(stream), file=sys.stderr)
    return 0


def read_text(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """The text given as arguments, else all of standard input; a usage error when that is a terminal."""
    if words and list(words) != ["-"]:
        return " ".join(words)
    if not words and sys.stdin.isatty():
        parser.error("give a text, or pipe one into standard input")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise SparkClientError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


def _start(client: Client, args: argparse.Namespace, prompt: str) -> Stream:
    sampling = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "logit_bias": dict(args.logit_bias),
        "seed": args.seed,
        "logprobs": args.logprobs,
        "stop": args.stop,
        "max_tokens": args.max_tokens,
        "ignore_eos": args.ignore_eos,
        "timeout_s": args.deadline,
        "traffic_tag": args.tag,
    }
    if not args.chat:
        return client.generate(prompt, **sampling)
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return client.chat(messages, options={"enable_thinking": True} if args.think else None, parts=True, **sampling)


def _write(stream: Stream) -> None:
    speaker = Speaker()
    for event in stream.events():
        if isinstance(event, Chunk):
            speaker.say(event)
    speaker.end()


def _document(stream: Stream) -> dict[str, object]:
    assert stream.usage is not None and stream.timings is not None
    told: dict[str, object] = {}
    if stream.reasoning:
        told["reasoning"] = stream.reasoning
    if stream.calls:
        told["calls"] = [dataclasses.asdict(call) for call in stream.calls]
    if stream.choices:
        told["logprobs"] = [dataclasses.asdict(choice) for choice in stream.choices]
    return {
        "text": stream.text,
        "tokens": stream.tokens,
        "finish_reason": stream.finish_reason,
        "stop_string": stream.stop_string,
        "seed": stream.seed,
        "usage": {"prompt_tokens": stream.usage.prompt_tokens, "output_tokens": stream.usage.output_tokens},
        "timings": {
            "queued_s": stream.timings.queued_s,
            "prefill_s": stream.timings.prefill_s,
            "decode_s": stream.timings.decode_s,
        },
        "hit_rate": stream.hit_rate,
        **told,
    }


def _stats(stream: Stream) -> str:
    assert stream.usage is not None and stream.timings is not None
    tokens, seconds = stream.usage.output_tokens, stream.timings.decode_s
    speed = f" ({tokens / seconds:.1f}/s)" if seconds > 0 else ""
    return (
        f"{stream.usage.prompt_tokens} prompt tokens in {stream.timings.prefill_s:.2f} s, "
        f"{tokens} output tokens in {seconds:.2f} s{speed}, finished: {stream.finish_reason}, seed {stream.seed}"
    )
