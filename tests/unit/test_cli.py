"""The sparkd command: settings from flags, errors in one line, a quick start of its help."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sparkd import config
from sparkd.cli import main
from sparkd.config import keys


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("SPARKD_CONFIG", "SPARKD_MODEL_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_every_setting_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for section, key, _ in config.keys():  # noqa: SIM118
        assert f"--{section}-{key}".replace("_", "-") + " " in shown


@pytest.mark.parametrize("command", ["serve", "demo", "config"])
def test_every_command_shows_an_example_in_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "example:\n  sparkd" in capsys.readouterr().out


def test_config_prints_the_settings_as_toml_that_can_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--cpu-threads", "3", "--calibration-enabled", "false", "--log-level", "error"]) == 0
    shown = capsys.readouterr().out
    assert "threads = 3                               # flag --cpu-threads\n" in shown
    assert 'type = "f16"                              # default\n' in shown
    settings = config.Settings.of(tomllib.loads(shown))
    assert (settings.cpu.threads, settings.calibration.enabled, settings.log.level) == (3, False, "error")


def test_config_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[kv]\ntype = 'f32'\n")
    assert main(["config", "--json", "--config", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["kv"] == {"type": "f32"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve"], "no model to serve; name one: sparkd serve MODEL.gguf, or set model.path"),
        (["serve", "a.gguf", "--cpu-threads", "many"], "--cpu-threads: 'many' is not a whole number"),
        (["serve", "a.gguf", "--kv-type", "q8_0"], "flag --kv-type: kv.type = 'q8_0' is refused: "),
        (["serve", "a.gguf", "--model-path", "b.gguf"], "flag --model-path: the model is named twice"),
        (["serve", "a.gguf", "--memory-vram-gib", "-8"], "memory.vram_gib = -8.0 is refused"),
        (["serve", "a.gguf", "--worker-device", "tpu"], "worker.device = 'tpu' is refused: it is one of"),
        (["config", "--config", "/nonexistent.toml"], "/nonexistent.toml: cannot be read: "),
        (["serve", "\udcff.gguf"], "--model-path: '\\udcff.gguf' is not UTF-8"),
        (["serve", "a.gguf", "--run-dir", "/\udcff"], "is not UTF-8; choose another run directory"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_1(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("sparkd: ") and says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["serve", "a", "b"], ["demo", "--max-tokens", "0"], ["serve", "--run-dir", ""]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: sparkd")


def test_help_says_of_every_setting_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    said = config.documented()
    assert set(said) == {(section, key) for section, key, _ in keys()}
    assert all(len(line) > 15 for line in said.values())
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(line.split()) in shown for line in said.values() if "-" not in line)


def test_help_loads_neither_tables_nor_arithmetic() -> None:
    program = "import sys, sparkd.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "sparkd.cli" in loaded
    assert not {"numpy", "torch", "rich", "tokenizers", "zmq"} & set(loaded)
