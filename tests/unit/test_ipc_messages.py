"""The wire: every message survives the trip, and nothing that arrives can do worse than a MessageError."""

from __future__ import annotations

import dataclasses
import datetime
import types
import typing
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.ipc import internal, messages, wire
from sparkd.ipc.messages import MessageError, decode, encode

ROOT = Path(__file__).parent.parent.parent
TYPES = dict(sorted(wire._TYPES.items()))
assert {"generate", internal.Stage.wire_name} <= set(TYPES)

_TEXT = st.text(max_size=8)
_INT = st.integers(-(2**63), 2**64 - 1)
_SCALARS = st.none() | st.booleans() | _INT | st.floats(allow_nan=False) | _TEXT
_JSON = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3))
_MSGPACK = st.recursive(
    _SCALARS | st.floats() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT | _INT | st.none(), inner, max_size=3),
)


def _values(hint: object) -> st.SearchStrategy:
    """Values that a field with this type hint may have."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return st.one_of(*[st.none() if a is type(None) else _values(a) for a in args])
    if origin is list:
        return st.lists(_values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(_TEXT, _JSON, max_size=3)
    if dataclasses.is_dataclass(hint):
        return _instances(hint)
    simple = {
        int: _INT,
        str: _TEXT,
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        bytes: st.binary(max_size=8),
    }
    return simple[hint]


def _instances(cls: type) -> st.SearchStrategy:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: _values(hints[f.name]) for f in dataclasses.fields(cls)})


def _packed(**body: object) -> bytes:
    return msgpack.packb({"v": messages.VERSION, **body}, use_bin_type=True)


@pytest.mark.parametrize("name", ["messages.py", "wire.py"])
def test_the_client_carries_the_same_messages(name):
    client = ROOT / "clients" / "spark_client" / name
    assert client.read_bytes() == (ROOT / "sparkd" / "ipc" / name).read_bytes()


@pytest.mark.parametrize("name", TYPES)
def test_every_message_comes_back_as_it_was_sent(name):
    @settings(max_examples=30, deadline=None)
    @given(_instances(TYPES[name]))
    def check(message):
        assert decode(encode(message)) == message

    check()


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_never_more_than_a_message_error(data):
    with pytest.raises(MessageError):
        decode(data)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(list(TYPES)), st.data())
def test_random_fields_are_never_more_than_a_message_error(name, data):
    fields = [f.name for f in dataclasses.fields(TYPES[name])]
    body = data.draw(st.dictionaries(st.sampled_from([*fields, "other"]), _MSGPACK))
    packed = _packed(t=name, **body)
    try:
        message = decode(packed)
    except MessageError as error:
        assert "\n" not in str(error)
    else:
        assert type(message) is TYPES[name]


@settings(max_examples=300, deadline=None)
@given(_MSGPACK)
def test_random_msgpack_is_never_more_than_a_message_error(body):
    with pytest.raises(MessageError):
        decode(msgpack.packb(body, use_bin_type=True))


@settings(max_examples=300, deadline=None)
@given(_instances(messages.Generate), st.integers(0), st.integers(0, 255))
def test_one_damaged_byte_is_never_more_than_a_message_error(message, place, value):
    data = bytearray(encode(message))
    data[place % len(data)] = value
    try:
        assert type(decode(bytes(data))) in TYPES.values()
    except MessageError as error:
        assert str(error)


def test_messages_larger_than_the_limit_are_refused_on_both_sides():
    text = "x" * messages.MAX_BYTES
    with pytest.raises(MessageError, match="the limit is"):
        encode(messages.Tokenize(1, text))
    with pytest.raises(MessageError, match="the limit is"):
        decode(_packed(t="tokenize", tag=1, text=text))


def test_content_nested_deeper_than_the_limit_is_refused():
    def status(depth: int) -> messages.StatusReply:
        value: object = 0
        for _ in range(depth - 1):
            value = [value]
        return messages.StatusReply(1, {"deep": value})

    assert decode(encode(status(wire.MAX_DEPTH))) == status(wire.MAX_DEPTH)
    with pytest.raises(MessageError, match="nested deeper"):
        decode(encode(status(wire.MAX_DEPTH + 1)))
    with pytest.raises(MessageError):
        decode(b"\x91" * 100_000)


def test_more_values_than_the_limit_are_refused_before_they_cost_time_or_memory():
    """A few bytes can be a container each: what a message may hold is bounded, not only its length."""
    head = msgpack.packb({"v": messages.VERSION, "t": "generate", "tag": 1})[1:]
    lists, ones = msgpack.packb([[]] * wire.MAX_VALUES), msgpack.packb([1] * wire.MAX_VALUES)
    for content, said in ((lists, "maps and lists"), (ones, "values")):
        data = b"\x84" + head + msgpack.packb("chat") + b"\x91\x81" + msgpack.packb("x") + content
        with pytest.raises(MessageError, match=f"more than {wire.MAX_VALUES} {said}"):
            decode(data)
    halves = [{"x": [1] * (wire.MAX_VALUES // 2)}, {"y": [1] * (wire.MAX_VALUES // 2)}]
    with pytest.raises(MessageError, match="values"):
        decode(_packed(t="generate", tag=1, chat=halves))
    assert len(decode(_packed(t="generate", tag=1, tokens=[1] * (2 * wire.MAX_VALUES))).tokens) == 2 * wire.MAX_VALUES


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"t": "ping"}, "field 'tag' is missing"),
        ({"t": "ping", "tag": 1, "more": 2}, "unknown field 'more'"),
        ({"t": "ping", "tag": True}, "expected int, found bool"),
        ({"t": "ping", "tag": 1.0}, "expected int, found float"),
        ({"t": "nothing"}, "unknown message type 'nothing'"),
        ({"t": ["ping"]}, "unknown message type"),
        ({"t": "tokens", "tag": 1, "tokens": [1, "2"]}, "tokens.tokens: expected ints, found str"),
        ({"t": "status_reply", "tag": 1, "status": {"a": {b"k": 2}}}, "keys that are not text"),
        ({"t": "status_reply", "tag": 1, "status": {"a": b"bytes"}}, "bytes is not allowed"),
        ({"t": "status_reply", "tag": 1, "status": {"a": msgpack.ExtType(5, b"x")}}, "ExtType is not allowed"),
        ({"t": "generate", "tag": 1, "sampling": {"top_q": 1}}, "generate.sampling: unknown field 'top_q'"),
    ],
)
def test_the_error_names_what_is_wrong(body, said):
    with pytest.raises(MessageError, match=said):
        decode(_packed(**body))


@pytest.mark.parametrize(("body", "tag"), [({"t": "generate", "best_of": 3}, 7), ({"t": "embed"}, 7)])
def test_the_error_carries_the_tag_of_the_message_so_that_its_sender_knows_which_failed(body, tag):
    with pytest.raises(MessageError) as caught:
        decode(_packed(tag=tag, **body))
    assert caught.value.tag == tag
    with pytest.raises(MessageError) as caught:
        decode(_packed(tag="seven", **body))
    assert caught.value.tag is None


def test_another_protocol_version_is_refused_naming_both():
    with pytest.raises(MessageError, match=f"version {messages.VERSION}, the message has 99"):
        decode(msgpack.packb({"v": 99, "t": "stop"}))


def test_an_error_stays_short_whatever_the_message_holds():
    for body in ({"v": "x" * 10_000, "t": "stop"}, {"v": 1, "t": "x" * 10_000}, {"v": 1, "t": "stop", "y" * 10_000: 0}):
        with pytest.raises(MessageError) as caught:
            decode(msgpack.packb(body))
        assert len(str(caught.value)) <= 200


@pytest.mark.parametrize("value", [2**64, "\ud800", datetime.datetime(2020, 1, 1), {1, 2}])
def test_what_msgpack_cannot_say_is_refused_by_the_sender(value):
    with pytest.raises(MessageError, match="cannot be packed"):
        encode(messages.StatusReply(1, {"value": value}))


@pytest.mark.parametrize("name", TYPES)
def test_a_message_type_is_what_a_frozen_dataclass_would_be(name):
    kind = TYPES[name]
    given = [
        (f.name, f.type, dataclasses.field(default=f.default, default_factory=f.default_factory))
        for f in dataclasses.fields(kind)
    ]
    model = dataclasses.make_dataclass(kind.__name__, given, frozen=True)
    needed = {f.name: f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    one, other, meant = kind(**needed), kind(*needed.values()), model(**needed)
    assert one == other and repr(one) == repr(meant) and one != meant
    assert dataclasses.asdict(one) == dataclasses.asdict(meant)
    with pytest.raises(TypeError, match=r"__init__\(\) got an unexpected keyword argument 'odd'"):
        kind(**needed, odd=1)
    if needed:
        with pytest.raises(TypeError, match=r"missing .* required positional argument"):
            kind()
        first = next(iter(needed))
        assert kind(**(needed | {first: 7})) != one
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, first, 7)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(one, first)
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        one.odd = 1
    assert not hasattr(one, "__dict__")
