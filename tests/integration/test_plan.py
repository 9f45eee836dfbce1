"""The forecast against a daemon that really runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import daemon

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit"))
from sparse_models import make_one_of_twenty  # noqa: E402


def _planned(path: Path, *words: str) -> dict:
    command = [sys.executable, "-m", "sparkctl", "plan", str(path), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"SPARKD_KV_TYPE": "f32"})
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["hybrid-draft-fused", "windows-mixed", "hybrid-parts"])
def test_a_daemon_takes_what_was_planned_to_the_byte(name, tmp_path):
    path = make_one_of_twenty(name, tmp_path)
    told = _planned(path, "--context", "300", "--sequences", "3")
    with daemon(path, tmp_path / "run", limits={"context": 300, "sequences": 3}) as one:
        memory = one.status()["memory"]
        assert one.status()["model"]["context"] == told["context"]["positions"] == 300
    assert memory["core_bytes"] == told["host"]["core"]
    assert memory["records_bytes"] == told["host"]["hot"]
    assert memory["state_bytes"] == told["context"]["kv"] + told["context"]["state"]
    assert memory["need_bytes"] == told["host"]["need_total_bytes"]


def test_the_tables_of_the_document_are_those_of_the_code():
    document = ROOT / "docs" / "plan.md"
    command = [sys.executable, "bench/make_plan_document.py"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == document.read_text(), "run: python bench/make_plan_document.py --write"
