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
from sparse_models import TWENTY, make_one_of_twenty  # noqa: E402


def _planned(path: Path, host_gib: float) -> dict:
    command = [sys.executable, "-m", "sparkctl", "plan", str(path), "--json", "--context", "300", "--sequences", "3"]
    environment = {"SPARKD_KV_TYPE": "f32", "SPARKD_MEMORY_HOST_GIB": repr(host_gib)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


FEW = ("hybrid-draft-fused", "hybrid-parts")
REST = [pytest.param(name, 0.0, False, marks=pytest.mark.soak) for name in TWENTY if name not in FEW]


@pytest.mark.parametrize(
    ("name", "host_gib", "partial"), [*((name, 0.0, False) for name in FEW), ("hybrid-many", 0.011, True), *REST]
)
def test_a_daemon_takes_what_was_planned_to_the_byte(name, host_gib, partial, tmp_path):
    path = make_one_of_twenty(name, tmp_path)
    told = _planned(path, host_gib)
    assert told["host"]["partial"] == partial
    limits = {"context": 300, "sequences": 3}
    with daemon(path, tmp_path / "run", limits=limits, memory={"host_gib": host_gib}) as one:
        memory = one.status()["memory"]
        assert one.status()["model"]["context"] == told["context"]["positions"] == 300
    assert memory["core_bytes"] == told["host"]["core"]
    slots = ("hot", "ring", "spare", "reserve")
    assert memory["records_bytes"] == sum(told["host"][kind] for kind in slots)
    assert memory["state_bytes"] == told["context"]["kv"] + told["context"]["state"]
    assert memory["need_bytes"] == told["host"]["need_total_bytes"]


def test_the_tables_of_the_document_are_those_of_the_code():
    document = ROOT / "docs" / "plan.md"
    command = [sys.executable, "bench/make_plan_document.py"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == document.read_text(), "run: python bench/make_plan_document.py --write"
