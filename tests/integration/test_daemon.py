"""A whole daemon answers apps: right tokens, the same for everybody, and nothing left behind."""

from __future__ import annotations

import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from daemon import Daemon, alive, certain, daemon, until

from spark_client import Client, RequestFailed, messages
from sparkd.demo.main import MODEL as DEMO

LIMITS = {"context": 4096, "sequences": 2, "queue": 8}
PROMPTS = ("p1", "p17", "p130")


@pytest.fixture(scope="module", params=["laguna-tiny-s1-f32", "qwen35moe-tiny-s1-f32"])
def served(
    request: pytest.FixtureRequest,
    model_path: Callable[[str], Path],
    vectors_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Daemon, np.lib.npyio.NpzFile]]:
    """A daemon for each architecture, and the golden vectors of its model."""
    run_dir = tmp_path_factory.mktemp("daemon") / "run"
    with daemon(model_path(request.param), run_dir, limits=LIMITS) as one:
        yield one, np.load(vectors_path(request.param))


@pytest.fixture
def laguna(model_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Daemon]:
    with daemon(model_path("laguna-tiny-s1-f32"), tmp_path / "run", limits=LIMITS) as one:
        yield one


def greedy(client: Client, prompt: list[int], count: int = 32) -> list[int]:
    with client.generate(tokens=prompt, max_tokens=count, ignore_eos=True) as stream:
        stream.read()
        assert stream.finish_reason == "length" and stream.usage is not None
        assert (stream.usage.prompt_tokens, stream.usage.output_tokens) == (len(prompt), count)
        return stream.tokens


def prompt_of(vectors: np.lib.npyio.NpzFile, name: str) -> list[int]:
    return vectors[f"{name}_tokens"].tolist()


@pytest.mark.parametrize("name", [*PROMPTS, "p600"])
def test_the_tokens_are_the_golden_ones(served: tuple[Daemon, np.lib.npyio.NpzFile], name: str) -> None:
    one, vectors = served
    expected = certain(vectors, name)
    with one.client() as client:
        assert greedy(client, prompt_of(vectors, name))[: len(expected)] == expected


def test_apps_get_the_tokens_they_get_alone_whoever_else_is_there(
    served: tuple[Daemon, np.lib.npyio.NpzFile],
) -> None:
    one, vectors = served
    alone = {}
    for name in PROMPTS:
        with one.client() as client:
            alone[name] = greedy(client, prompt_of(vectors, name), 60)
    together: dict[tuple[str, int], list[int]] = {}

    def app(name: str, number: int) -> None:
        with one.client() as client:
            together[name, number] = greedy(client, prompt_of(vectors, name), 60)

    apps = [threading.Thread(target=app, args=(name, number)) for number in range(2) for name in PROMPTS]
    for thread in apps:
        thread.start()
    for thread in apps:
        thread.join()
    assert together == {(name, number): alone[name] for number in range(2) for name in PROMPTS}


def test_a_seed_decides_sampled_tokens_and_a_drawn_one_is_told(
    served: tuple[Daemon, np.lib.npyio.NpzFile],
) -> None:
    one, vectors = served
    prompt = prompt_of(vectors, "p17")

    def sampled(client: Client, seed: int | None) -> tuple[list[int], int | None]:
        stream = client.generate(tokens=prompt, temperature=1.0, top_p=0.9, seed=seed, max_tokens=24, ignore_eos=True)
        stream.read()
        return stream.tokens, stream.seed

    with one.client() as client:
        first, drawn = sampled(client, None)
        assert drawn is not None and sampled(client, drawn) == (first, drawn)
        assert sampled(client, drawn + 1)[0] != first


def test_a_cancelled_request_ends_and_the_others_go_on(served: tuple[Daemon, np.lib.npyio.NpzFile]) -> None:
    one, vectors = served
    with one.client() as client:
        alone = greedy(client, prompt_of(vectors, "p17"), 200)
        endless = client.generate(tokens=prompt_of(vectors, "p1"), max_tokens=4000, ignore_eos=True)
        beside = client.generate(tokens=prompt_of(vectors, "p17"), max_tokens=200, ignore_eos=True)
        next(iter(endless.events()))
        endless.cancel()
        endless.read()
        assert endless.finish_reason == "cancelled"
        beside.read()
        assert beside.tokens == alone
        until(lambda: client.status()["requests"]["running"] == 0)
        assert client.status()["memory"]["state_used_bytes"] == 0


