"""A worker that goes wrong on order: the first id of a prompt says how. Everything else it does as any other worker."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from sparkd.ipc.internal import Encode, Prefilled, Produced, Refused
from sparkd.ipc.messages import Message
from sparkd.worker import main, server
from sparkd.worker.desk import Order, Result, Texts
from sparkd.worker.engine import Engine
from sparkd.worker.sequences import Sequence

#: Ends while it reads the prompt; ends at the 20th token; takes long over its 5th; never comes back from its 10th.
DEADLY_PROMPT, DEADLY, SLOW, STUCK = 301, 302, 303, 304
#: A text that no worker survives.
DEADLY_TEXT = "the text that ends it"
#: Seconds of the long step: longer than heartbeats may be missing.
SLOW_S = 2.5


class OddEngine(Engine):
    """Knows the orders of the requests that are here."""

    def submit(self, sequence: Sequence) -> None:
        self.orders = {**getattr(self, "orders", {}), sequence.request: sequence.tokens[0]}
        super().submit(sequence)

    def step(self) -> list[Message]:
        if "ODD_FIRST_TOKEN" in os.environ and (0 in getattr(self, "orders", {})):
            self.abort(0)
            return [Refused(0, "request", "the logits are not finite")]
        events = super().step()
        for event in events:
            if isinstance(event, Prefilled | Produced):
                self._obey(self.orders[event.request], event)
        return events

    def _obey(self, order: int, event: Prefilled | Produced) -> None:
        index = event.index if isinstance(event, Produced) else -1
        if order == DEADLY_PROMPT or (order == DEADLY and index >= 20):
            os.kill(os.getpid(), signal.SIGKILL)
        if order == SLOW and index == 5:
            time.sleep(SLOW_S)
        if order == STUCK and index == 10:
            done = Path(os.environ["TMPDIR"]) / "stuck"
            if not done.exists():
                done.touch()
                time.sleep(3600)


class OddTexts(Texts):
    """Cannot tokenize everything."""

    def work(self, order: Order) -> Result | None:
        if isinstance(order, Encode) and order.text == DEADLY_TEXT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().work(order)


server.Engine, server.Texts = OddEngine, OddTexts

if __name__ == "__main__":
    sys.exit(main.main())
