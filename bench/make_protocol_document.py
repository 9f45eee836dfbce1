"""Writes the generated parts of docs/protocol.md: tables of messages and limits, and the example conversation.

python bench/make_protocol_document.py [--write]     without --write they are printed

Types, defaults and limits come from the code; what a field means is written here. A field without a meaning, or a
meaning without a field, is an error.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from sparkd import tags
from sparkd.calibration import recorder
from sparkd.ipc import messages as m
from sparkd.ipc import wire
from sparkd.supervisor import front_door, questions, requests
from sparkd.text import messages as chat
from sparkd.text import stop, tokenizer
from sparkd.worker import limits

DOC = Path(__file__).parent.parent / "docs" / "protocol.md"
TAG = (
    "the app's number for this call, which the answer carries; any, 1 and up are good (0 is what unasked `pong`s have)"
)
PENALTY = f"-{limits.MAX_PENALTY:g} to {limits.MAX_PENALTY:g}"
REQUEST = "id of the request, made by the daemon"

#: What each field means, and its bounds. The classes are those that apps send and hear, and the maps within them.
MEANINGS: dict[type[Any], dict[str, str]] = {
    m.Hello: {
        "versions": "versions of the protocol that the app speaks",
        "client": "the app's name, for status and log; the first 100 characters are kept",
    },
    m.Generate: {
        "tag": TAG,
        "model": "the name of the served model (`welcome` tells it), or empty for whichever it is",
        "prompt": "the text to continue; exactly one of `prompt`, `tokens` and `chat` is given",
        "tokens": "token ids to continue, each within the vocabulary; not empty",
        "chat": f"the conversation to answer, 1 to {chat.MAX_MESSAGES} messages (see “Chat”)",
        "tools": f"functions the model may call, at most {chat.MAX_TOOLS}; only with `chat`",
        "options": "variables for the model's chat template, such as `enable_thinking`; only with `chat`",
        "sampling": "how tokens are chosen",
        "stop": f"strings before which the output ends, at most {stop.MAX_STOPS} "
        f"of 1 to {stop.MAX_STOP_CHARACTERS} characters",
        "max_tokens": "output tokens at most, 1 and up; with the prompt's they must fit into the context",
        "ignore_eos": "go on after the model's end token",
        "credit": f"chunks that may be sent before `credit` grants more, 0 and up; "
        f"more than {requests.MAX_CREDIT} count as {requests.MAX_CREDIT}",
        "logprobs": f"how many of the most likely tokens are named beside each chosen one, 0 to {limits.MAX_LOGPROBS}; "
        "nil: no probabilities",
        "timeout_s": "seconds until the request fails, more than 0, at most the daemon's limit; nil: that limit",
        "parts": "give the answer in parts (see “Answers in parts”); only with `chat`",
        "call": 'make the answer a call of the tool of this name, or with `""` of any; only with `parts` and `tools`',
        "traffic_tag": f"a name for the kind of traffic (coding, legal ...), up to {tags.MAX_TAG_BYTES} of a to z, "
        "0 to 9, _ and -, under which the experts that the request uses are learned; empty: none",
        "shorten": "fewer output tokens than `max_tokens` will do, if the context has no room for so many",
    },
    m.Credit: {"request": REQUEST, "chunks": "chunks that the app has consumed since it last said so, 1 and up"},
    m.Cancel: {"request": f"{REQUEST}; one of this connection"},
    m.Tokenize: {
        "tag": TAG,
        "text": f"at most {tokenizer.MAX_CHARACTERS} characters; exactly one of `text` and `chat` is given",
        "special": "control tokens that are spelled in the text become their ids; only with `text`",
        "chat": "a conversation as in `generate`: the answer is its prompt",
        "tools": "as in `generate`",
        "options": "as in `generate`",
    },
    m.Detokenize: {
        "tag": TAG,
        "tokens": "token ids, each within the vocabulary",
        "pieces": "tell the bytes of each as well",
    },
    m.StatusRequest: {"tag": TAG},
    m.TraceRequest: {
        "tag": TAG,
        "after": "number of the last step that is known (`last` of the answer before); 0 begins a recording, which "
        f"ends when nothing was asked for {recorder.PATIENCE_S:g} seconds",
    },
    m.Ping: {"tag": TAG},
    m.Bye: {},
    m.Welcome: {
        "version": "the version that is spoken from here on",
        "server": "name and version of the daemon, for people",
        "pid": "its process id",
        "model": "the name of the model it serves",
        "lease_s": f"seconds of silence after which the app counts as gone ({front_door.LEASE_S:g})",
    },
    m.Accepted: {
        "tag": "that of `generate`",
        "request": f"{REQUEST}; it counts on this connection alone",
        "position": "requests that are before it, 0 and up",
    },
    m.Progress: {
        "request": REQUEST,
        "stage": "`queued` or `prefill`; others may come to be, ignore them",
        "done": "prefill: prompt tokens that are read",
        "total": "prefill: tokens of the prompt",
        "position": "queued: requests that are before it; it may grow, since apps take turns",
    },
    m.Chunk: {
        "request": REQUEST,
        "index": "number of the first of these tokens in the output, from 0; no number is left out or comes twice",
        "tokens": "token ids; may be empty when only text was held back",
        "text": "the text that has become certain; empty while the rest of a character or of a stop string may follow",
        "choices": "one for each token where `logprobs` was asked for, else nil",
        "parts": "what stands in the place of `text`, which is empty, where `parts` was asked for; else nil",
    },
    m.Finished: {
        "request": REQUEST,
        "reason": "`stop` (end token or stop string), `length` (`max_tokens`), `cancelled`",
        "stop": "the stop string that ended it",
        "prompt_tokens": "tokens of the prompt (0: cancelled before they were counted)",
        "output_tokens": "tokens of the output; a stop string's own are counted though their text is not sent",
        "seed": "the seed that was used: with it, everything else being equal, the same tokens come again",
        "timings": "where the time went",
        "hit_rate": "share of the experts that output tokens went to which were in memory, 0 to 1; nil: none was read",
        "resumed": "how often a worker was lost under it and the request went on with another",
        "reasoning_tokens": "those of the output tokens that belong to its thought; 0 unless `parts` was asked for",
    },
    m.Failed: {
        "tag": "of the call that failed; nil when it has none, or when that cannot be told",
        "request": "the accepted request that failed, or the id that a `cancel` named wrongly; nil: none is concerned",
        "code": "for programs, see “Errors”",
        "message": "for people, one line: what, where, what to do",
        "retry": "the same may work later",
    },
    m.Tokens: {"tag": "that of `tokenize`", "tokens": "token ids"},
    m.Text: {
        "tag": "that of `detokenize`",
        "text": "what the tokens stand for, control tokens included; U+FFFD for bytes that are no text",
        "pieces": "for each token its bytes, as numbers, where `pieces` was asked for; else nil",
    },
    m.StatusReply: {"tag": "that of `status_request`", "status": "the status document, which status.md describes"},
    m.TraceReply: {
        "tag": "that of `trace_request`",
        "last": "number of the last step told",
        "missed": "steps before the first one told that were dropped, since they came faster than they were asked for",
        "layers": "expert layers of the model",
        "experts": "experts of the layer with most",
        "tags": "the tags of traffic, by index; the first is empty: none",
        "data": "the steps, one after the other, little-endian: rows u32, top_k u32, number u64; a byte per row (1 for "
        "output, 0 for prompt, plus twice the index of its tag); ids int16 [layers, rows, top_k]",
    },
    m.Pong: {"tag": "that of `ping`; 0 when the daemon sends one unasked, to see whether the app is still there"},
    m.Sampling: {
        "temperature": f"0 takes the best token each time; at most {limits.MAX_TEMPERATURE:g}",
        "top_k": "sample from the k best; 0: from all; below 2³¹",
        "top_p": "sample from the fewest best ones that add up to p, 0 to 1; 1: from all",
        "seed": "0 to 2⁶⁴ - 1; nil: one is drawn, which `finished` tells",
        "min_p": "leave out what is less than p times as likely as the best, 0 to 1; 0: nothing",
        "repetition_penalty": f"above 1 makes ids of prompt and output less likely, 1: none; "
        f"{1 / limits.MAX_REPETITION_PENALTY:g} to {limits.MAX_REPETITION_PENALTY:g}",
        "presence_penalty": f"taken from the logit of ids of the output, {PENALTY}",
        "frequency_penalty": f"the same for each time it occurred, {PENALTY}",
        "logit_bias": f"at most {limits.MAX_BIASES}, each token once",
    },
    m.Bias: {"token": "token id", "bias": f"added to its logit, -{limits.MAX_BIAS:g} to {limits.MAX_BIAS:g}"},
    m.Timings: {
        "queued_s": "seconds from acceptance to the worker",
        "prefill_s": "seconds from there to the first token",
        "decode_s": "seconds from there to the end",
    },
    m.Choice: {
        "logprob": "natural logarithm of the chosen token's probability, as the model itself sees it",
        "best": "the most likely tokens, best first, as many as `logprobs` says",
    },
    m.Logprob: {"token": "token id", "logprob": "as above"},
    m.Part: {
        "kind": "`reasoning`, `text` or `call`",
        "text": "what has become certain; of a call a piece of the JSON text of its arguments",
        "call": "number of the call in the answer, from 0",
        "name": "the tool's, with the first piece of a call; else empty",
    },
}
SENT_BY_APPS = (
    m.Hello,
    m.Generate,
    m.Credit,
    m.Cancel,
    m.Tokenize,
    m.Detokenize,
    m.StatusRequest,
    m.TraceRequest,
    m.Ping,
    m.Bye,
)
SENT_TO_APPS = (
    m.Welcome, m.Accepted, m.Progress, m.Chunk, m.Finished, m.Failed, m.Tokens, m.Text, m.StatusReply,
    m.TraceReply, m.Pong,
)  # fmt: skip
MAPS = (m.Sampling, m.Bias, m.Timings, m.Choice, m.Logprob, m.Part)


def tables() -> str:
    """One table for each message and each map within messages."""
    parts = ["### Messages of apps\n", *map(_table, SENT_BY_APPS), "### Messages of the daemon\n"]
    parts += [*map(_table, SENT_TO_APPS), "### Maps within messages\n", *map(_table, MAPS)]
    return "\n".join(parts)


def _table(cls: type[Any]) -> str:
    fields, meanings, hints = dataclasses.fields(cls), MEANINGS[cls], typing.get_type_hints(cls)
    if [field.name for field in fields] != list(meanings):
        raise SystemExit(
            f"{cls.__name__}: the fields are {[field.name for field in fields]}, explained are {list(meanings)}"
        )
    name = getattr(cls, "wire_name", cls.__name__)
    lines = [f"#### `{name}`\n"]
    if not fields:
        return "\n".join([*lines, "No fields.\n"])
    lines += ["| field | type | default | meaning and bounds |", "| --- | --- | --- | --- |"]
    lines += [f"| `{f.name}` | {_type(hints[f.name])} | {_default(f)} | {meanings[f.name]} |" for f in fields]
    return "\n".join([*lines, ""])


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return f"{_type(inner)} or nil"
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "map"
    return f"`{hint.__name__}`" if dataclasses.is_dataclass(hint) else str(hint.__name__)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{json.dumps(field.default)}`".replace("`null`", "nil")
    if field.default_factory is dataclasses.MISSING:
        return "required"
    made = field.default_factory()
    return f"`{json.dumps(made)}`" if isinstance(made, list | dict) else "all defaults"


def limits_table() -> str:
    """What the daemon bounds, beside the fields themselves."""
    rows = [
        ("one message", f"{wire.MAX_BYTES} bytes; a larger one costs the connection"),
        ("items of one list", str(wire.MAX_ITEMS)),
        ("maps and lists of one message, and values of its free-form content", str(wire.MAX_VALUES)),
        ("nesting within a free-form `map`", f"{wire.MAX_DEPTH} levels"),
        ("values in all free-form maps of a message; maps and lists in a message", f"{wire.MAX_VALUES} each"),
        ("texts of one request together", f"{tokenizer.MAX_CHARACTERS} characters, {chat.MAX_VALUES} values"),
        ("memory of all open requests", f"{front_door.HELD_BYTES} bytes, half of it for one app"),
        ("connections", str(front_door.MAX_CLIENTS)),
        ("requests that wait", "`limits.queue`; once it fills up, a place is kept for each app that waits for nothing"),
        ("requests that run", "`limits.sequences`"),
        ("positions of one request (prompt and output)", "`model.context` of the status document"),
        ("`tokenize` calls that wait, of all apps", str(questions.MAX_QUESTIONS)),
        ("silence before the lease ends", f"{front_door.LEASE_S:g} s"),
        ("time that output may wait for credit", f"{front_door.STALL_S:g} s"),
        ("least time between two `progress` of a request", f"{requests.PROGRESS_S:g} s"),
    ]
    return "\n".join(["| what | limit |", "| --- | --- |", *(f"| {what} | {limit} |" for what, limit in rows), ""])


def conversation() -> str:
    """A conversation, with the bytes of each message."""
    who = [{"role": "user", "content": "Who are you?"}]
    timings = m.Timings(0.001, 0.05, 0.02)
    sampling = m.Sampling(0.75, seed=7, logit_bias=[m.Bias(3, -2.0)])
    ids = [3924, 430, 1462]
    steps: list[tuple[str, str, Any]] = [
        ("The app says hello.", "app", m.Hello([1], "example")),
        ("", "daemon", m.Welcome(1, "sparkd 0.1.0", 4711, "spark-demo-laguna", front_door.LEASE_S)),
        ("It keeps its lease alive, here and between all that follows.", "app", m.Ping(1)),
        ("", "daemon", m.Pong(1)),
        ("It asks for token ids.", "app", m.Tokenize(2, "Hello world")),
        ("", "daemon", m.Tokens(2, ids)),
        ("It asks a question, and takes two chunks for now.", "app", m.Generate(3, chat=who, max_tokens=8, credit=2)),
        ("", "daemon", m.Accepted(3, 2, 0)),
        ("", "daemon", m.Progress(2, "prefill", 16, 18)),
        ("", "daemon", m.Chunk(2, 0, [45], "I")),
        ("", "daemon", m.Chunk(2, 1, [711], " am")),
        (
            "The credit is used up: nothing comes until there is more, then all that has gathered.",
            "app",
            m.Credit(2, 64),
        ),
        ("", "daemon", m.Chunk(2, 2, [3274, 16, 265, 3341, 291, 856], " Spark, a tiny mix")),
        ("", "daemon", m.Finished(2, "length", None, 18, 8, 4360797949537051, timings, 1.0)),
        (
            "A long one, from token ids; the app changes its mind.",
            "app",
            m.Generate(4, tokens=ids, max_tokens=900, ignore_eos=True, sampling=sampling),
        ),
        ("", "daemon", m.Accepted(4, 3, 0)),
        ("", "app", m.Cancel(3)),
        ("", "daemon", m.Finished(3, "cancelled", None, 3, 0, 7, timings)),
        ("What cannot be done is refused with the reason.", "app", m.Generate(5, prompt="", tokens=[1])),
        ("", "daemon", m.Failed(5, None, "request", "a request has one of prompt, tokens and chat, ...")),
        ("It asks how the daemon is (the answer is long, and left out here), and leaves.", "app", m.StatusRequest(6)),
        ("", "app", m.Bye()),
    ]
    return "\n".join(_step(*step) for step in steps)


def _step(words: str, side: str, msg: Any) -> str:
    body = {"v": m.VERSION, "t": msg.wire_name} | (_given(msg) if side == "app" else dataclasses.asdict(msg))
    data = msgpack.packb(body)
    m.decode(data)
    lines = [data[at : at + 32].hex() for at in range(0, len(data), 32)]
    return (f"{words}\n\n" if words else "") + "\n".join(
        [f"```example {side}", json.dumps(body, ensure_ascii=False), *lines, "```", ""]
    )


def _given(msg: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, which an app may leave out."""
    given = {}
    for field in dataclasses.fields(msg):
        value = getattr(msg, field.name)
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value != made:
            given[field.name] = _given(value) if dataclasses.is_dataclass(value) else _plain(value)
    return given


def _plain(value: Any) -> Any:
    return (
        [_given(item) if dataclasses.is_dataclass(item) else item for item in value]
        if isinstance(value, list)
        else value
    )


def filled(text: str) -> str:
    """The document with its generated parts as they should be."""
    for mark, part in (("messages", tables()), ("limits", limits_table()), ("conversation", conversation())):
        pattern = rf"<!-- {mark} -->.*?<!-- end of {mark} -->"
        if not re.search(pattern, text, re.DOTALL):
            raise SystemExit(f"{DOC} has no place for {mark}")
        made = f"<!-- {mark} -->\n\n{part}\n<!-- end of {mark} -->"
        text = re.sub(pattern, lambda _, made=made: made, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def main(arguments: Sequence[str]) -> None:
    text = filled(DOC.read_text())
    if list(arguments) == ["--write"]:
        DOC.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
