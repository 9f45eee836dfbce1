"""Which native module is taken, and what its thread pool leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd import kernels
from sparkd.errors import UnsupportedError

V3_FLAGS = "fpu sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4_FLAGS = V3_FLAGS + " avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    def pretend(machine: str, flags: str) -> None:
        monkeypatch.setattr(kernels.platform, "machine", lambda: machine)
        monkeypatch.setattr(kernels, "_cpu_flags", lambda: frozenset(flags.split()))

    return pretend


def test_the_best_instruction_set_of_the_machine_is_taken_by_default(cpu, monkeypatch) -> None:
    cpu("x86_64", V3_FLAGS)
    assert kernels.available() == ("x86-64-v3", "x86-64")
    cpu("x86_64", V4_FLAGS)
    assert kernels.available() == ("x86-64-v4", "x86-64-v3", "x86-64")
    monkeypatch.setattr(kernels, "_matrix_unit", lambda: True)
    cpu("x86_64", V4_FLAGS + " amx_tile amx_int8")
    assert kernels.available()[:2] == ("x86-64-v4-amx", "x86-64-v4")
    monkeypatch.setattr(kernels, "_matrix_unit", lambda: False)  # the kernel does not let processes have it
    assert kernels.available()[0] == "x86-64-v4"
    cpu("x86_64", V3_FLAGS + " avx_vnni")
    assert kernels.available() == ("x86-64-v3-vnni", "x86-64-v3", "x86-64")
    cpu("x86_64", V4_FLAGS.replace(" avx512_vnni", ""))
    assert kernels.available() == ("x86-64-v3", "x86-64")
    cpu("x86_64", V3_FLAGS.replace(" fma", ""))
    assert kernels.available() == ("x86-64",)
    cpu("aarch64", "")
    assert kernels.available() == ("portable",)


def test_an_instruction_set_that_the_cpu_lacks_is_refused_by_name(cpu) -> None:
    cpu("x86_64", "fpu sse2")
    with pytest.raises(UnsupportedError, match=r"cpu\.isa: this machine does not run x86-64-v3; choose auto"):
        kernels.native("x86-64-v3")
    with pytest.raises(UnsupportedError, match="does not run avx1024"):
        kernels.native("avx1024")


def test_flags_come_from_the_first_processor_and_may_be_missing(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu fma\n\nprocessor\t: 1\nflags\t\t: other\n")
    assert kernels._cpu_flags(cpuinfo) == {"fpu", "fma"}
    assert kernels._cpu_flags(tmp_path / "none") == frozenset()


@pytest.mark.parametrize("isa", kernels.available())
def test_each_instruction_set_has_its_module(isa: str) -> None:
    module = kernels.native(isa)
    assert module.__name__ == f"sparkd._native_{isa.replace('-', '_')}"
    assert kernels.native("auto").__name__ == f"sparkd._native_{kernels.available()[0].replace('-', '_')}"
