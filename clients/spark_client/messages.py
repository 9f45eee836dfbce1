"""Every message between apps and the daemon, declared once (`sparkd/ipc/internal.py` has those inside the daemon).

`wire` says how they are written and read. This file imports nothing else: the client package carries an identical copy.

    app ── Hello, Generate, Credit, Cancel, Tokenize, Detokenize, StatusRequest, TraceRequest, Ping, Bye ──► supervisor
    app ◄── Welcome, Accepted, Progress, Chunk, Finished, Failed, Tokens, Text, StatusReply, TraceReply, Pong ──┘

A request of an app: Generate → Accepted (or Failed) → Progress* → Chunk* → Finished (or Failed). Chunks are sent only
against credit, so that no token is ever dropped; `tag` is the app's own number for a reply, `request` the server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .wire import INTERNAL_MAX_BYTES as INTERNAL_MAX_BYTES
from .wire import MAX_BYTES as MAX_BYTES
from .wire import VERSION as VERSION
from .wire import Json as Json
from .wire import Message as Message
from .wire import MessageError as MessageError
from .wire import decode as decode
from .wire import encode as encode
from .wire import message


@message("hello")
class Hello:
    """First message of a connection: the versions the app speaks, and its name for logs and status."""

    versions: list[int]
    client: str


@message("welcome")
class Welcome:
    """The version that will be spoken; pings must come more often than `lease_s`, or the app's requests end."""

    version: int
    server: str
    pid: int
    model: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to the logit of one token."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen; the defaults take the best one, and nothing changes or filters (docs/arithmetic.md).

    temperature 0: the best token. top_k 0, top_p 1, min_p 0: no filter. repetition_penalty (1: none) concerns ids of
    prompt and output, presence_penalty and frequency_penalty (0: none) the output. No seed: one is drawn at admission.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[Bias] = field(default_factory=list)


@message("generate")
class Generate:
    """Generate from exactly one of `prompt` (text), `tokens` (ids) and `chat` (messages for the chat template).

    `credit`: chunks that may be sent before the app grants more with Credit. `options` are keyword arguments for the
    chat template (`enable_thinking` ...). Model "" is the one that is served. `ignore_eos`: what ends an answer of the
    model's own accord (an end token, or its text) is output like any other and ends nothing. `logprobs`: None, or how
    many of the most likely tokens Chunk names beside each chosen one. `timeout_s`: seconds from now after which the
    request fails, wherever it is then; None: the daemon's limit. `parts`: the answer to a chat comes as thought, text
    and calls of `tools`. `call`: the answer is a call, without a thought, of the tool of that name ("": of any).
    `traffic_tag`: a name for the kind of traffic, under which the experts that the request uses are counted.
    `shorten`: fewer output tokens than `max_tokens` will do if the context has no room for so many.
    """

    tag: int
    model: str = ""
    prompt: str | None = None
    tokens: list[int] | None = None
    chat: list[dict[str, Json]] | None = None
    tools: list[dict[str, Json]] | None = None
    options: dict[str, Json] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    stop: list[str] = field(default_factory=list)
    max_tokens: int = 256
    ignore_eos: bool = False
    credit: int = 64
    logprobs: int | None = None
    timeout_s: float | None = None
    parts: bool = False
    call: str | None = None
    traffic_tag: str = ""
    shorten: bool = False


@message("accepted")
class Accepted:
    """The request exists under the server's id; `position` requests are before it."""

    tag: int
    request: int
    position: int


@message("progress")
class Progress:
    """What a request that sends no text yet is doing; sent when it changes, and at most every half second.

    `stage` queued: `position` requests are before it (others that come may be, too: apps take turns). `stage` prefill:
    `done` of `total` prompt tokens are read.
    """

    request: int
    stage: str
    done: int
    total: int
    position: int = 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The logarithm of a chosen token's probability, and the most likely tokens, best first.

    Probabilities are the model's own: before bias, penalties, filters and temperature.
    """

    logprob: float
    best: list[Logprob]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: `kind` is reasoning, text, or call.

    Of a call (number `call` of the answer, from 0) `text` is a piece of the JSON text of its arguments; `name`, the
    tool's, comes with its first piece alone.
    """

    kind: str
    text: str
    call: int = 0
    name: str = ""


