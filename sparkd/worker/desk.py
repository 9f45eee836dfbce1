"""Text work beside the steps: a thread that turns orders into sequences, so that nobody's decoding waits for a prompt.

Orders go in with `put`; results come out with `take`, in order, and `woken` (an inproc socket of the worker's context)
becomes readable when there is one.

What makes ids of texts takes longer to build than all the rest of a worker. So it is built with the first order that
needs it, or before that, when the worker has nothing else to do (`Prepare`): what is resumed has ids and need not wait.
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from sparkd.errors import RequestError, SparkError
from sparkd.gguf.metadata import Metadata
from sparkd.ipc.internal import Decode, Decoded, Encode, Encoded, Refused, Run
from sparkd.ipc.messages import MAX_BYTES, Json
from sparkd.text.answer import AnswerParser
from sparkd.text.detokenizer import Detokenizer
from sparkd.text.markup import THINK, THINK_END, syntax_of
from sparkd.text.stop import StopMatcher, end_texts
from sparkd.text.tokenizer import Tokenizer
from sparkd.worker.limits import Room, check_length, check_logprobs, check_sampling, check_tokens
from sparkd.worker.sequences import Clock, Sequence

if TYPE_CHECKING:
    from sparkd.text.chat import ChatTemplate

#: Bits of a drawn seed: few enough to survive a JSON reader that knows only doubles.
_SEED_BITS = 53
#: Ids that one answer may hold; on the wire an id takes up to five bytes.
_MAX_IDS = MAX_BYTES // 8
#: Ids at a prompt's end in which the beginning of a thought shows.
_TAIL = 16


@dataclass(frozen=True, slots=True)
class Prepare:
    """Build what texts will need."""


Order = Run | Encode | Decode | Prepare
Result = Sequence | Refused | Encoded | Decoded


class Texts:
    """What the desk knows of the model: its tokenizer, its chat template, its limits. Works for one thread."""

    def __init__(self, metadata: Metadata, room: Room, vocab: int) -> None:
        """SparkError when the file describes no tokenizer. A missing template only fails requests that need it."""
        self.tokenizer = Tokenizer.from_metadata(metadata)
        self.room = room
        #: Ids that mean something: embeddings may have more rows than the vocabulary has tokens.
        self.vocab = min(vocab, len(self.tokenizer))
        self._ends = end_texts(metadata.text("general.architecture"))
        self._syntax = syntax_of(metadata.text("general.architecture"))
        self._metadata = metadata
        self._template: ChatTemplate | SparkError | None = None

    @property
    def chat(self) -> dict[str, Json]:
        """What conversations may hold, for the status document; empty until the template has been built."""
        match self._template:
            case None:
                return {}
            case SparkError() as missing:
                return {"tools": False, "options": [], "missing": str(missing)}
            case template:
                return {"tools": template.tools, "options": [*template.options], "missing": ""}

    def work(self, order: Order) -> Result | None:
        """Do one order; one that cannot be done is Refused (or Encoded, Decoded with the error)."""
        if isinstance(order, Prepare):
            self.tokenizer.prepare()
            self._chat()
            return None
        if isinstance(order, Encode):
            try:
                return Encoded(order.job, self._ids(order))
            except SparkError as error:
                return Encoded(order.job, None, str(error))
        if isinstance(order, Decode):
            try:
                return self._decode(order)
            except SparkError as error:
                return Decoded(order.job, "", None, str(error))
        try:
            return self._sequence(order)
        except SparkError as error:
            return Refused(order.request, error.code, str(error))

    def close(self) -> None:
        """End the template's process."""
        if self._template is not None and not isinstance(self._template, SparkError):
            self._template.close()

    def _chat(self) -> ChatTemplate | SparkError:
        from sparkd.text.chat import ChatTemplate

        if self._template is None:
            try:
                self._template = ChatTemplate.from_metadata(self._metadata, self.tokenizer)
            except SparkError as error:
                self._template = error
        return self._template

    def _ids(self, order: Encode) -> list[int]:
        if order.text is None:
            ids = self._render(order.chat or [], order.tools, order.options)
        else:
            ids = self.tokenizer.encode(order.text, special=order.special)
        if len(ids) > _MAX_IDS:
            raise RequestError(f"the text has {len(ids)} tokens, an answer may hold {_MAX_IDS}", fix="cut the text")
        return ids

    def _decode(self, order: Decode) -> Decoded:
        check_tokens(order.tokens, self.vocab)
        pieces = [list(self.tokenizer.token_bytes(token)) for token in order.tokens] if order.pieces else None
        return Decoded(order.job, self.tokenizer.decode(order.tokens), pieces)

    def _sequence(self, run: Run) -> Sequence:
        clock = Clock(arrived=time.monotonic())
        check_sampling(run.sampling, self.vocab)
        check_logprobs(run.logprobs)
        prompt = self._prompt(run)
        max_tokens = run.max_tokens
        if run.shorten:
            max_tokens = max(1, min(max_tokens, self.room.positions - len(prompt)))
        check_length(len(prompt), max_tokens, self.room, shorten=run.shorten)
        check_tokens(prompt, self.vocab)
        seed = run.sampling.seed if run.sampling.seed is not None else secrets.randbits(_SEED_BITS)
        detokenizer = Detokenizer(self.tokenizer, shown=self._syntax.texts if run.parts else frozenset())
        stops = StopMatcher(run.stop, () if run.ignore_eos else self._ends)
        answer = self._answer(run, prompt) if run.parts else None
        for token in run.produced:
            text, _ = stops.push(detokenizer.push(token))
            if answer is not None:
                answer.push(text)
        return Sequence(
            run.request,
            array("i", [*prompt, *run.produced]),
            len(prompt),
            max_tokens,
            dataclasses.replace(run.sampling, seed=seed),
            run.logprobs,
            run.ignore_eos,
            detokenizer,
            stops,
            clock,
            answer,
            run.traffic_tag,
        )

    def _prompt(self, run: Run) -> list[int]:
        if run.tokens is not None:
            return run.tokens
        if run.prompt is not None:
            return self.tokenizer.encode(run.prompt, special=True, bos=True)
        prompt = self._render(run.chat or [], run.tools, run.options)
        return prompt if run.call is None else self._begin_call(prompt, run.call)

    def _render(
        self, chat: list[dict[str, Json]], tools: list[dict[str, Json]] | None, options: dict[str, Json]
    ) -> list[int]:
        template = self._chat()
        if isinstance(template, SparkError):
            raise template
        return template.encode(chat, tools, options=options).ids

    def _begin_call(self, prompt: list[int], tool: str) -> list[int]:
        """The prompt with the first words of the answer: a call of `tool`, or of any if that is empty."""
        tags, name = self._syntax.opener(tool)
        if self._in_thought(prompt):
            tags = f"\n{THINK_END}\n\n{tags}"
        return [*prompt, *self.tokenizer.encode(tags, special=True), *self.tokenizer.encode(name, special=False)]

    def _answer(self, run: Run, prompt: list[int]) -> AnswerParser:
        if run.call is None:
            return AnswerParser(self._syntax, run.tools or [], thinking=self._in_thought(prompt))
        begun = "".join(self._syntax.opener(run.call))
        return AnswerParser(self._syntax, run.tools or [], thinking=False, begun=begun)

    def _in_thought(self, prompt: list[int]) -> bool:
        return self.tokenizer.decode(prompt[-_TAIL:]).rstrip().endswith(THINK)


class Desk:
    """The thread and its two queues."""

    _ADDRESS = "inproc://desk"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], texts: Texts) -> None:
        self._texts = texts
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self.woken = context.socket(zmq.PULL)
        self.woken.bind(self._ADDRESS)
        self._waker = context.socket(zmq.PUSH)
        self._waker.connect(self._ADDRESS)
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)
        self._thread.start()

    def put(self, order: Order) -> None:
        """Have `order` done after those that wait."""
        self._orders.put(order)

    def take(self) -> list[Result]:
        """What has been done since the last call. What the thread could not survive is raised here."""
        while self.woken.poll(0):
            self.woken.recv()
        results: list[Result] = []
        while not self._results.empty():
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    def close(self) -> None:
        """End the thread after the order it is doing."""
        self._orders.put(None)
        self._thread.join()
        self.woken.close(linger=0)

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                result = self._texts.work(order)
                if result is not None:
                    self._results.put(result)
                    self._waker.send(b"")
        except BaseException as error:
            self._results.put(error)
            self._waker.send(b"")
        finally:
            self._waker.close(linger=0)
            self._texts.close()
