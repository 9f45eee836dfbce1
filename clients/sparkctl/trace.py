"""`sparkctl trace FILE`: records which experts a running daemon's tokens are routed to, ids of experts alone.

The file is an .npz with `experts` u16 [tokens, expert layers, top_k], `decode` u8 [tokens] (1: output, 0: prompt),
`step` u64 [tokens], `tag` u8 [tokens] (index into `tags`), `n_expert`, and `missed` (steps that came too fast).
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from spark_client import Client, SparkClientError
from spark_client.messages import TraceReply
from sparkctl.plain import write_json
from sparkd.errors import RequestError, SparkError

#: Seconds between two questions; bytes of routed ids that are kept at most.
_PAUSE_S = 0.25
MAX_BYTES = 1 << 30
_STEP = struct.Struct("<IIQ")


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    kinds: np.ndarray[Any, np.dtype[np.uint8]]
    ids: np.ndarray[Any, np.dtype[np.uint16]]


def run(args: argparse.Namespace) -> int:
    """Record until enough tokens have come, the time is over, or Ctrl-C; then write the file."""
    try:
        file = args.file.open("xb")
    except FileExistsError:
        raise RequestError("the file exists already", where=str(args.file), fix="name another one") from None
    except OSError as error:
        raise SparkError(f"cannot be written: {error.strerror}", where=str(args.file)) from None
    written = False
    try:
        with file, Client(args.socket, timeout=args.timeout, name="sparkctl") as client:
            tokens = _record(client, file, args.tokens, args.seconds)
        written = True
    finally:
        if not written:
            args.file.unlink(missing_ok=True)
    if args.json:
        write_json({"file": str(args.file), "tokens": tokens})
    else:
        print(f"{tokens} tokens in {args.file}", file=sys.stderr)
    return 0


def _record(client: Client, file: BinaryIO, wanted: int, seconds: float | None) -> int:
    """Tokens that were written. SparkError, and nothing is written, when none came."""
    steps: list[_Step] = []
    reply = client.trace()
    until = time.monotonic() + (seconds or float("inf"))
    tokens = size = missed = 0
    with suppress(KeyboardInterrupt):
        while tokens < wanted and size < MAX_BYTES and time.monotonic() < until:
            time.sleep(_PAUSE_S)
            reply = client.trace(reply.last)
            missed += reply.missed
            size += len(reply.data)
            for step in _steps(reply):
                steps.append(step)
                tokens += len(step.kinds)
    if not steps:
        raise SparkError("no token was routed meanwhile, so nothing is written", fix="record while requests run")
    if len({step.ids.shape[2] for step in steps}) > 1:
        raise SparkClientError("the daemon serves another model now")
    np.savez_compressed(
        file,
        experts=np.concatenate([step.ids for step in steps])[:wanted],
        decode=np.concatenate([step.kinds & 1 for step in steps])[:wanted],
        tag=np.concatenate([step.kinds >> 1 for step in steps])[:wanted],
        step=np.concatenate([np.full(len(step.kinds), step.number, np.uint64) for step in steps])[:wanted],
        tags=np.array(reply.tags),
        n_expert=reply.experts,
        missed=missed,
    )
    return min(tokens, wanted)


def _steps(reply: TraceReply) -> Iterator[_Step]:
    """The steps of an answer. SparkClientError when it is none."""
    data, at = reply.data, 0
    while at < len(data):
        rows, top_k, number = _STEP.unpack_from(data, at) if at + _STEP.size <= len(data) else (0, 0, 0)
        ids_at = at + _STEP.size + rows
        end = ids_at + 2 * reply.layers * rows * top_k
        if not rows or end > len(data):
            raise SparkClientError("the daemon's answer holds no whole steps")
        ids = np.frombuffer(data[ids_at:end], "<u2").reshape(reply.layers, rows, top_k).transpose(1, 0, 2)
        yield _Step(number, np.frombuffer(data[at + _STEP.size : ids_at], np.uint8), ids.astype(np.uint16))
        at = end
