"""Apps that record routed steps: their questions go to the calibrator, one answer comes for each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from sparkd.errors import BusyError
from sparkd.ipc.internal import TraceAnswer, TraceQuery
from sparkd.ipc.messages import Failed, Message, TraceReply, TraceRequest

#: Questions that wait for the calibrator.
MAX_WAITING = 16


class Traces:
    """Who waits for the answer to which question."""

    def __init__(self) -> None:
        self._last = 0
        self._waiting: dict[int, tuple[bytes, int]] = {}

    def ask(self, peer: bytes, msg: TraceRequest) -> TraceQuery:
        """The question for the calibrator. BusyError when too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} recordings wait for the calibrator already", fix="try again later")
        self._last += 1
        self._waiting[self._last] = (peer, msg.tag)
        return TraceQuery(self._last, msg.after)

    def answered(self, msg: TraceAnswer) -> Iterator[tuple[bytes, Message]]:
        """The answer for the app that asked, if it is still there."""
        asked = self._waiting.pop(msg.job, None)
        if asked is not None:
            peer, tag = asked
            yield peer, TraceReply(tag, msg.last, msg.missed, msg.layers, msg.experts, msg.tags, msg.data)

    def fail(self, code: str, reason: str) -> Iterator[tuple[bytes, Message]]:
        """The calibrator is gone: what those hear who wait for it."""
        waiting, self._waiting = self._waiting, {}
        for peer, tag in waiting.values():
            yield peer, Failed(tag, None, code, reason, True)

    def gone(self, peer: bytes) -> None:
        """An app has left."""
        self._waiting = {job: asked for job, asked in self._waiting.items() if asked[0] != peer}
