"""What has come of one request, for both clients: messages in, text and figures out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spark_client import messages as m
from spark_client.errors import ConnectionFailed, RequestFailed, SparkClientError

_T = TypeVar("_T")


def checked(answer: m.Message | SparkClientError, kind: type[_T], path: Path) -> _T:
    """The daemon's answer if it is a `kind`, else the error that it means."""
    if isinstance(answer, SparkClientError):
        raise answer
    if isinstance(answer, m.Failed):
        raise RequestFailed(answer.code, answer.message, answer.retry)
    if isinstance(answer, m.Welcome) and answer.version != m.VERSION:
        raise ConnectionFailed(f"{path}: the daemon does not speak version {m.VERSION} of the protocol")
    if not isinstance(answer, kind):
        raise SparkClientError(f"{path}: unexpected answer {type(answer).__name__}")
    return answer


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `reasoning_tokens` are those of the output that belong to the thought."""

    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Call:
    """A call of a tool: `arguments` is the JSON text of an object, whole when the request is over (not cut off)."""

    name: str
    arguments: str = ""


def text_of(chunk: m.Chunk) -> str:
    """The text of the answer in a chunk, also where it came in parts."""
    return chunk.text + "".join(part.text for part in chunk.parts or () if part.kind == "text")


class Output:
    """The output of one request so far.

    `request` is the daemon's id, `position` the number of requests before it when it was accepted. `text`, `tokens` and
    (where log probabilities were asked for) `choices` grow; where parts were asked for so do `reasoning` and `calls`,
    and `text` has neither thought nor call. `finish_reason` (stop, length, cancelled), `stop_string`, `usage`,
    `timings`, `seed` and `hit_rate` (share of the experts its tokens went to that were there) are None until the end.
    """

    def __init__(self, accepted: m.Accepted) -> None:
        self.request = accepted.request
        self.position = accepted.position
        self.tokens: list[int] = []
        self.choices: list[m.Choice] = []
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.usage: Usage | None = None
        self.timings: m.Timings | None = None
        self.seed: int | None = None
        self.hit_rate: float | None = None
        self.calls: list[Call] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._error: SparkClientError | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The thought so far."""
        return "".join(self._reasoning)

    @property
    def _open(self) -> bool:
        """Whether more may come."""
        return self.finish_reason is None and self._error is None

    def _take(self, msg: m.Message | SparkClientError) -> m.Progress | m.Chunk | m.Finished | None:
        """Note a message of the request; returns it if it is one for the app. Failures are kept for the next read."""
        if isinstance(msg, SparkClientError):
            self._error = msg
        elif isinstance(msg, m.Failed):
            self._error = RequestFailed(msg.code, msg.message, msg.retry)
        elif isinstance(msg, m.Chunk):
            self.tokens.extend(msg.tokens)
            self.choices.extend(msg.choices or ())
            self._text.append(text_of(msg))
            for part in msg.parts or ():
                self._take_part(part)
            return msg
        elif isinstance(msg, m.Finished):
            self.finish_reason = msg.reason
            self.stop_string = msg.stop
            self.usage = Usage(msg.prompt_tokens, msg.output_tokens, msg.reasoning_tokens)
            self.timings = msg.timings
            self.seed = msg.seed
            self.hit_rate = msg.hit_rate
            return msg
        elif isinstance(msg, m.Progress):
            return msg
        return None

    def _take_part(self, part: m.Part) -> None:
        if part.kind == "reasoning":
            self._reasoning.append(part.text)
        elif part.kind == "call":
            if part.name:
                self.calls.append(Call(part.name))
            self.calls[-1].arguments += part.text
