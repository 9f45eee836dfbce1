"""An app without manners, in a process of its own: it reads, dawdles, cancels, leaves and dies, at random.

    churn_app.py SOCKET JOBS SEED SECONDS

JOBS is a JSON file: a list of [keyword arguments of a request, its token ids when it is alone]. Every request that is
read to its end must have exactly those, every other a beginning of them, and no word of the daemon may take longer
than `HANG_S`. What was done is written to standard output, one JSON line each: what, and its longest wait in seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from spark_client import Client, Stream

#: Seconds without a word after which an app counts as hanging.
HANG_S = 10.0
_DAWDLE_S = 0.03


class App:
    """One connection after the other, until its time is over."""

    def __init__(self, socket: str, jobs: list[tuple[dict, list[int]]], seed: int) -> None:
        self._socket = socket
        self._jobs = jobs
        self._chance = random.Random(seed)
        self._waited = 0.0
        self._client = self._connect()

    def live(self, seconds: float) -> None:
        """Do one thing after another for so long."""
        end = time.monotonic() + seconds
        ways = [self.read, self.dawdle, self.several, self.cancel, self.leave, self.die]
        while time.monotonic() < end:
            self._waited = 0.0
            way = self._chance.choices(ways, weights=[4, 2, 2, 4, 2, 2])[0]
            way()
            self._say(way.__name__)
        self._client.close()

    def read(self) -> None:
        """Read one answer as fast as it comes."""
        stream, alone = self._start()
        self._take(stream)
        self._same(stream, alone)

    def dawdle(self) -> None:
        """Read slower than the daemon writes."""
        stream, alone = self._start()
        while self._take(stream, 1):
            time.sleep(self._chance.uniform(0, _DAWDLE_S))
        self._same(stream, alone)

    def several(self) -> None:
        """Have three answers on the way at once."""
        started = [self._start() for _ in range(3)]
        for stream, alone in started:
            self._take(stream)
            self._same(stream, alone)

    def cancel(self) -> None:
        """Cancel at any moment: queued, in prefill, in decode, at the end."""
        stream, alone = self._start()
        self._take(stream, self._chance.randrange(30))
        stream.cancel()
        self._take(stream)
        if stream.finish_reason != "cancelled":
            return self._same(stream, alone)
        assert stream.tokens == alone[: len(stream.tokens)], "a cancelled request has other tokens than alone"

    def leave(self) -> None:
        """Say goodbye in the middle of an answer, and come back."""
        stream, alone = self._start()
        self._take(stream, self._chance.randrange(30))
        assert stream.tokens == alone[: len(stream.tokens)], "a request that was left has other tokens than alone"
        self._client.close()
        self._client = self._connect()

    def die(self) -> None:
        """End without a word; whoever started this process starts another."""
        stream, _ = self._start()
        self._take(stream, self._chance.randrange(30))
        self._say("die")
        os.kill(os.getpid(), signal.SIGKILL)

    def _connect(self) -> Client:
        return Client(self._socket, timeout=HANG_S, name="churn")

    def _start(self) -> tuple[Stream, list[int]]:
        asked, alone = self._chance.choice(self._jobs)
        began = time.monotonic()
        stream = self._client.generate(**asked)
        self._waited = max(self._waited, time.monotonic() - began)
        return stream, alone

    def _take(self, stream: Stream, events: int | None = None) -> bool:
        """Take so many events of a stream, or all; false when there are no more."""
        source = stream.events(HANG_S)
        while events is None or events > 0:
            began = time.monotonic()
            if next(source, None) is None:
                return False
            self._waited = max(self._waited, time.monotonic() - began)
            events = None if events is None else events - 1
        return True

    def _same(self, stream: Stream, alone: list[int]) -> None:
        assert stream.finish_reason in ("stop", "length"), f"request ended with {stream.finish_reason}"
        assert stream.tokens == alone, f"request {stream.request} has other tokens than alone"

    def _say(self, what: str) -> None:
        # One write for a line and its end: others write to the same file, and apps die between two.
        sys.stdout.write(json.dumps({"what": what, "waited_s": round(self._waited, 3)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    where, jobs, seed, seconds = sys.argv[1:]
    App(where, json.loads(Path(jobs).read_text()), int(seed)).live(float(seconds))
