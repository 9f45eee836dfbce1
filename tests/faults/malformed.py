"""What no app in its right mind sends, at random: messages that break the protocol, messages that cannot be meant, and
bytes that are no ZeroMQ at all.
"""

from __future__ import annotations

import random
from typing import Any

import msgpack

from sparkd.ipc import internal
from sparkd.ipc import messages as m

_WHOLE = (
    m.Hello([m.VERSION], "app"),
    m.Generate(1, tokens=[1, 2, 3], sampling=m.Sampling(logit_bias=[m.Bias(1, 2.0)]), stop=["x"]),
    m.Generate(2, chat=[{"role": "user", "content": "x"}], tools=[{"name": "y"}], options={"z": [1, {}]}),
    m.Credit(1, 1),
    m.Cancel(1),
    m.Tokenize(3, "text"),
    m.StatusRequest(4),
    m.Ping(5),
    m.Bye(),
    internal.Encode(1, "x", False),
    internal.Produced(1, 0, 5, "x"),
    internal.Stop(),
)
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 2**63, -(2**63), 1.5, float("nan"), float("inf"), "", "\ud800", "x" * 70000, b"\xff"),
    *([], [None], [[]], [1, "x"], {}, {"": None}, {1: 2}, msgpack.ExtType(3, b"x"), msgpack.Timestamp(1)),
)
_IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    *({"tokens": []}, {"tokens": [-1]}, {"tokens": [2**62]}, {"tokens": [1] * 100000}, {"prompt": "both"}),
    *({"tokens": None}, {"model": "another"}, {"max_tokens": 0}, {"max_tokens": -(2**63)}, {"max_tokens": 2**63 - 1}),
    *({"credit": -1}, {"timeout_s": -1.0}, {"timeout_s": float("nan")}, {"logprobs": -1}, {"logprobs": 2**40}),
    *({"stop": [""]}, {"stop": ["x"] * 1000}, {"tools": [{}]}, {"options": {"x": 1}}),
    *({"sampling": m.Sampling(temperature=value)} for value in (-1.0, 1e30, float("nan"), float("inf"))),
    *({"sampling": m.Sampling(top_k=value)} for value in (-1, 2**40)),
    *({"sampling": m.Sampling(top_p=value)} for value in (-0.1, 1.1, float("nan"))),
    *({"sampling": m.Sampling(seed=value)} for value in (-1,)),
    {"sampling": m.Sampling(repetition_penalty=0.0)},
    {"sampling": m.Sampling(logit_bias=[m.Bias(1, 1e9)])},
    {"sampling": m.Sampling(logit_bias=[m.Bias(-1, 1.0)])},
)
#: Answers alone; an app that sends them is confused.
_NOT_OF_APPS = (
    m.Pong(1),
    m.Welcome(1, "x", 1, "x", 1.0),
    internal.Produced(1, 0, 5, "x"),
    internal.Stop(),
    internal.Abort(1),
    internal.Ready("x"),
)
#: What a ZeroMQ socket says first: signature, version 3.1, mechanism NULL, no server.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
_READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def malformed(chance: random.Random) -> list[bytes]:
    """Frames that are no message of the protocol."""
    while True:
        frames = _spoiled(chance)
        if len(frames) != 1:
            return frames
        try:
            m.decode(frames[0])
        except m.MessageError:
            return frames


def impossible(chance: random.Random, tag: int) -> bytes:
    """A message of the protocol that the daemon has to refuse."""
    if chance.randrange(4) == 0:
        return m.encode(chance.choice([*_NOT_OF_APPS, m.Cancel(chance.randrange(10**9, 2**63))]))
    return m.encode(m.Generate(tag, **({"tokens": [1]} | chance.choice(_IMPOSSIBLE))))


def noise(chance: random.Random) -> bytes:
    """Bytes for the bare socket: of no protocol, or of ZeroMQ's up to some point."""
    rubbish = chance.randbytes(chance.randrange(300))
    huge = b"\x02" + chance.choice([2**63, 2**64 - 1, 1 << 40]).to_bytes(8, "big")
    whole = _GREETING + _READY
    return chance.choice(
        [rubbish, whole[: chance.randrange(len(whole))], _GREETING + rubbish, whole + rubbish, whole + huge + rubbish]
    )


def _spoiled(chance: random.Random) -> list[bytes]:
    msg = chance.choice(_WHOLE)
    whole = m.encode(msg)
    body = msgpack.unpackb(whole)
    name = chance.choice(list(body))
    match chance.randrange(10):
        case 0:
            return [chance.randbytes(chance.randrange(300))]
        case 1:
            return [whole[: chance.randrange(len(whole))]]
        case 2:
            damaged = bytearray(whole)
            for _ in range(chance.randrange(1, 5)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            return [bytes(damaged)]
        case 3:
            return [chance.choice([whole, b"", b"x"]) for _ in range(chance.randrange(2, 6))]
        case 4:
            body[chance.choice(["surprise", "", "request_id", "é" * 100])] = chance.choice(_ODD)
        case 5:
            del body[name]
        case 6:
            body[name] = chance.choice(_ODD)
        case 7:
            body[name] = _nested(chance.choice([30, 400]))
        case 8:
            return [whole + chance.randbytes(chance.randrange(1, 50))]
        case 9:
            return [b"\x91" * chance.choice([600, 5000, 100000])]
    return [msgpack.packb(body, unicode_errors="surrogatepass")]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value
