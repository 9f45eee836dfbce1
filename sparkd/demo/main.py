"""`sparkd demo`: serve the built-in model, ask it about several domains, show where its experts lie, stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from spark_client import Client, ConnectionFailed, RequestFailed, SparkClientError, Stream
from sparkctl import status
from sparkctl.plain import printable
from sparkctl.tables import console
from sparkd.demo.prompts import PROMPTS, Prompt
from sparkd.errors import UnavailableError

MODEL = Path(__file__).with_name("spark-demo-laguna.gguf")
#: The model is 19 MiB: a start that takes longer than this has failed.
_START_S = 60.0
_STOP_S = 10.0
_COUNTS_S = 10.0
_PR_SET_PDEATHSIG = 1


def run(max_tokens: int) -> int:
    """Give the tour; answers have `max_tokens` at most. UnavailableError when the daemon does not come up, or fails."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = console()
    out.print(f"Serving the built-in model {MODEL.name} ({MODEL.stat().st_size / 1e6:.0f} MB).")
    out.print("It is tiny: it knows the form of its domains, and what it says is mostly wrong.", style="dim")
    try:
        with tempfile.TemporaryDirectory(prefix="sparkd-") as folder, _daemon(Path(folder)) as client:
            _tour(out, client, max_tokens)
    except SparkClientError as error:
        raise UnavailableError(str(error)) from error
    return 0


def _tour(out: Console, client: Client, max_tokens: int) -> None:
    for number, prompt in enumerate(PROMPTS):
        if number == 0 or PROMPTS[number - 1].domain != prompt.domain:
            out.print()
            out.rule(Text(prompt.domain), align="left", characters="─" if out.encoding == "utf-8" else "-")
        _answer(out, client, prompt, max_tokens)
    out.print()
    status.show(_final_status(client))


def _final_status(client: Client) -> dict[str, Any]:
    """The status, with all steps counted by the calibrator: on a busy machine it may take a moment to tell."""
    deadline = time.monotonic() + _COUNTS_S
    while True:
        document = client.status()
        counted = document["calibration"].get("steps", 0)
        if counted >= document["speed"]["steps"] or time.monotonic() > deadline:
            return document


def _answer(out: Console, client: Client, prompt: Prompt, max_tokens: int) -> None:
    out.print(Text(prompt.text), style="bold", end="\n" if prompt.chat else "", soft_wrap=True)
    with _ask(client, prompt, max_tokens) as stream:
        for text in stream:
            out.file.write(printable(text))
            out.file.flush()
    cut = " ..." if stream.finish_reason == "length" else ""
    assert stream.usage is not None and stream.timings is not None
    speed = stream.usage.output_tokens / max(stream.timings.decode_s, 1e-9)
    out.print(f"{cut}\n[{stream.usage.output_tokens} tokens, {speed:.0f} per second]", style="dim")


def _ask(client: Client, prompt: Prompt, max_tokens: int) -> Stream:
    if prompt.chat:
        return client.chat([{"role": "user", "content": prompt.text}], max_tokens=max_tokens)
    return client.generate(prompt.text, max_tokens=max_tokens)


@contextlib.contextmanager
def _daemon(folder: Path) -> Iterator[Client]:
    """A daemon with default settings in `folder`, and a client of it; both are gone afterwards."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARKD_")}
    environment |= {"STATE_DIRECTORY": str(folder)}
    log = folder / "log"
    run_dir = folder / "run"
    serve = ["serve", str(MODEL), "--config", os.devnull, "--run-dir", str(run_dir)]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches the demo alone, which then stops the daemon in order.
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "sparkd.cli", *serve],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        with _connect(run_dir / "client.sock", daemon, log) as client:
            yield client
    finally:
        daemon.terminate()
        try:
            daemon.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _connect(path: Path, daemon: subprocess.Popen[bytes], log: Path) -> Client:
    """Wait until the daemon serves. UnavailableError says what it said last when it ends, or takes too long."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            raise UnavailableError(f"the daemon ended: {_last_line(log)}")
        with contextlib.suppress(ConnectionFailed, RequestFailed):
            client = Client(path, name="sparkd demo")
            if _is_ready(client.status()):
                return client
            client.close()
        time.sleep(0.05)
    raise UnavailableError(f"the daemon was not ready after {_START_S:.0f} s: {_last_line(log)}")


def _is_ready(document: dict[str, Any]) -> bool:
    return document.get("state") == "ready"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return printable(next((line for line in reversed(lines) if line.strip()), "it said nothing"))


def _end_with_parent() -> None:
    """In the daemon's process: have the kernel send SIGTERM when the demo ends, whatever ends it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
