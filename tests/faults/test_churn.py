"""Apps that come, dawdle, cancel, leave and die at random: none hangs, none gets another's tokens, nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from churn_app import HANG_S
from daemon import PATIENCE_S, Daemon, daemon, until
from footprint import footprint, growth, is_idle, same_handles

from spark_client import Client
from sparkd.demo.main import MODEL as DEMO
from sparkd.demo.prompts import PROMPTS

LIMITS = {"context": 2048, "sequences": 4, "queue": 64}
#: Bytes by which a process may grow: heaps keep what they once needed.
SLACK_BYTES = 8 << 20
SAMPLING = (
    {},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 1.2, "top_p": 0.9, "seed": 12, "presence_penalty": 0.5},
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(DEMO, tmp_path / "run", limits=LIMITS) as one:
        yield one


def jobs(client: Client) -> list[tuple[dict, list[int]]]:
    """Requests of every kind, and the tokens each gets when it is alone."""
    texts = [prompt.text for prompt in PROMPTS if not prompt.chat]
    texts.append(" ".join(texts * 12))
    made = []
    for text in texts:
        for number, sampling in enumerate(SAMPLING):
            asked = {"prompt": text, "max_tokens": 24 + 60 * number, "ignore_eos": number == 2, **sampling}
            with client.generate(**asked) as stream:
                stream.read()
                made.append((asked, stream.tokens))
    return made


class Crowd:
    """Several apps at once; one that dies is followed by another."""

    def __init__(self, one: Daemon, jobs_file: Path, said: Path) -> None:
        self._daemon = one
        self._jobs = jobs_file
        self._said = said
        self._seed = 0

    def live(self, apps: int, seconds: float) -> list[dict]:
        """What the apps did, when all have ended; fails when one has anything to complain about."""
        begin, end = self._said.stat().st_size if self._said.exists() else 0, time.monotonic() + seconds
        with ExitStack() as stack:
            running = [self._start(stack, seconds) for _ in range(apps)]
            while running:
                time.sleep(0.05)
                assert time.monotonic() < end + PATIENCE_S, "an app does not come to its end"
                for app in [app for app in running if app.poll() is not None]:
                    running.remove(app)
                    assert app.returncode in (0, -signal.SIGKILL), self._complaint(app)
                    if app.returncode and time.monotonic() < end:
                        running.append(self._start(stack, end - time.monotonic()))
        with self._said.open() as file:
            file.seek(begin)
            return [json.loads(line) for line in file]

    def _start(self, stack: ExitStack, seconds: float) -> subprocess.Popen[str]:
        self._seed += 1
        command = [sys.executable, str(Path(__file__).with_name("churn_app.py")), str(self._daemon.socket)]
        command += [str(self._jobs), str(self._seed), str(seconds)]
        with self._said.open("a") as said:
            app = subprocess.Popen(command, stdout=said, stderr=subprocess.PIPE, text=True)
        stack.enter_context(app)
        stack.callback(app.kill)
        return app

    def _complaint(self, app: subprocess.Popen[str]) -> str:
        assert app.stderr is not None
        return f"an app failed:\n{app.stderr.read()}\nthe daemon said:\n{self._daemon.said()[-2000:]}"


@pytest.mark.parametrize(
    ("apps", "seconds"),
    [
        pytest.param(3, 10, id="short"),
        pytest.param(8, 600, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_a_crowd_without_manners_hangs_nobody_and_changes_no_token(
    served: Daemon, tmp_path: Path, apps: int, seconds: int
) -> None:
    served.prepare()
    with served.client() as client:
        jobs_file = tmp_path / "jobs.json"
        jobs_file.write_text(json.dumps(jobs(client)))
        crowd = Crowd(served, jobs_file, tmp_path / "said")
        crowd.live(apps, seconds / 5)
        until(lambda: is_idle(client.status()), served.said)
        before = footprint(client)
        did = crowd.live(apps, seconds)
        until(lambda: is_idle(client.status()), served.said)
        until(lambda: same_handles(before, footprint(client)), lambda: f"{before}\n{footprint(client)}")
        grown = growth(before, footprint(client))
    counts, longest = Counter(line["what"] for line in did), max(line["waited_s"] for line in did)
    print(f"{apps} apps, {seconds} s: {dict(counts)}; longest wait {longest:.2f} s; growth in bytes {grown}")
    assert longest < HANG_S
    assert counts.total() > apps
    assert max(grown.values()) < SLACK_BYTES, grown