@message("chunk")
class Chunk:
    """New output: `tokens` ids, the first of them output number `index`, and the text that became certain.

    `choices` has one entry per token where the request asked for `logprobs`, else it is None. Where it asked for
    `parts` those stand for the text, which is empty; else they are None.
    """

    request: int
    index: int
    tokens: list[int]
    text: str
    choices: list[Choice] | None = None
    parts: list[Part] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a request spent in each stage."""

    queued_s: float
    prefill_s: float
    decode_s: float


@message("finished")
class Finished:
    """The end of a request: `reason` is stop (end token or stop string), length, or cancelled.

    `hit_rate`: share of the experts its output tokens went to that were there without a wait (None: none were read);
    `resumed`: how often a worker that ended was replaced under it; `reasoning_tokens`: those of the output tokens that
    belong to its thought, where its parts were asked for.
    """

    request: int
    reason: str
    stop: str | None
    prompt_tokens: int
    output_tokens: int
    seed: int
    timings: Timings
    hit_rate: float | None = None
    resumed: int = 0
    reasoning_tokens: int = 0


@message("failed")
class Failed:
    """A request (by `request`) or a message (by `tag`) that failed; `retry`: the same may work later."""

    tag: int | None
    request: int | None
    code: str
    message: str
    retry: bool = False


@message("credit")
class Credit:
    """The app has consumed `chunks` more chunks of a request."""

    request: int
    chunks: int


@message("cancel")
class Cancel:
    """End a request of this connection."""

    request: int


@message("tokenize")
class Tokenize:
    """Token ids of a text, or of the prompt for a chat. `special`: control tokens spelled in a text are recognised."""

    tag: int
    text: str | None = None
    special: bool = False
    chat: list[dict[str, Json]] | None = None
    tools: list[dict[str, Json]] | None = None
    options: dict[str, Json] = field(default_factory=dict)


@message("tokens")
class Tokens:
    """Answer to Tokenize."""

    tag: int
    tokens: list[int]


@message("detokenize")
class Detokenize:
    """The text of token ids; `pieces`: the bytes of each as well."""

    tag: int
    tokens: list[int]
    pieces: bool = False


@message("text")
class Text:
    """Answer to Detokenize; bytes that are no text are U+FFFD in `text`."""

    tag: int
    text: str
    pieces: list[list[int]] | None = None


@message("status_request")
class StatusRequest:
    """Ask for the state of the daemon."""

    tag: int


@message("status_reply")
class StatusReply:
    """Answer to StatusRequest: the status document (docs/status.md describes it)."""

    tag: int
    status: dict[str, Json]


@message("trace_request")
class TraceRequest:
    """Ask for the experts that steps after number `after` were routed to. With 0 a recording begins.

    It goes on as long as the app asks every few seconds.
    """

    tag: int
    after: int = 0


@message("trace_reply")
class TraceReply:
    """Answer to TraceRequest: steps up to number `last`, after `missed` that were dropped.

    `data` has for each step: rows u32, top_k u32, number u64, one byte per row (1 for output, plus twice the index of
    its tag in `tags`), and ids int16 [`layers`, rows, top_k] of at most `experts`, all little-endian.
    """

    tag: int
    last: int
    missed: int
    layers: int
    experts: int
    tags: list[str]
    data: bytes


@message("ping")
class Ping:
    """Keeps the lease of a connection alive."""

    tag: int


@message("bye")
class Bye:
    """Last message of a connection: its requests end, its lease with them. Nothing is answered."""


@message("pong")
class Pong:
    """Answer to Ping."""

    tag: int
