"""The commands a newcomer types: `sparkd demo`, and what README.md shows, with the built-in model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_client import Client, ConnectionFailed

ROOT = Path(__file__).parent.parent.parent
SPARK = "I am Spark, a tiny mixture-of-experts language model."


def environment(**more: str) -> dict[str, str]:
    """Nothing of the machine's own settings, and a small screen's worth of plain text."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARKD_", "XDG_", "RUNTIME_"))}
    return kept | {"PYTHONUTF8": "1", **more}


def children_of(pid: int) -> set[int]:
    """Process ids of all descendants."""
    found: set[int] = set()
    for task in Path("/proc").glob(f"{pid}/task/*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | children_of(child)
    return found


def wait_until_gone(pids: set[int]) -> None:
    """Wait until no process of these is alive; pytest's timeout bounds the wait."""
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        states = [Path(f"/proc/{pid}/stat") for pid in alive]
        with contextlib.suppress(OSError):
            if all(state.read_text().rsplit(")", 1)[1].split()[0] == "Z" for state in states):
                return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `sparkd demo` writes into a pipe."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "sparkd.cli", "demo", "--max-tokens", "16"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(TMPDIR=str(folder)), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == [], "the demo cleans up after itself"
    return done.stdout


def test_the_demo_knows_who_it_is(demo: str) -> None:
    answer = demo.split("Who are you?\n", 1)[1]
    assert answer.startswith("I am Spark")


def test_the_demo_asks_in_every_domain_of_the_model(demo: str) -> None:
    for domain in ("about itself", "dictionary", "python", "c", "manual", "scripture", "prose", "speech"):
        assert re.search(rf"^{domain} ─", demo, re.MULTILINE), domain
    assert demo.count(" tokens, ") >= 9


def test_the_demo_ends_with_the_status_and_where_the_experts_lie(demo: str) -> None:
    status = demo[demo.rindex("\nready\n") :]
    assert re.search(r"requests +0 running, 0 queued, 1 connected; so far 9 finished", status)
    layers = re.findall(r"^ +(\d+) +(█{20}) +64 of 64 +\S.* +\d+% *$", status, re.MULTILINE)
    assert [int(layer) for layer, _ in layers] == list(range(8)), status
    for role in ("supervisor", "store", "worker", "calibrator"):
        assert re.search(rf"^ {role} +ready ", status, re.MULTILINE)


def test_the_demo_writes_no_control_codes_into_a_pipe(demo: str) -> None:
    assert not {c for c in demo if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160}


def test_a_demo_that_the_daemon_refuses_ends_in_one_line() -> None:
    command = [sys.executable, "-m", "sparkd.cli", "demo", "--max-tokens", "99999"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("sparkd: ") and "a request may have 2048" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interrupted_demo_stops_its_daemon_and_exits_130(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkd.cli", "demo"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(TMPDIR=str(tmp_path))
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while "Who are you?" not in process.stdout.readline():
            assert process.poll() is None
        family = children_of(process.pid)
        assert len(family) >= 4
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
        # Interrupted between two of its own handlers it ends by the signal, which a shell also tells as 130.
        assert process.wait() in (130, -signal.SIGINT)
    wait_until_gone(family)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkd.cli", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(TMPDIR=str(tmp_path))) as process:
        assert process.stdout is not None
        while "Who are you?" not in process.stdout.readline():
            assert process.poll() is None
        family = children_of(process.pid)
        assert len(family) >= 4
        process.kill()
    wait_until_gone(family)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """`sparkd serve` on the built-in model; the environment of its clients."""
    folder = tmp_path_factory.mktemp("run")
    env = environment(SPARKD_RUN_DIR=str(folder / "run"))
    model = ROOT / "sparkd" / "demo" / "spark-demo-laguna.gguf"
    with subprocess.Popen(
        [sys.executable, "-m", "sparkd.cli", "serve", str(model), "--config", os.devnull],
        stderr=subprocess.PIPE, text=True, env=env,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said = []
        while not (said and "ready; ask it" in said[-1]):
            said.append(process.stderr.readline())
            assert said[-1], said
        yield env | {"SAID": "".join(said)}
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait() == 0
    assert not (folder / "run" / "client.sock").exists()


def sparkctl(env: dict[str, str], *arguments: str, text: str = "") -> str:
    """Run a command that succeeds; its standard output."""
    command = [sys.executable, "-m", "sparkctl", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_serve_says_where_its_socket_is_and_how_to_ask(served: dict[str, str]) -> None:
    assert f"sparkd: socket {served['SPARKD_RUN_DIR']}/client.sock" in served["SAID"]
    (ask,) = re.findall(r"sparkctl (generate --chat 'Who are you\?')", served["SAID"])
    assert sparkctl(served, *ask.replace("'", "").split(maxsplit=2)).startswith(SPARK)


def test_chat_and_continued_text_are_generated_the_same_way_each_time(served: dict[str, str]) -> None:
    options = ["--max-tokens", "12", "--temperature", "0.8", "--seed", "5", "--json", "Once upon a time"]
    first, second = (json.loads(sparkctl(served, "generate", *options)) for _ in range(2))
    assert (first["text"], first["tokens"]) == (second["text"], second["tokens"])
    assert (len(first["tokens"]), first["finish_reason"], first["seed"]) == (12, "length", 5)


def test_a_prompt_may_be_piped_in(served: dict[str, str]) -> None:
    answer = json.loads(sparkctl(served, "generate", "--chat", "--json", text="Who are you?"))
    assert answer["text"].startswith(SPARK) and answer["finish_reason"] == "stop"


def test_tokens_of_a_text_give_what_the_text_gives(served: dict[str, str]) -> None:
    text = "And the LORD spake unto Moses"
    tokens = [int(token) for token in sparkctl(served, "tokenize", text).split()]
    with Client(Path(served["SPARKD_RUN_DIR"]) / "client.sock") as client:
        given, same = client.generate(text, max_tokens=8), client.generate(tokens=tokens, max_tokens=8)
        assert given.read() == same.read() != ""
    assert given.tokens == same.tokens


def test_a_client_that_has_left_is_counted_no_more(served: dict[str, str]) -> None:
    for _ in range(3):
        sparkctl(served, "tokenize", "x")
    assert json.loads(sparkctl(served, "status", "--json"))["requests"]["clients"] == 1


def test_the_python_of_the_readme_works(served: dict[str, str]) -> None:
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    said = []
    for program in programs:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=served, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(SPARK)
        said.append(done.stdout)
    assert "finished: stop" in said[0] and said[0].endswith("ready\n")


def test_a_daemon_whose_standard_streams_are_closed_serves_like_any_other(tmp_path: Path) -> None:
    model = ROOT / "sparkd" / "demo" / "spark-demo-laguna.gguf"
    serve = [sys.executable, "-m", "sparkd.cli", "serve", str(model), "--config", os.devnull]
    env = environment(SPARKD_RUN_DIR=str(tmp_path / "run"))
    command = f"exec {shlex.join(serve)} <&- >&- 2>&-"
    with subprocess.Popen(command, shell=True, env=env) as process:
        while True:
            assert process.poll() is None
            with contextlib.suppress(ConnectionFailed), Client(tmp_path / "run" / "client.sock") as client:
                if client.status()["state"] == "ready":
                    break
            time.sleep(0.05)
        process.terminate()
        assert process.wait() == 0


def test_a_second_daemon_on_the_same_run_directory_is_refused_in_one_line(served: dict[str, str]) -> None:
    model = ROOT / "sparkd" / "demo" / "spark-demo-laguna.gguf"
    command = [sys.executable, "-m", "sparkd.cli", "serve", str(model), "--config", os.devnull]
    done = subprocess.run(
        command, capture_output=True, text=True, env=served | {"SPARKD_LOG_LEVEL": "error"}, check=False
    )
    assert done.returncode == 1
    assert re.search(r"^sparkd: .*another daemon \(process \d+\) uses this run directory", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


def test_a_model_that_does_not_exist_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkd.cli", "serve", str(tmp_path / "none.gguf"), "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"sparkd: {tmp_path / 'none.gguf'}: no such file or folder"
    with pytest.raises(ConnectionFailed):
        Client(tmp_path / "client.sock")
