"""Which settings a running daemon takes over."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sparkd.config import Settings, keys
from sparkd.supervisor.reload import LIVE, change

#: Another allowed value of each key.
OTHER: dict[type, Any] = {int: 64, float: 1.5, bool: False}
WORDS = {
    ("model", "path"): "other.gguf",
    ("memory", "lock"): "off",
    ("worker", "device"): "cpu",
    ("cpu", "isa"): "x86-64",
    ("kv", "type"): "f32",
    ("numerics", "yarn"): "llama",
    ("socket", "path"): "/other.sock",
    ("socket", "group"): "users",
    ("log", "level"): "debug",
}
CHANGEABLE = sorted((section, key) for section, key, kind in keys() if kind in OTHER or (section, key) in WORDS)
KINDS = {(section, key): kind for section, key, kind in keys()}


@given(chosen=st.sets(st.sampled_from(CHANGEABLE)))
def test_live_keys_change_at_once_and_all_others_wait_for_a_restart(chosen: set[tuple[str, str]]) -> None:
    wanted = Settings().to_dict()
    for section, key in chosen:
        wanted[section][key] = WORDS.get((section, key), OTHER.get(KINDS[section, key]))
    found = change(Settings(), Settings.of(wanted))
    differing = {pair for pair in chosen if getattr(getattr(Settings(), pair[0]), pair[1]) != wanted[pair[0]][pair[1]]}
    assert set(found.applied) == {".".join(pair) for pair in differing & LIVE}
    assert set(found.restart) == {".".join(pair) for pair in differing - LIVE}
    for section, key in KINDS:
        expected = wanted[section][key] if (section, key) in LIVE else getattr(getattr(Settings(), section), key)
        assert getattr(getattr(found.settings, section), key) == expected


def test_every_live_key_exists() -> None:
    assert set(KINDS) >= LIVE
