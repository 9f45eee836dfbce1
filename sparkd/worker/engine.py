"""The worker's core: admits sequences, runs steps, turns logits into tokens and tokens into messages.

Everything here happens between two steps in one thread. `step` is the whole loop: admit what fits, plan, run, sample,
report. What it returns goes to the supervisor in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import RequestError, SparkError
from sparkd.executors.base import Batch, Executor, RecordRefused, RowKind, Segment, StepResult
from sparkd.ipc.internal import Admitted, Done, Prefilled, Produced, Refused
from sparkd.ipc.messages import Choice, Message, Part
from sparkd.text.answer import joined
from sparkd.worker.sampler import best, choice, sample, wants_best
from sparkd.worker.scheduler import Piece, Scheduler, Step
from sparkd.worker.sequences import Sequence
from sparkd.worker.state import PoolSize, StatePool

#: Steps that the reported speed is an average of.
_RECENT = 64
_UNCOUNTED: AbstractContextManager[None] = nullcontext()


@dataclass(slots=True)
class Speed:
    """Tokens and seconds of recent steps of one kind."""

    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        self.recent.append((tokens, seconds))

    @property
    def per_second(self) -> float:
        """Tokens per second over recent steps; 0 without any."""
        seconds = sum(s for _, s in self.recent)
        return sum(t for t, _ in self.recent) / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts the rows of a step went to: ids int16 [expert layers, rows, top_k].

    Of each row: whether it is decode, and the tag of its traffic.
    """

    step: int
    decode: NDArray[np.uint8]
    tags: list[str]
    ids: NDArray[np.int16]


