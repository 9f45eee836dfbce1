"""Settings: config.toml, then SPARKD_... variables, then flags; the same keys everywhere.

`memory.host_gib` is `host_gib` under `[memory]` in the file, `SPARKD_MEMORY_HOST_GIB` in the environment and
`--memory-host-gib` on the command line. Unknown keys and impossible values are refused with the place they came from.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparkd.errors import ConfigError

_PREFIX = "SPARKD_"
#: Variables with our prefix that are not settings: where the daemon's sockets lie, and what the tests use.
_OTHER_VARIABLES = {"SPARKD_RUN_DIR", "SPARKD_CONFIG", "SPARKD_TEST_MODELS"}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSettings(_Section):
    """Which model is served."""

    path: str = ""


class MemorySettings(_Section):
    """How much memory the weights may take, and how it is held."""

    host_gib: Annotated[float, Field(ge=0, le=65536)] = 0.0
    vram_gib: Annotated[float, Field(ge=0, le=0)] = 0.0
    lock: Literal["auto", "off"] = "auto"
    huge_pages: Literal["auto", "off"] = "auto"


class CpuSettings(_Section):
    """How the CPU computes."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    isa: Literal["auto", "x86-64", "x86-64-v3", "x86-64-v4"] = "auto"


class KvSettings(_Section):
    """How keys and values of attention are kept."""

    type: Literal["f16", "f32"] = "f16"


class NumericsSettings(_Section):
    """Readings of the model's mathematics."""

    prefill: Literal["exact"] = "exact"
    yarn: Literal["keys", "llama", "final"] = "keys"


class LimitSettings(_Section):
    """What one daemon takes on at most."""

    context: Annotated[int, Field(ge=64, le=1 << 22)] = 8192
    sequences: Annotated[int, Field(ge=1, le=64)] = 4
    queue: Annotated[int, Field(ge=0, le=100_000)] = 256
    timeout_s: Annotated[float, Field(gt=0, le=86400 * 7)] = 3600.0


class SchedulerSettings(_Section):
    """How steps are formed."""

    max_step_ms: Annotated[int, Field(ge=1, le=60_000)] = 250


class CalibrationSettings(_Section):
    """How live traffic is learned from."""

    enabled: bool = True


class SocketSettings(_Section):
    """The socket apps connect to."""

    path: str = ""
    group: str = ""


class LogSettings(_Section):
    """What is logged, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(_Section):
    """All settings of a daemon; `config.toml` explains each key."""

    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    cpu: CpuSettings = CpuSettings()
    kv: KvSettings = KvSettings()
    numerics: NumericsSettings = NumericsSettings()
    limits: LimitSettings = LimitSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    socket: SocketSettings = SocketSettings()
    log: LogSettings = LogSettings()

    @staticmethod
    def from_json(text: str) -> Settings:
        """Settings as a parent process passes them to its children."""
        return Settings.model_validate_json(text)

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        return self.model_dump_json()


def keys() -> Iterator[tuple[str, str, type]]:
    """Every (section, key, type of its default)."""
    for section, field in Settings.model_fields.items():
        for key, inner in type(field.default).model_fields.items():
            yield section, key, type(inner.default)


def config_files() -> list[Path]:
    """Files that are read when none is named: the system's, then the user's."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [path for path in (Path("/etc/sparkd/config.toml"), home / "sparkd" / "config.toml") if path.exists()]


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
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise _explain(error, origins) from None
    return Loaded(settings, {key: origins.get(key, DEFAULT) for key in known})


def _set(
    values: dict[str, dict[str, Any]], origins: dict[tuple[str, ...], str], section: str, key: str, value: Any, at: str
) -> None:
    values.setdefault(section, {})[key] = value
    origins[section, key] = at


def _read_file(path: Path, values: dict[str, dict[str, Any]], origins: dict[tuple[str, ...], str]) -> None:
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
    return {bool: "true or false", int: "whole number", float: "number"}.get(kind, kind.__name__)


def _nearest(name: str, variables: Mapping[str, tuple[str, str]]) -> str:
    section = next((s for s in Settings.model_fields if name.startswith(f"{_PREFIX}{s}_".upper())), None)
    known = [v for v, (s, _) in variables.items() if section is None or s == section]
    return "known ones: " + ", ".join(sorted(known))


def _explain(error: ValidationError, origins: Mapping[tuple[str, ...], str]) -> ConfigError:
    problem = error.errors()[0]
    place = tuple(str(part) for part in problem["loc"])
    where = origins.get(place[:2]) or origins.get(place[:1]) or ".".join(place)
    name = ".".join(place)
    if problem["type"] == "extra_forbidden":
        if len(place) == 1:
            return ConfigError(
                f"unknown section [{name}]", where=where, fix="sections: " + ", ".join(Settings.model_fields)
            )
        known = [key for section, key, _ in keys() if section == place[0]]
        return ConfigError(f"unknown key {name}", where=where, fix=f"keys of [{place[0]}]: " + ", ".join(known))
    if place == ("memory", "vram_gib"):
        return ConfigError(
            f"memory.vram_gib = {problem['input']} is refused: this version has no GPU worker", where=where
        )
    return ConfigError(f"{name} = {problem['input']!r} is refused: {problem['msg']}", where=where)
