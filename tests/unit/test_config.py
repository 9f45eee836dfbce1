"""Settings: one set of keys in file, environment and flags; anything else is refused with its place."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sparkd import config
from sparkd.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_config_toml_documents_every_key_with_its_default() -> None:
    documented = tomllib.loads((ROOT / "sparkd" / "config.toml").read_text())
    assert documented == config.Settings().to_dict()
    assert config.load([ROOT / "sparkd" / "config.toml"], {}) == config.Settings()


def test_settings_survive_the_way_to_a_child() -> None:
    settings = config.load([], {"SPARKD_CPU_THREADS": "3", "SPARKD_MEMORY_HOST_GIB": "1.5"})
    assert config.Settings.from_json(settings.to_json()) == settings
    assert (settings.cpu.threads, settings.memory.host_gib) == (3, 1.5)


def test_flags_win_over_variables_and_variables_over_files(tmp_path: Path) -> None:
    path = write(tmp_path, "[cpu]\nthreads = 1\n[limits]\nqueue = 1\nsequences = 1\n")
    variables = {"SPARKD_CPU_THREADS": "2", "SPARKD_LIMITS_QUEUE": "2"}
    settings = config.load([path], variables, {("cpu", "threads"): "3"})
    assert (settings.cpu.threads, settings.limits.queue, settings.limits.sequences) == (3, 2, 1)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[cpu]\nthreads = -1\n", 2, "cpu.threads = -1"),
        ("[cpu]\n\n\nthread = 1\n", 4, "unknown key cpu.thread"),
        ("[gpu]\nx = 1\n", 1, "unknown section [gpu]"),
        ("\n[cpu]\nthreads = 'two'\n", 3, "cpu.threads = 'two'"),
        ("[cpu]\nthreads = 1.5\n", 2, "cpu.threads = 1.5"),
        ("[kv]\ntype = 'q8_0'\n", 2, "kv.type = 'q8_0'"),
        ("[memory]\nvram_gib = -1\n", 2, "memory.vram_gib = -1"),
        ("[worker]\ndevice = 'tpu'\n", 2, "worker.device = 'tpu'"),
        ("[memory]\nhuge_pages = 'always'\n", 2, "memory.huge_pages = 'always'"),
        ("[numerics]\nprefill = 'fast'\n", 2, "numerics.prefill = 'fast'"),
        ("kv.type = 'x'\n", 1, "kv.type = 'x'"),
        ("kv = { type = 'x' }\n", 1, "kv.type = 'x'"),
        ("threads = 3\n", 1, "'threads' is not a section"),
        ("[calibration]\nenabled = 1\n", 2, "calibration.enabled = 1"),
        ("[memory]\nhost_gib = nan\n", 2, "memory.host_gib = nan"),
    ],
)
def test_wrong_files_are_refused_with_file_and_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config.load([path], {})
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ") and says in message and "\n" not in message


@pytest.mark.parametrize("content", [b"[cpu\n", b"\xff\xfe", b"[cpu]\nthreads = 1\nthreads = 2\n"])
def test_files_that_are_not_toml_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config.load([path], {})
    assert str(caught.value).startswith(f"{path}: not TOML: ") and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        config.load([tmp_path / "none.toml"], {})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SPARKD_CPU_THREADS", "many", "'many' is not a whole number"),
        ("SPARKD_CPU_THREADS", "5000", "it is a whole number from 0 to 1024"),
        ("SPARKD_CPU_THREAD", "1", "unknown setting"),
        ("SPARKD_CALIBRATION_ENABLED", "maybe", "true or false"),
    ],
)
def test_wrong_variables_are_refused_by_name(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load([], {name: value})
    assert name in str(caught.value) and says in str(caught.value)


def test_a_users_file_that_cannot_be_looked_for_is_named_with_the_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + "x" * 300)
    with pytest.raises(ConfigError, match=r"config\.toml: cannot be looked for: .*--config FILE"):
        config.load()


def test_a_user_without_a_home_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert all(path.is_relative_to("/etc") for path in config.config_files())


@pytest.mark.parametrize("section", config.Settings().to_dict())
def test_a_whole_number_is_a_number_and_nothing_else_is_converted(section: str) -> None:
    for key, value in config.Settings().to_dict()[section].items():
        for given in (1, 1.0, True, "1", None, [], {}):
            fits = type(given) is type(value) or (type(value) is float and type(given) is int)
            try:
                read = getattr(getattr(config.Settings.of({section: {key: given}}), section), key)
            except ConfigError:
                continue
            assert fits and read == given and type(read) is type(value)


def test_wrong_flags_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--limits-context: 'x' is not a whole number"):
        config.load([], {}, {("limits", "context"): "x"})


def test_every_value_is_traced_to_file_and_line_variable_flag_or_default(tmp_path: Path) -> None:
    first = write(tmp_path, "[cpu]\nthreads = 1\nisa = 'x86-64'\n")
    (tmp_path / "user").mkdir()
    second = write(tmp_path / "user", "limits.queue = 7\n[cpu]\n\nthreads = 2\n")
    variables = {"SPARKD_LIMITS_SEQUENCES": "2", "SPARKD_KV_TYPE": "f32"}
    loaded = config.load_with_origins([first, second], variables, {("kv", "type"): "f16"})
    given = {key: origin for key, origin in loaded.origins.items() if origin != config.DEFAULT}
    assert given == {
        ("cpu", "threads"): f"{second}:4",
        ("cpu", "isa"): f"{first}:3",
        ("limits", "queue"): f"{second}:1",
        ("limits", "sequences"): "environment variable SPARKD_LIMITS_SEQUENCES",
        ("kv", "type"): "flag --kv-type",
    }
    assert set(loaded.origins) == {(section, key) for section, key, _ in config.keys()}  # noqa: SIM118
    assert loaded.settings == config.load([first, second], variables, {("kv", "type"): "f16"})
