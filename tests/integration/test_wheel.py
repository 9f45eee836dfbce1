"""The wheel of `make wheel`: whole, installable where there is no compiler, and it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
#: An environment in which no compiler is found.
WITHOUT = {"CXX": "/nonexistent/c++", "CC": "/nonexistent/cc"}


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel, built in this checkout."""
    subprocess.run(["make", "wheel", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    return max((ROOT / "dist").glob("sparkd-*.whl"), key=lambda path: path.stat().st_mtime)


def environment(venv: Path) -> dict[str, str]:
    """That of a user who has nothing but the venv."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name in ("HOME", "LANG")}
    return kept | WITHOUT | {"PATH": str(venv / "bin"), "PYTHONUTF8": "1", "NO_COLOR": "1"}


def test_the_wheel_runs_on_many_machines_and_has_what_it_needs(wheel: Path) -> None:
    assert "manylinux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = {name.split(".")[0] for name in names if name.endswith(".so") and "_native" in name}
    sets = ("x86_64", "x86_64_v3", "x86_64_v3_vnni", "x86_64_v4", "x86_64_v4_amx")
    assert modules == {f"sparkd/_native_{isa}" for isa in sets}
    # GPU kernels are compiled where sparkd runs: their sources, and the headers that they share with the CPU's.
    sources = [*ROOT.glob("sparkd/kernels/common/*.h"), *ROOT.glob("sparkd/kernels/cuda/*.cu*")]
    found = {name for name in names if name.endswith((".h", ".cu", ".cuh"))}
    assert found == {str(path.relative_to(ROOT)) for path in sources}
    assert {"sparkd/demo/spark-demo-laguna.gguf", "sparkd/config.toml"} <= set(names)
    for wanted in (
        "share/sparkd/config.toml",
        "share/sparkd/systemd/sparkd.service",
        "licenses/LICENSE",
        "nanobind.txt",
    ):
        assert any(name.endswith(wanted) for name in names), wanted
    assert not [name for name in names if name.endswith(".cpp") or name.startswith(("tests/", "bench/"))]


def test_a_fresh_environment_without_a_compiler_installs_it_and_answers(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    run = {"env": environment(venv), "cwd": tmp_path, "check": True, "stdin": subprocess.DEVNULL}
    install = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(wheel)]
    subprocess.run(install, **run)
    answered = subprocess.run(
        [str(venv / "bin/sparkd"), "demo", "--max-tokens", "16"], **run, capture_output=True, text=True
    )
    assert "I am Spark, a tiny mixture-of-experts" in " ".join(answered.stdout.split())
    assert (venv / "share/sparkd/config.toml").read_text() == (ROOT / "sparkd/config.toml").read_text()


def test_an_installation_from_source_without_a_compiler_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path / "out")]
    command += [f"--config-settings=build-dir={tmp_path}/build", str(ROOT)]
    failed = subprocess.run(command, env=os.environ | WITHOUT, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    said = [line for line in (failed.stdout + failed.stderr).splitlines() if "compiler and found none" in line]
    assert len(said) == 1 and "sparkd needs a C++17 compiler" in said[0] and "make wheel" in said[0]
