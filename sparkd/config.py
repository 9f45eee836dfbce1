"""Settings: config.toml, then SPARKD_... variables, then flags; the same keys everywhere.

`memory.host_gib` is `host_gib` under `[memory]` in the file, `SPARKD_MEMORY_HOST_GIB` in the environment and
`--memory-host-gib` on the command line. Unknown keys and impossible values are refused with the place they came from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from sparkd.errors import ConfigError

_PREFIX = "SPARKD_"
#: Variables with our prefix that are not settings: where the daemon's sockets lie, and what the tests use.
_OTHER_VARIABLES = {"SPARKD_RUN_DIR", "SPARKD_CONFIG", "SPARKD_TEST_MODELS"}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Within:
    """The bounds of a number, which it may reach."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model is served."""

    path: str = ""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """How much memory the weights may take, and how it is held."""

    host_gib: Annotated[float, Within(0, 65536)] = 0.0
    vram_gib: Annotated[float, Within(0, 65536)] = 0.0
    lock: Literal["auto", "off"] = "auto"
    huge_pages: Literal["auto", "off"] = "auto"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What computes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    misses: Literal["auto", "in_place", "copy", "host"] = "auto"


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """How the CPU computes."""

    threads: Annotated[int, Within(0, 1024)] = 0
    isa: Literal["auto", "x86-64", "x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-amx"] = "auto"


@dataclass(frozen=True, slots=True)
class KvSettings:
    """How keys and values of attention are kept."""

    type: Literal["f16", "f32"] = "f16"


@dataclass(frozen=True, slots=True)
class NumericsSettings:
    """Readings of the model's mathematics."""

    prefill: Literal["exact"] = "exact"
    yarn: Literal["keys", "llama", "final"] = "keys"


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What one daemon takes on at most."""

    context: Annotated[int, Within(64, 1 << 22)] = 8192
    sequences: Annotated[int, Within(1, 64)] = 4
    queue: Annotated[int, Within(0, 100_000)] = 256
    timeout_s: Annotated[float, Within(0.001, 86400 * 7)] = 3600.0


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How steps are formed."""

    max_step_ms: Annotated[int, Within(1, 60_000)] = 250


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """How live traffic is learned from."""

    enabled: bool = True


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """The socket apps connect to."""

    path: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """HTTP for apps that speak OpenAI's or Anthropic's dialect."""

    enabled: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, Within(0, 65535)] = 8080
    unix: str = ""
    keys: str = ""
    aliases: str = ""
    sampling: str = "temperature=1.0 top_p=0.95 top_k=20"
    cors: str = ""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a daemon; `config.toml` explains each key."""

    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    worker: WorkerSettings = WorkerSettings()
    cpu: CpuSettings = CpuSettings()
    kv: KvSettings = KvSettings()
    numerics: NumericsSettings = NumericsSettings()
    limits: LimitSettings = LimitSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    socket: SocketSettings = SocketSettings()
    gateway: GatewaySettings = GatewaySettings()
    log: LogSettings = LogSettings()

    @staticmethod
    def of(values: Mapping[str, Mapping[str, object]]) -> Settings:
        """Settings from section, key and value. WrongSetting for the first that is unknown or impossible."""
        sections: dict[str, Any] = get_type_hints(Settings)
        unknown = next((name for name in values if name not in sections), None)
        if unknown is not None:
            raise WrongSetting(unknown, None, f"unknown section [{unknown}]", "sections: " + ", ".join(sections))
        made: dict[str, Any] = {name: _section(name, sections[name], body) for name, body in values.items()}
        return Settings(**made)

    @staticmethod
    def from_json(text: str) -> Settings:
        """Settings as a parent process passes them to its children."""
        return Settings.of(json.loads(text))

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section, key and value; the inverse of `of`."""
        return dataclasses.asdict(self)


class WrongSetting(ConfigError):
    """What is wrong with a section (`key` None) or a key, without the place it was written at."""

    def __init__(self, section: str, key: str | None, what: str, fix: str = "") -> None:
        super().__init__(what, fix=fix)
        self.section = section
        self.key = key


def _section(name: str, kind: type[_T], body: Mapping[str, object]) -> _T:
    hints = get_type_hints(kind, include_extras=True)
    checked = {}
    for key, value in body.items():
        if key not in hints:
            raise WrongSetting(name, key, f"unknown key {name}.{key}", f"keys of [{name}]: " + ", ".join(hints))
        try:
            checked[key] = _checked(hints[key], value)
        except ValueError as error:
            raise WrongSetting(name, key, f"{name}.{key} = {value!r} is refused: {error}") from None
    return kind(**checked)


def _checked(hint: Any, value: Any) -> Any:
    """`value` as the type hint of its key says; ValueError tells what it should be."""
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ValueError("it is one of " + ", ".join(map(repr, get_args(hint))))
    kind, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    fits = type(value) in ((int, float) if kind is float else (kind,))
    if fits and all(bound.least <= value <= bound.most for bound in bounds):
        return kind(value)
    limits = "".join(f" from {bound.least} to {bound.most}" for bound in bounds)
    raise ValueError(f"it is a {_type_name(kind)}{limits}")


