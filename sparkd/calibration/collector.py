"""The calibrator at work: takes routed ids from workers, counts them, and says what it counted."""

from __future__ import annotations

import logging

import numpy as np

from sparkd.calibration.counts import RoutingCounts, RoutingError, busiest_share
from sparkd.ipc.child import Child, ChildArguments
from sparkd.ipc.messages import Json, MessageError, Ready, Routed, StatusAnswer, StatusQuery
from sparkd.ipc.sockets import Channel

_IDLE_S = 5.0
#: Messages that are taken before the supervisor is listened to again.
_BURST = 256
_log = logging.getLogger(__name__)


class Collector:
    """Counts of one model, kept in memory: ids and counts, never tokens."""

    def __init__(self, child: Child, given: ChildArguments) -> None:
        """Bind the socket."""
        self._child = child
        self._socket = Channel.pull(child.context, given.run_dir.calibrator)
        self._model = ""
        self._counts: RoutingCounts | None = None
        self._steps = 0
        self._refused = 0

    def run(self) -> None:
        """Collect until told to stop."""
        self._child.send(Ready(self._child.role))
        while self._child.running:
            for query in self._child.wait(_IDLE_S, self._socket.socket):
                if isinstance(query, StatusQuery):
                    self._child.send(StatusAnswer(query.job, self._child.role, self.status()))
            for _ in range(_BURST):
                if not self._take():
                    break

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def status(self) -> dict[str, Json]:
        """Counts per [expert layer][expert], and the share of work of the busiest quarter of each layer's experts."""
        status: dict[str, Json] = {"model": self._model, "steps": self._steps, "refused": self._refused}
        counts = self._counts
        if counts is not None:
            kinds = (("decode", counts.decode, counts.decode_rows), ("prefill", counts.prefill, counts.prefill_rows))
            for kind, table, rows in kinds:
                status[kind] = {"rows": rows, "counts": table.tolist(), "busiest_quarter": busiest_share(table)}
        return status

    def _take(self) -> bool:
        """Count one message; false when there is none."""
        try:
            msg = self._socket.receive()
            if msg is None:
                return False
            if not isinstance(msg, Routed):
                raise MessageError(f"the calibrator takes no {type(msg).__name__}")
            self._count(msg)
        except (MessageError, RoutingError) as error:
            self._refused += 1
            _log.warning("dropped a message of a worker: %s", error)
        return True

    def _count(self, msg: Routed) -> None:
        shape = (msg.layers, msg.rows, msg.top_k)
        if min(shape) < 0 or len(msg.ids) != 2 * msg.layers * msg.rows * msg.top_k or len(msg.decode) != msg.rows:
            raise RoutingError(f"{len(msg.ids)} bytes of ids and {len(msg.decode)} of rows are not {shape}")
        if self._counts is None or self._model != msg.model or self._counts.decode.shape != (msg.layers, msg.experts):
            self._counts = RoutingCounts(msg.layers, msg.experts)
            self._model = msg.model
        ids = np.frombuffer(msg.ids, "<i2").reshape(shape)
        self._counts.add(ids, np.frombuffer(msg.decode, np.uint8) != 0)
        self._steps += 1