@dataclass(slots=True)
class Counts:
    """Totals since the worker began."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0


class Engine:
    """Runs up to `limit` sequences at a time on one executor; others wait in the order they came.

    Only the first `vocab` ids are ever chosen. Each step of the executor runs inside `steps`, which counts it.
    """

    def __init__(
        self,
        executor: Executor,
        pool: StatePool,
        scheduler: Scheduler,
        end_tokens: Collection[int],
        limit: int,
        *,
        vocab: int,
        steps: AbstractContextManager[None] = _UNCOUNTED,
        routed: Callable[[Routing], None] = lambda routing: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._scheduler = scheduler
        self._vocab = vocab
        self._steps = steps
        self._end_tokens = frozenset(end_tokens)
        self._limit = limit
        self._routed = routed
        self._clock = clock
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.counts = Counts()
        self.prefill = Speed()
        self.decode = Speed()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """Sequences that hold state."""
        return len(self._running)

    @property
    def chunk_rows(self) -> int:
        """Rows of the next chunk of a prompt."""
        return self._scheduler.chunk_rows

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence on; it is admitted in a later step."""
        self._waiting.append(sequence)

    def abort(self, request: int) -> list[Message]:
        """End a request between two steps; nothing when it is not here."""
        for sequence in (*self._waiting, *self._running):
            if sequence.request == request:
                return [self._end(sequence, "cancelled", "")]
        return []

    def step(self) -> list[Message]:
        """Admit, run one step, and report. Does nothing when there is nothing to do."""
        events = self._admit()
        step = self._scheduler.plan(self._running)
        if step is None:
            return events
        batch = self._batch(step)
        began = self._clock()
        try:
            with self._steps:
                result = self._executor.step(batch)
        except RecordRefused as error:
            return events + self._give_up(step, error)
        now = self._clock()
        self._account(step, now - began, result.waited_s)
        self._count_hits(step, result)
        self._report_routing(step, result)
        logits = iter(result.logits if result.best is None else result.best)
        for piece in step.pieces:
            events += self._advance(piece, logits, now)
        return events

    def _admit(self) -> list[Message]:
        events: list[Message] = []
        while self._waiting and len(self._running) < self._limit:
            sequence = self._waiting[0]
            sequence.holding = self._pool.admit(sequence.positions)
            if sequence.holding is None:
                if not self._running:
                    events.append(self._fail(sequence, self._too_large(sequence.positions)))
                    continue
                break
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.clock.started = self._clock()
            assert sequence.sampling.seed is not None
            prompt = sequence.tokens[: sequence.prompt].tolist()
            events.append(Admitted(sequence.request, prompt, sequence.sampling.seed))
            if sequence.stops.stopped is not None or sequence.outputs >= sequence.max_tokens:
                events.append(self._finish(sequence, "length"))
        return events

    def _batch(self, step: Step) -> Batch:
        tokens: list[int] = []
        segments = []
        wanted = []
        simple = True
        for piece in step.pieces:
            sequence = piece.sequence
            assert sequence.holding is not None
            start, end = sequence.computed, sequence.computed + piece.rows
            self._pool.extend(sequence.holding, end)
            kind = RowKind.DECODE if sequence.decoding else RowKind.PREFILL
            segments.append(Segment(start, piece.rows, sequence.holding.tables, sequence.holding.record, kind))
            tokens += sequence.tokens[start:end]
            if end == len(sequence.tokens):
                wanted.append(len(tokens) - 1)
                simple = simple and sequence.logprobs is None and wants_best(sequence.sampling)
        best_of = self._vocab if simple else 0
        return Batch(np.array(tokens, np.int32), tuple(segments), np.array(wanted, np.int32), best_of)

    def _account(self, step: Step, seconds: float, waited: float) -> None:
        self._scheduler.measured(step, seconds - waited)
        self.counts.steps += 1
        if step.chunk is None:
            self.decode.add(len(step.decode), seconds)
        else:
            self.prefill.add(step.chunk.rows, seconds)
            self.counts.prompt_tokens += step.chunk.rows

    def _count_hits(self, step: Step, result: StepResult) -> None:
        layers, _, top_k = result.experts.shape
        for piece, waited in zip(step.decode, result.waited.tolist(), strict=False):
            piece.sequence.uses += layers * top_k
            piece.sequence.waited += waited

    def _give_up(self, step: Step, error: RecordRefused) -> list[Message]:
        """A step failed half-way: fail the sequences that need the record, and let the others begin again.

        Their ids are known, their state is not: it has advanced by a part of the step.
        """
        events: list[Message] = []
        row = 0
        others = []
        for piece in step.pieces:
            if any(row <= needs < row + piece.rows for needs in error.rows):
                events.append(self._fail(piece.sequence, error))
            else:
                others.append(piece.sequence)
            row += piece.rows
        for sequence in reversed(others):
            self._drop(sequence)
            sequence.begin_again()
            self._waiting.appendleft(sequence)
        return events

    def _report_routing(self, step: Step, result: StepResult) -> None:
        rows = result.experts.shape[1]
        decode = np.zeros(rows, np.uint8)
        decode[: len(step.decode)] = 1
        tags = [piece.sequence.traffic_tag for piece in step.pieces for _ in range(piece.rows)]
        self._routed(Routing(self.counts.steps, decode, tags, result.experts))

    def _advance(self, piece: Piece, logits: Iterator[NDArray[np.float32] | np.int32], now: float) -> list[Message]:
        sequence = piece.sequence
        assert sequence.holding is not None
        sequence.computed += piece.rows
        self._pool.trim(sequence.holding, sequence.computed)
        events: list[Message] = []
        if sequence.computed <= sequence.known:
            events.append(Prefilled(sequence.request, sequence.computed, sequence.known))
        if sequence.unread:
            return events
        found = next(logits)
        sequence.clock.first_token = sequence.clock.first_token or now
        row = found[: self._vocab] if isinstance(found, np.ndarray) else None
        try:
            if row is None:
                token = best(int(found))
            else:
                token = sample(row, sequence.sampling, sequence.outputs, sequence.tokens, sequence.prompt)
        except RequestError as error:
            return [*events, self._fail(sequence, error)]
        chosen = None if row is None or sequence.logprobs is None else choice(row, token, sequence.logprobs)
        return events + self._take(sequence, token, chosen)

    def _take(self, sequence: Sequence, token: int, chosen: Choice | None) -> list[Message]:
        """The consequences of a new output token."""
        if token in self._end_tokens and not sequence.ignore_eos:
            return [self._finish(sequence, "stop")]
        index = sequence.outputs
        sequence.tokens.append(token)
        self.counts.output_tokens += 1
        text, stopped = sequence.stops.push(sequence.detokenizer.push(token))
        parts: list[Part] = []
        thought = False
        if sequence.answer is not None:
            # The tag that ends a thought is its last token.
            thought = sequence.answer.thinking
            parts, text = sequence.answer.push(text), ""
        events: list[Message] = [Produced(sequence.request, index, token, text, chosen, parts, thought)]
        if stopped is not None:
            events.append(self._end(sequence, "stop", ""))
        elif sequence.outputs == sequence.max_tokens:
            events.append(self._finish(sequence, "length"))
        return events

    def _finish(self, sequence: Sequence, reason: str) -> Message:
        """End a sequence after its last token: what was held back comes out, unless a stop string is in it."""
        text, stopped = sequence.stops.push(sequence.detokenizer.finish())
        if stopped is None:
            rest, stopped = sequence.stops.finish()
            text += rest
        return self._end(sequence, reason if stopped is None else "stop", text)

    def _end(self, sequence: Sequence, reason: str, text: str) -> Message:
        self._drop(sequence)
        self.counts.finished += 1
        assert sequence.sampling.seed is not None
        parts: list[Part] = []
        if sequence.answer is not None:
            cut = reason != "stop" or sequence.stops.asked is not None
            parts, text = joined([*sequence.answer.push(text), *sequence.answer.finish(cut=cut)]), ""
        return Done(
            request=sequence.request,
            reason=reason,
            stop=sequence.stops.asked,
            text=text,
            prompt_tokens=sequence.prompt,
            output_tokens=sequence.outputs,
            seed=sequence.sampling.seed,
            timings=sequence.clock.timings(self._clock()),
            hit_rate=sequence.hit_rate,
            parts=parts,
        )

    def _fail(self, sequence: Sequence, error: SparkError) -> Message:
        self._drop(sequence)
        self.counts.failed += 1
        return Refused(sequence.request, error.code, str(error))

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence.holding is not None:
            self._pool.release(sequence.holding)
            sequence.holding = None

    def _too_large(self, positions: int) -> RequestError:
        layout, size = self._pool.layout, self._pool.size
        need = PoolSize.worst_case(layout, 1, positions, self._pool.chunk).bytes(layout)
        return RequestError(
            f"the state of {positions} positions takes {need} bytes, all the worker has are {size.bytes(layout)}",
            fix="shorten the prompt or ask for fewer tokens",
        )
