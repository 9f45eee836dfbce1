"""sparkctl against a daemon that only speaks the protocol, and on model files."""

from __future__ import annotations

import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_client import messages as m
from sparkctl.main import main
from sparkctl.plain import printable

ROOT = Path(__file__).parent.parent.parent
DEMO_MODEL = ROOT / "sparkd" / "demo" / "spark-demo-laguna.gguf"
Start = Callable[..., Any]


def control_codes(text: str) -> set[str]:
    return {c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160}


def test_generate_streams_the_text_to_standard_output(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = fake_daemon()
    sampling = ["--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--seed", "7"]
    ends = ["--max-tokens", "9", "--stop", "a", "--stop", "b", "--ignore-eos"]
    assert main(["generate", "--socket", str(daemon.path), *sampling, *ends, "Once", "upon"]) == 0
    assert capsys.readouterr().out == "Hello, world\n"
    (ask,) = daemon.of(m.Generate)
    assert (ask.prompt, ask.stop, ask.max_tokens, ask.ignore_eos) == ("Once upon", ["a", "b"], 9, True)
    assert ask.sampling == m.Sampling(0.5, 3, 0.9, 7)


def test_generate_offers_every_option_of_sampling(fake_daemon: Start) -> None:
    daemon = fake_daemon()
    changed = ["--repetition-penalty", "1.2", "--presence-penalty", "-0.5", "--frequency-penalty", "0.25"]
    changed += ["--min-p", "0.1", "--logit-bias", "5=-3", "--logit-bias", "6=2.5"]
    rest = ["--logprobs", "2", "--json", "--deadline", "30"]
    assert main(["generate", "--socket", str(daemon.path), *changed, *rest, "x"]) == 0
    (ask,) = daemon.of(m.Generate)
    assert (ask.logprobs, ask.timeout_s) == (2, 30.0)
    bias = [m.Bias(5, -3.0), m.Bias(6, 2.5)]
    assert ask.sampling == m.Sampling(0.0, 0, 1.0, None, 0.1, 1.2, -0.5, 0.25, bias)


def test_generate_as_json_tells_text_tokens_and_figures(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = fake_daemon()
    assert main(["generate", "--socket", str(daemon.path), "--json", "Once"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "Hello, world",
        "tokens": [0, 1, 2],
        "finish_reason": "stop",
        "stop_string": None,
        "seed": 42,
        "usage": {"prompt_tokens": 3, "output_tokens": 3},
        "timings": {"queued_s": 0.5, "prefill_s": 0.25, "decode_s": 2.0},
        "hit_rate": None,
    }


def test_chat_sends_system_and_user_messages(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = fake_daemon()
    assert main(["generate", "--socket", str(daemon.path), "--chat", "--system", "Be brief.", "--think", "Hi"]) == 0
    (ask,) = daemon.of(m.Generate)
    assert ask.chat == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ask.options == {"enable_thinking": True}


def test_the_thought_goes_beside_the_answer(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = fake_daemon(plan=lambda ask: ["Who asks", "?", "</th", "ink>", "It is", " I."])
    assert main(["generate", "--socket", str(daemon.path), "--chat", "--think", "Hi"]) == 0
    assert capsys.readouterr() == ("It is I.\n", "Who asks?\n")
    assert main(["generate", "--socket", str(daemon.path), "--chat", "--think", "--json", "Hi"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["text"], told["reasoning"]) == ("It is I.", "Who asks?")


def test_a_daemon_is_named_by_its_run_directory_as_well(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = fake_daemon()
    assert main(["generate", "--run-dir", str(daemon.path.parent), "x"]) == 0
    assert capsys.readouterr().out == "Hello, world\n"


def test_what_a_command_does_not_know_is_refused_with_the_usage_of_that_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (["generate", "--bogus", "x"], ["generate", "--system", "x", "hi"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert capsys.readouterr().err.startswith("usage: sparkctl generate")


def test_the_prompt_may_come_from_standard_input(
    fake_daemon: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = fake_daemon()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a\nfile")))
    assert main(["generate", "--socket", str(daemon.path)]) == 0
    assert daemon.of(m.Generate)[0].prompt == "from a\nfile"


def test_stats_go_to_standard_error(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--socket", str(fake_daemon().path), "--stats", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello, world\n"
    assert captured.err == "3 prompt tokens in 0.25 s, 3 output tokens in 2.00 s (1.5/s), finished: stop, seed 42\n"


def test_a_refused_request_is_one_line_and_exit_code_1(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = fake_daemon(plan=lambda ask: m.Failed(None, None, "request", "the prompt has 9 tokens, the limit is 8"))
    assert main(["generate", "--socket", str(daemon.path), "x"]) == 1
    assert capsys.readouterr().err == "sparkctl: the prompt has 9 tokens, the limit is 8\n"


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["generate", "x"],
        ["tokenize", "x"],
        ["clients"],
        ["requests"],
        ["stop"],
        ["drain"],
        ["reload"],
        ["logs"],
    ],
)
def test_without_a_daemon_one_line_names_the_path_and_the_command_to_start(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--socket", str(tmp_path / "none.sock")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"sparkctl: no daemon at {tmp_path / 'none.sock'}: ") and "sparkd serve" in error
    assert error.count("\n") == 1


def test_input_that_is_not_utf8_is_refused_where_it_is_wrong(
    fake_daemon: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert main(["generate", "--socket", str(fake_daemon().path)]) == 1
    assert capsys.readouterr().err.startswith("sparkctl: standard input is not UTF-8: ")


def test_numbers_too_large_for_the_protocol_are_named(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(fake_daemon().path)
    for option, field in (("--max-tokens", "generate.max_tokens"), ("--seed", "generate.sampling.seed")):
        assert main(["generate", "--socket", path, option, "9" * 30, "x"]) == 1
        assert capsys.readouterr().err.startswith(f"sparkctl: {field}: cannot be packed: ")


def test_what_a_file_is_called_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "\x1b[31m\nred.gguf")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not control_codes(error)


@pytest.mark.parametrize("path", [".", "file"])
def test_a_path_that_is_no_socket_is_named(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["status", "--socket", path]) == 1
    assert capsys.readouterr().err.startswith(f"sparkctl: {path} is not a socket")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["generate", "--top-k", "x"],
        ["generate", "--logit-bias", "5", "x"],
        ["generate", "--logprobs", "3", "x"],
        ["generate", "--deadline", "-1", "x"],
        ["generate", "--think", "x"],
        ["status", "--watch", "0"],
        ["status", "--socket", "a", "--run-dir", "b"],
        ["logs", "-n", "-5"],
        *(["status", "--timeout", seconds] for seconds in ("0", "-1", "nan", "inf", "1e300", "x")),
        *(["generate", *option, "x"] for option in (["--stop", "\udcff"], ["--system", "\udcff"], ["--socket", ""])),
        ["generate", "\udcff"],
        ["tokenize", "\udcff"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: sparkctl")


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "generate",
        "tokenize",
        "inspect",
        "config",
        "clients",
        "requests",
        "stop",
        "drain",
        "reload",
        "logs",
        "doctor",
    ],
)
def test_every_command_shows_an_example_in_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"example:\n  sparkctl {command}" in capsys.readouterr().out


def test_tokenize_prints_ids(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(fake_daemon().path)
    assert main(["tokenize", "--socket", path, "ab"]) == 0
    assert main(["tokenize", "--socket", path, "--json", "ab"]) == 0
    plain, rest = capsys.readouterr().out.split("\n", 1)
    assert plain == "97 98" and json.loads(rest) == {"tokens": [97, 98]}


def test_interrupting_generate_cancels_the_request_and_exits_130(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)
    command = [sys.executable, "-m", "sparkctl", "generate", "--socket", str(daemon.path), "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(12) == b"Hello, world"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == b""
    assert daemon.wait_for(m.Cancel) == [m.Cancel(1000)]


def test_a_reader_that_leaves_early_causes_no_complaint(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=lambda ask: ["line\n" * 1000] * 500)
    command = [sys.executable, "-m", "sparkctl", "generate", "--socket", str(daemon.path), "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1
    assert len(daemon.wait_for(m.Cancel)) == 1


@pytest.mark.parametrize("module", ["sparkctl", "sparkd.cli"])
@pytest.mark.parametrize("redirections", ["<&- >&- 2>&-", "<&-", ">&-", "2>&-"])
def test_closed_streams_lead_nowhere(module: str, redirections: str) -> None:
    arguments = ["config", "--config", "/dev/null"] if module == "sparkd.cli" else ["inspect", str(DEMO_MODEL)]
    command = f"{shlex.join([sys.executable, '-m', module, *arguments])} {redirections}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["sparkctl", "sparkd.cli"])
def test_output_that_cannot_be_written_is_said_in_one_line(module: str) -> None:
    arguments = ["config", "--config", "/dev/null"] if module == "sparkd.cli" else ["inspect", str(DEMO_MODEL)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and done.stderr.count("\n") == 1


def test_inspect_shows_what_the_file_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DEMO_MODEL), "--layers"]) == 0
    shown = capsys.readouterr().out
    for expected in ("laguna", "64, 4 used for a token", "blk.N.ffn_gate_exps.weight", "256 × 64 × 64", "29,696 B"):
        assert expected in shown
    assert not control_codes(shown)


def test_inspect_as_json_is_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DEMO_MODEL), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["architecture"], report["experts"], len(report["layers"])) == ("laguna", 64, 9)


def test_inspect_names_a_file_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model")
    assert main(["inspect", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"sparkctl: {path}: ") and error.count("\n") == 1


def test_config_shows_origins_and_how_the_running_daemon_differs(
    fake_daemon: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKD_CPU_THREADS", "3")
    monkeypatch.setattr("sparkctl.tables.PIPE_WIDTH", 200)
    monkeypatch.chdir(tmp_path)
    path = Path("own.toml")
    path.write_text("[kv]\ntype = 'f32'\n")
    daemon = fake_daemon(status={"settings": {"cpu": {"threads": 2}, "kv": {"type": "f32"}}})
    assert main(["config", "--config", str(path), "--socket", str(daemon.path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["cpu.threads", "3", "environment", "variable", "SPARKD_CPU_THREADS", "2"] in rows
    assert ["kv.type", '"f32"', f"{path}:2", "same"] in rows
    assert main(["config", "--json", "--config", str(path), "--socket", str(daemon.path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cpu.threads"] == {"value": 3, "from": "environment variable SPARKD_CPU_THREADS", "running": 2}


def test_config_needs_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = str(tmp_path / "none.sock")
    assert main(["config", "--json", "--config", os.devnull, "--socket", none]) == 0
    assert json.loads(capsys.readouterr().out)["limits.queue"] == {"value": 256, "from": "default"}


def test_text_from_elsewhere_cannot_steer_a_terminal() -> None:
    hostile = "a\x1b[2J\rb\x9b\u202ec\td\né"
    assert printable(hostile) == "a\\x1b[2J\\rb\\x9b\\u202ec\td\né"


def test_generated_control_characters_do_not_reach_a_terminal(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=lambda ask: ["red: \x1b[31m"])
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sparkctl", "generate", "--socket", str(daemon.path), "x"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # A pty whose other end is closed reports EIO, not an empty read.
            pass
        assert process.wait() == 0
    os.close(ours)
    assert shown == b"red: \\x1b[31m\r\n"


def test_help_loads_neither_tables_nor_arithmetic() -> None:
    program = "import sys, sparkctl.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "sparkctl.main" in loaded
    assert not {"numpy", "torch", "rich", "tokenizers"} & set(loaded)