def test_an_app_that_leaves_takes_its_requests_along(served: tuple[Daemon, np.lib.npyio.NpzFile]) -> None:
    one, vectors = served
    script = (
        "import sys; from spark_client import Client; c = Client(sys.argv[1]);"
        "s = [c.generate(tokens=[1], max_tokens=4000, ignore_eos=True) for _ in range(3)];"
        "next(iter(s[0].events())); print('running', flush=True); sys.stdin.read()"
    )
    app = subprocess.Popen(
        [sys.executable, "-c", script, str(one.socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert app.stdout is not None and app.stdout.readline() == b"running\n"
    app.kill()
    app.communicate()
    with one.client() as client:
        until(lambda: client.status()["requests"]["running"] == 0)
        assert client.status()["requests"]["queued"] == 0
        assert greedy(client, prompt_of(vectors, "p1"), 4) == vectors["p1_greedy"][:4].tolist()


def test_stop_strings_and_limits_end_an_answer(served: tuple[Daemon, np.lib.npyio.NpzFile]) -> None:
    one, vectors = served
    prompt = prompt_of(vectors, "p17")
    with one.client() as client:
        stream = client.generate(tokens=prompt, max_tokens=40, ignore_eos=True)
        text = stream.read()
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        stopped = client.generate(tokens=prompt, max_tokens=40, ignore_eos=True, stop=[stop])
        assert stopped.read() == text[: text.index(stop)]
        assert (stopped.finish_reason, stopped.stop_string) == ("stop", stop)
        with pytest.raises(RequestFailed, match=r"16 tokens .* 4090, 4106 .* 4096 "):
            client.generate(tokens=[1] * 16, max_tokens=4090)
        refused = client.generate("word " * 5000, max_tokens=8)
        with pytest.raises(RequestFailed, match="4096"):
            refused.read()
        assert greedy(client, prompt, 4) == vectors["p17_greedy"][:4].tolist()


def test_text_and_tokens_agree(served: tuple[Daemon, np.lib.npyio.NpzFile]) -> None:
    one, _ = served
    with one.client() as client:
        tokens = client.tokenize("Some words, and more.")
        by_text = client.generate("Some words, and more.", max_tokens=8, ignore_eos=True)
        by_text.read()
        assert by_text.usage is not None and by_text.usage.prompt_tokens - len(tokens) in (0, 1)


def test_the_status_says_what_is_where(served: tuple[Daemon, np.lib.npyio.NpzFile]) -> None:
    one, vectors = served
    with one.client() as client:
        before = client.status()["calibration"].get("steps", 0)
        greedy(client, prompt_of(vectors, "p17"), 8)
        until(lambda: client.status()["calibration"].get("steps", 0) > before)
        status = client.status()
    assert (status["state"], status["reason"]) == ("ready", "")
    assert status["residency"]["resident"] == status["residency"]["records"] > 0
    assert all(layer["resident"] == layer["records"] == 8 for layer in status["residency"]["layers"])
    assert status["loading"]["done_bytes"] == status["loading"]["total_bytes"] == status["loading"]["read_bytes"]
    assert {p["role"] for p in status["processes"]} == {"supervisor", "store", "worker", "calibrator"}
    assert all(p["state"] == "ready" and p["rss_bytes"] > 0 for p in status["processes"])
    assert list(status["executor"]["types"]) == ["F32"] and status["executor"]["types"]["F32"].startswith("float, ")
    assert status["executor"]["threads"] == 1
    assert re.search(r' info worker: computes: isa=\S+ threads=1 F32="float, ', one.said())
    assert status["speed"]["decode_tokens_s"] > 0 and status["speed"]["prefill_tokens_s"] > 0
    calibration = status["calibration"]
    assert calibration["dropped_steps"] == calibration["refused"] == 0
    assert len(calibration["decode"]["counts"]) == len(status["residency"]["layers"])
    rows = calibration["prefill"]["rows"]
    assert all(sum(layer) == 2 * rows for layer in calibration["prefill"]["counts"])


def test_a_chat_is_answered_the_same_way_twice_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "Who are you? <|im_end|>"}]
    with daemon(DEMO, tmp_path / "run", limits=LIMITS) as one, one.client() as client:
        first, second = (client.chat(question, max_tokens=12) for _ in range(2))
        assert first.read() == second.read() != ""
        assert first.tokens == second.tokens
        with pytest.raises(RequestFailed, match="role"):
            client.chat([{"role": "nobody", "content": "x"}], max_tokens=4).read()


def test_the_largest_messages_an_app_may_send_hurt_nobody(laguna: Daemon) -> None:
    """Defaults that an app leaves out are filled in: what goes to the worker is larger than what came."""
    pids = laguna.pids()
    with zmq.Context() as context, context.socket(zmq.DEALER) as app:
        app.linger = 0
        app.connect(f"ipc://{laguna.socket}")
        app.send(messages.encode(messages.Hello([messages.VERSION], "raw")))
        assert isinstance(messages.decode(app.recv()), messages.Welcome)
        for kind, field, wrap, said in (
            ("generate", "prompt", str, "233017 tokens .* may have 4096 "),
            ("generate", "chat", lambda text: [{"role": "user", "content": text}], "more than 4194304 characters"),
            ("tokenize", "text", str, "longer than the limit"),
        ):
            body = {"v": messages.VERSION, "t": kind, "tag": 1}
            packed = msgpack.packb(body | {field: wrap("x" * 65536)})
            long = "x" * (65536 + messages.MAX_BYTES - len(packed))
            app.send(msgpack.packb(body | {field: wrap(long)}))
            while not isinstance(answer := messages.decode(app.recv()), messages.Failed):
                assert isinstance(answer, messages.Accepted | messages.Pong)
            assert re.search(said, answer.message)
    assert laguna.pids() == pids


def test_stopping_at_once_ends_requests_with_the_reason_and_leaves_nothing_behind(laguna: Daemon) -> None:
    pids = laguna.pids()
    with laguna.client() as client:
        stream = client.generate(tokens=[1], max_tokens=4000, ignore_eos=True)
        next(iter(stream.events()))
        laguna.process.terminate()
        until(lambda: client.status()["state"] == "stopping")
        assert laguna.stop() == 0
        with pytest.raises(RequestFailed, match="being stopped"):
            stream.read()
    assert not any(alive(pid) for pid in pids)
    assert list(laguna.run_dir.iterdir()) == []


def test_the_run_directory_belongs_to_one_live_daemon(laguna: Daemon, model_path: Callable[[str], Path]) -> None:
    assert stat.S_IMODE(laguna.run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(laguna.socket.stat().st_mode) == 0o660
    second = Daemon(model_path("laguna-tiny-s1-f32"), laguna.run_dir)
    assert second.process.wait(60) == 1
    assert f"process {laguna.process.pid}" in second.said()
    assert laguna.status()["state"] == "ready"


def test_interrupting_the_terminal_stops_in_order(laguna: Daemon) -> None:
    pids = laguna.pids()
    laguna.process.send_signal(signal.SIGINT)
    assert laguna.process.wait(60) == 0
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "/nowhere/model.gguf"),
        ({"memory": {"host_gib": 0.001}}, "memory.host_gib"),
        ({"socket": {"group": "no-such-group"}}, "no-such-group"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    settings: dict, named: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_path("laguna-tiny-s1-f32") if settings else "/nowhere/model.gguf"
    one = Daemon(model, tmp_path / "run", **settings)
    assert one.process.wait(60) == 1
    assert named in one.said() and one.said().count("\n") == 1
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("module", ["supervisor", "store", "calibration", "worker"])
def test_no_process_imports_torch_and_the_supervisor_knows_no_model_code(module: str) -> None:
    heavy = ["torch", "cupy"] + ["numpy", "sparkd.gguf", "sparkd.models", "tokenizers"] * (module == "supervisor")
    script = f"import sys, sparkd.{module}.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
