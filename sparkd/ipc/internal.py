"""Every message between the processes of a daemon, declared once; `messages` has those of apps, `wire` the format.

    supervisor ── Run, Abort, Encode, Decode, StatusQuery, Reconfigure, Placement, Stop ──► child
    supervisor ◄── ChildHello, ChildProgress, Ready, Heartbeat, Admitted, Prefilled, Produced, Done, Refused, Encoded,
                   StatusAnswer, Placement, ChildFailed ── child
    worker ── Attach, Stage, Foreseen, Release, Used ──► store ── Attached, Staged ──► worker

A Placement goes from the calibrator by way of the supervisor to the store. Routed ids reach the calibrator through
`ipc/routing`.
"""

from __future__ import annotations

from dataclasses import field

from sparkd.ipc.messages import Choice, Json, Part, Sampling, Timings
from sparkd.ipc.wire import message

# ---- supervisor and its children -------------------------------------------------------------------------------------


@message("child_hello")
class ChildHello:
    """First message of a child to the supervisor."""

    role: str
    pid: int


@message("child_progress")
class ChildProgress:
    """Long work of a child before it is ready: done of total in `unit` (bytes, ...)."""

    role: str
    what: str
    done: int
    total: int
    unit: str


@message("ready")
class Ready:
    """The child serves. `detail` goes into the status document."""

    role: str
    detail: dict[str, Json] = field(default_factory=dict)


@message("child_failed")
class ChildFailed:
    """The child cannot go on, and why, for people; it exits after this."""

    role: str
    code: str
    message: str


@message("heartbeat")
class Heartbeat:
    """Sent by a thread of its own; `progress` counts finished pieces of work, `busy` says that one is being done."""

    role: str
    progress: int
    busy: bool


@message("run")
class Run:
    """A request for the worker. `produced` are output ids that exist already (a resumed request)."""

    request: int
    prompt: str | None
    tokens: list[int] | None
    chat: list[dict[str, Json]] | None
    tools: list[dict[str, Json]] | None
    options: dict[str, Json]
    sampling: Sampling
    stop: list[str]
    max_tokens: int
    ignore_eos: bool
    produced: list[int] = field(default_factory=list)
    logprobs: int | None = None
    parts: bool = False
    call: str | None = None
    traffic_tag: str = ""
    shorten: bool = False


@message("admitted")
class Admitted:
    """The worker has the prompt's ids (the journal keeps them) and the seed."""

    request: int
    tokens: list[int]
    seed: int


@message("prefilled")
class Prefilled:
    """Prompt positions done of total."""

    request: int
    done: int
    total: int


@message("produced")
class Produced:
    """One output token, its number, and the text (or the parts) that became certain with it."""

    request: int
    index: int
    token: int
    text: str
    choice: Choice | None = None
    parts: list[Part] = field(default_factory=list)
    thought: bool = False


@message("done")
class Done:
    """The worker finished a request; `text` (or `parts`) is what was still held back."""

    request: int
    reason: str
    stop: str | None
    text: str
    prompt_tokens: int
    output_tokens: int
    seed: int
    timings: Timings
    hit_rate: float | None = None
    parts: list[Part] = field(default_factory=list)


@message("refused")
class Refused:
    """The worker cannot do a request."""

    request: int
    code: str
    message: str


@message("abort")
class Abort:
    """Stop working on a request; the worker answers with Done (reason cancelled)."""

    request: int


@message("encode")
class Encode:
    """Tokenize a text, or the prompt for a chat, for somebody else."""

    job: int
    text: str | None
    special: bool
    chat: list[dict[str, Json]] | None = None
    tools: list[dict[str, Json]] | None = None
    options: dict[str, Json] = field(default_factory=dict)


@message("encoded")
class Encoded:
    """Answer to Encode; `error` says why there are no tokens."""

    job: int
    tokens: list[int] | None
    error: str | None = None


@message("decode")
class Decode:
    """Token ids to text for somebody else; `pieces`: the bytes of each as well."""

    job: int
    tokens: list[int]
    pieces: bool


@message("decoded")
class Decoded:
    """Answer to Decode; `error` says why there is no text."""

    job: int
    text: str
    pieces: list[list[int]] | None = None
    error: str | None = None


@message("status_query")
class StatusQuery:
    """Ask a child for its part of the status document."""

    job: int


@message("status_answer")
class StatusAnswer:
    """A child's part of the status document."""

    job: int
    role: str
    status: dict[str, Json]


@message("reconfigure")
class Reconfigure:
    """The daemon's settings, as JSON, after some that may change in a running child have changed."""

    settings: str


@message("stop")
class Stop:
    """Finish and exit."""


# ---- worker, store, calibrator ---------------------------------------------------------------------------------------


@message("attach")
class Attach:
    """A worker asks for the place of everything in the arena."""

    worker: int
    model: str


@message("attached")
class Attached:
    """The arena holds the model `fingerprint`; the layout follows from the headers it carries and its slab table.

    `partial`: not every record has a slot of its own. Then steps stage what they miss, and tell what they used (Used).
    """

    model: str
    fingerprint: str
    layout_version: int
    arena_bytes: int
    resident: int
    records: int
    partial: bool
    error: str | None = None


@message("stage")
class Stage:
    """Bring records (pairs of expert layer, expert) into host memory and lease them, all at once.

    Of one slab, no more than its reserve has slots. `use` ("decode" or "prefill"): what decode misses joins the ring.
    """

    batch: int
    model: str
    use: str
    records: list[list[int]]


@message("staged")
class Staged:
    """Slot and generation of each record asked for, in order, leased until Release(lease).

    Each can be read once the directory says that this filling of its slot is complete. With an error there is no lease,
    or no more. `refused`: the record (expert layer, expert) that cannot be read, if that is why.
    """

    batch: int
    lease: int
    slots: list[int]
    generations: list[int]
    error: str | None = None
    refused: list[int] | None = None


@message("foreseen")
class Foreseen:
    """Records (pairs of expert layer, expert) that a step will probably miss next, the likeliest first. No answer.

    They are read while nothing else is. What was foreseen before and has not begun is forgotten.
    """

    records: list[list[int]]


@message("release")
class Release:
    """Give a lease back."""

    lease: int


@message("used")
class Used:
    """Which records a step of this worker used, for decode and for prefill; sent after it, where the tier is partial.

    Bit n (from the lowest of the first byte) stands for word n of the directory: expert layer times the experts of the
    largest layer, plus expert. Empty: none.
    """

    step: int
    decode: bytes
    prefill: bytes


@message("trace_query")
class TraceQuery:
    """An app records: what was routed after step number `after`?"""

    job: int
    after: int


@message("trace_answer")
class TraceAnswer:
    """Answer to TraceQuery, as TraceReply has it."""

    job: int
    last: int
    missed: int
    layers: int
    experts: int
    tags: list[str]
    data: bytes


@message("tier")
class Tier:
    """How a tier that does not hold everything looks, told by its owner for the calibrator.

    Of each expert layer its slab and its experts; of each slab the bytes of a record, the slots for hot set and ring,
    and how many of these are kept free.
    """

    model: str
    tier: str
    slabs: list[int]
    experts: list[int]
    record_bytes: list[int]
    slots: list[int]
    spare: list[int]


@message("placement")
class Placement:
    """Which experts should be hot in a tier: `hot[layer]` lists ids; `ring` is the share of slots for the tail.

    `half_life`: steps after which a use counts half where the ring chooses whom to evict.
    """

    version: int
    model: str
    tier: str
    hot: list[list[int]]
    ring: float
    half_life: float