def keys() -> Iterator[tuple[str, str, type]]:
    """Every (section, key, type of its default)."""
    for section, kind in get_type_hints(Settings).items():
        for key in dataclasses.fields(kind):
            yield section, key.name, type(key.default)


def documented() -> dict[tuple[str, str], str]:
    """What `config.toml`, which lies beside this module, says of each (section, key), in one line."""
    said: dict[tuple[str, str], str] = {}
    section, comment, begun = "", "", False
    for line in Path(__file__).with_name("config.toml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment = f"{comment} {line[1:].strip()}" if begun else line[1:].strip()
        elif line.startswith("["):
            section = line.strip("[]")
        elif line:
            said[section, line.partition(" ")[0]] = comment
        begun = line.startswith("#")
    return said


def config_files() -> list[Path]:
    """Files that are read when none is named: the system's, the user's. ConfigError if one cannot be looked for."""
    folders = [Path("/etc")]
    with contextlib.suppress(RuntimeError):  # a user without a home
        folders.append(Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"))
    return [path for folder in folders if _is_there(path := folder / "sparkd" / "config.toml")]


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        fix = "name the settings to use: --config FILE (/dev/null for none)"
        raise ConfigError(f"cannot be looked for: {error.strerror}", where=str(path), fix=fix) from None
    return True


#: Where a value that nobody gave comes from.
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and for each (section, key) its place: file and line, variable, flag, or `DEFAULT`."""

    settings: Settings
    origins: Mapping[tuple[str, str], str]


def load(
    files: list[Path] | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[tuple[str, str], str] | None = None,
) -> Settings:
    """Merge files, environment and flags (later ones win). ConfigError names file and line, variable, or flag."""
    return load_with_origins(files, environment, flags).settings


def load_with_origins(
    files: list[Path] | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[tuple[str, str], str] | None = None,
) -> Loaded:
    """As `load`, and where each value came from."""
    values: dict[str, dict[str, Any]] = {}
    origins: dict[tuple[str, ...], str] = {}
    if files is None:
        named = (environment if environment is not None else os.environ).get("SPARKD_CONFIG")
        files = [Path(named)] if named else config_files()
    for path in files:
        _read_file(path, values, origins)
    known = {(section, key): kind for section, key, kind in keys()}
    variables = {f"{_PREFIX}{section}_{key}".upper(): (section, key) for section, key in known}
    for name, text in (environment if environment is not None else os.environ).items():
        if name in variables:
            section, key = variables[name]
            _set(values, origins, section, key, _parse(text, known[section, key], name), f"environment variable {name}")
        elif name.startswith(_PREFIX) and name not in _OTHER_VARIABLES:
            raise ConfigError("unknown setting", where=f"environment variable {name}", fix=_nearest(name, variables))
    for (section, key), text in (flags or {}).items():
        flag = f"--{section}-{key}".replace("_", "-")
        _set(values, origins, section, key, _parse(text, known[section, key], flag), f"flag {flag}")
    try:
        settings = Settings.of(values)
    except WrongSetting as error:
        where = origins.get((error.section, error.key or "")) or origins[error.section,]
        raise ConfigError(error.what, where=where, fix=error.fix) from None
    return Loaded(settings, {key: origins.get(key, DEFAULT) for key in known})


def _set(
    values: dict[str, dict[str, Any]], origins: dict[tuple[str, ...], str], section: str, key: str, value: Any, at: str
) -> None:
    values.setdefault(section, {})[key] = value
    origins[section, key] = at


def _read_file(path: Path, values: dict[str, dict[str, Any]], origins: dict[tuple[str, ...], str]) -> None:
    import tomllib  # children get their settings as JSON

    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", where=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    for section, body in content.items():
        if not isinstance(body, dict):
            raise ConfigError(
                f"{section!r} is not a section", where=_place(path, text, "", section), fix="write [section] first"
            )
        values.setdefault(section, {})
        origins[(section,)] = _place(path, text, section, None)
        for key, value in body.items():
            _set(values, origins, section, key, value, _place(path, text, section, key))


def _place(path: Path, text: str, section: str, key: str | None) -> str:
    """`path:line` of a key; TOML's parser keeps no positions, so the line is looked up."""
    inside = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([^\[\]#]+?)\s*\]", line)
        if header:
            inside = header[1].strip("\"'")
            if key is None and inside == section:
                return f"{path}:{number}"
        elif key is not None:
            written = re.match(r"\s*([^=#]+?)\s*=", line)
            name = written[1].replace('"', "").replace("'", "").replace(" ", "") if written else ""
            if (inside == section and name == key) or (not inside and name in (f"{section}.{key}", section)):
                return f"{path}:{number}"
    return str(path)


def _parse(text: str, kind: type, where: str) -> Any:
    """A variable's or flag's text as the type of its key."""
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        text.encode()
        return kind(text)
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} is not UTF-8", where=where) from None
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r} is not a {_type_name(kind)}", where=where) from None


def _type_name(kind: type) -> str:
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[kind]


def _nearest(name: str, variables: Mapping[str, tuple[str, str]]) -> str:
    section = next((s for s, _ in variables.values() if name.startswith(f"{_PREFIX}{s}_".upper())), None)
    known = [v for v, (s, _) in variables.items() if section is None or s == section]
    return "known ones: " + ", ".join(sorted(known))
