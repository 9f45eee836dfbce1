"""How a program is cut into launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from host_device import HostDevice
from pairs import Pair, loaded

from sparkd.executors.cuda_groups import Heads, Mixture, groups_of
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.plan import reads, written
from sparkd.graph.program import Program
from sparkd.models import build_program

MODELS = ["laguna-tinyk-s1-q4_k_m", "qwen35moe-tinyk-s1-q4_k_m"]


@pytest.fixture(params=MODELS)
def program(request: pytest.FixtureRequest, model_path: Callable[[str], Path]) -> Program:
    return build_program(ModelFile.open(model_path(request.param)))


def test_every_operation_is_in_one_group_after_all_that_it_reads(program: Program) -> None:
    members = [op for group in groups_of(program) for op in group.members]
    assert Counter(map(id, members)) == Counter(map(id, program.ops))
    there = set()
    for op in members:
        assert there.issuperset(reads(op))
        there.add(written(op))


def test_a_value_that_is_kept_is_written(program: Program) -> None:
    for group in groups_of(program):
        if isinstance(group, Heads | Mixture):
            hidden = written(group.members[0])
            assert hidden is not None
            assert all(
                hidden not in map(written, g.members) for g in groups_of(program, [hidden]) if type(g) is type(group)
            )


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_ten_launches(name: str, model_path: Callable[[str], Path]) -> None:
    """Beside those of the layers: the embedding, the first norm, the logits, angles, new sequences, a dense layer."""
    with loaded(model_path(name)) as arena:
        pair = Pair(arena.program, arena, HostDevice())
        kernels = Counter(launch.kernel.rstrip("_18") for launch in pair.cuda.launches(1))
    layers = len(arena.program.expert_layers)
    attending = len(arena.program.caches)
    assert kernels["gate_up"] == kernels["down"] == kernels["route"] == kernels["mixture_sum"] == layers
    assert kernels["prepare_heads"] == kernels["attend_pages"] == kernels["merge_and_gate"] == attending
    dense = attending + len(arena.program.delta_states) - layers
    assert kernels["linear"] == 2 * layers + 4 * dense
    assert kernels["rms_norm"] == layers + 1 + 2 * dense
