"""Programs of both architectures: the published sizes, every tensor checked by name, every variant of a file."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from described_models import Description, laguna, qwen, qwen_block

from sparkd.errors import ModelFileError, UnsupportedError
from sparkd.gguf.formats import FORMATS_BY_NAME
from sparkd.graph.ops import Add, Attention, Experts, Gate, Linear, Logits, Op, OutputGate, Rope, Route, Weight
from sparkd.graph.plan import lifetimes
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.models import build_program


def of_type(program: Program, kind: type[Op]) -> list[Op]:
    return [op for op in program.ops if isinstance(op, kind)]


def weights(program: Program) -> list[Weight]:
    found = [getattr(op, field) for op in program.ops for field in op.__slots__]
    found += [w for layer in program.expert_layers for w in (layer.gate, layer.up, layer.down)]
    return [w for w in found if isinstance(w, Weight)]


BOTH = pytest.mark.parametrize("describe", [qwen, laguna])


# --- the published models


def test_qwen_has_the_published_layers_and_bytes_of_state() -> None:
    description = qwen()
    program = description.build()
    assert len(description.shapes) == 733
    assert {w.tensor for w in weights(program)} == set(description.shapes)
    assert program.notes == ()
    assert [c.layer for c in program.caches] == list(range(3, 40, 4))
    assert [d.layer for d in program.delta_states] == [layer for layer in range(40) if layer % 4 != 3]
    assert len(program.layer_outputs) == len(program.expert_layers) == 40
    layout = StateLayout.of(program, 2)
    assert layout.record_bytes == 65_863_680
    assert [group.page_bytes for group in layout.groups] == [64 * 20_480]
    assert (program.hidden, program.vocab, program.context) == (2048, 248320, 262144)
    lifetimes(program)


def test_laguna_has_the_published_layers_and_bytes_of_state() -> None:
    description = laguna()
    program = description.build()
    assert len(description.shapes) == 678
    assert {w.tensor for w in weights(program)} == set(description.shapes)
    attention = of_type(program, Attention)
    assert [a.window for a in attention] == [0, 512, 512, 512] * 10
    assert [a.heads for a in attention] == [48, 64, 64, 64] * 10
    assert {a.scale for a in attention} == {1 / math.sqrt(128)}
    tables = [op.table for op in of_type(program, Rope)]
    assert [len(t.inv_freq) for t in tables[::2]] == [32, 64, 64, 64] * 10
    assert [t.magnitude for t in tables[1::2]] == [1.3465735902799727, 1.0, 1.0, 1.0] * 10
    assert [layer.layer for layer in program.expert_layers] == list(range(1, 40))
    routes = of_type(program, Route)
    assert {(r.scale, r.bias is not None) for r in routes} == {(2.5, True)}
    gates = of_type(program, OutputGate)
    assert {(g.function, g.per_head, g.stride) for g in gates} == {(Gate.SOFTPLUS, True, 1)}
    full, sliding = StateLayout.of(program, 2).groups
    assert (full.page_bytes, sliding.page_bytes) == (64 * 40_960, 64 * 30 * 4096)
    assert [note.split(":")[0] for note in program.notes] == ["YaRN", "YaRN"]
    lifetimes(program)


def test_laguna_without_window_is_full_everywhere_and_gates_by_element() -> None:
    description = laguna(4, per_element=True, heads=(64,)).set(attention__sliding_window=None)
    program = description.set(attention__head_count=64, expert_weights_scale=1.0).build()
    assert {a.window for a in of_type(program, Attention)} == {0}
    assert {(g.per_head, g.stride) for g in of_type(program, OutputGate)} == {(False, 128)}
    assert {r.scale for r in of_type(program, Route)} == {1.0}


@BOTH
def test_the_sum_of_a_layer_is_routed_then_shared_then_residual(describe: Callable[..., Description]) -> None:
    program = describe(4).build()
    adds = {op.out: op for op in program.ops if isinstance(op, Add)}
    experts = {op.out for op in of_type(program, Experts)}
    for out in program.layer_outputs[1:]:
        ffn = adds[adds[out].y]
        assert adds[out].x in adds
        assert ffn.x in experts


@BOTH
def test_every_weight_lies_inside_its_tensor(describe: Callable[..., Description]) -> None:
    description = describe(4)
    model = description.model()
    for weight in weights(build_program(model)):
        tensor = model.tensors[weight.tensor]
        rows = tensor.rows * tensor.columns // weight.columns
        assert weight.first_row >= 0
        assert weight.first_row + weight.rows <= rows


# --- tensors


@BOTH
def test_a_missing_tensor_is_named(describe: Callable[..., Description]) -> None:
    description = describe(4)
    for name, shape in list(description.shapes.items()):
        if name == "output.weight":
            continue
        del description.shapes[name]
        with pytest.raises(ModelFileError) as caught:
            description.build()
        description.shapes[name] = shape
        shown = ", ".join(map(str, shape))
        assert f"tensor {name} {{{shown}}}" in str(caught.value)
        assert "missing" in str(caught.value)


@BOTH
def test_a_misshapen_tensor_is_named_with_both_shapes(describe: Callable[..., Description]) -> None:
    description = describe(4)
    for name, shape in list(description.shapes.items()):
        description.shapes[name] = (*shape[:-1], shape[-1] + 32)
        with pytest.raises(ModelFileError) as caught:
            description.build()
        description.shapes[name] = shape
        message = str(caught.value)
        assert f"tensor {name} has shape {{{', '.join(map(str, (*shape[:-1], shape[-1] + 32)))}}}" in message
        assert f"expected {{{', '.join(map(str, shape))}}}" in message


@BOTH
def test_a_type_without_arithmetic_is_refused_naming_tensor_and_type(describe: Callable[..., Description]) -> None:
    description = describe(4)
    for name in ("blk.1.ffn_down_exps.weight", "token_embd.weight"):
        for kind in ("IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"):
            description.types = {name: FORMATS_BY_NAME[kind].id}
            with pytest.raises(UnsupportedError, match=f"{name}.*{kind}"):
                description.build()


@BOTH
def test_norms_and_biases_are_read_as_float32_only(describe: Callable[..., Description]) -> None:
    description = describe(4)
    description.types = {"blk.2.attn_norm.weight": FORMATS_BY_NAME["F16"].id}
    with pytest.raises(UnsupportedError, match=r"blk\.2\.attn_norm\.weight has type F16"):
        description.build()


@BOTH
@pytest.mark.parametrize(
    "name",
    [
        "blk.3.attn_q.bias",
        "blk.3.attn_output.bias",
        "blk.1.ffn_down_exps.scale",
        "blk.1.ffn_gate_exps.input_scale",
        "blk.3.attn_sinks.weight",
        "rope_freqs.weight",
        "output.bias",
    ],
)
def test_a_tensor_that_would_change_the_result_is_refused(describe: Callable[..., Description], name: str) -> None:
    description = describe(4)
    description.shapes[name] = (32,)
    with pytest.raises(UnsupportedError, match=f"tensor {name} is not supported"):
        description.build()


@BOTH
def test_unknown_tensors_are_noted_and_ignored(describe: Callable[..., Description]) -> None:
    description = describe(4)
    before = description.build()
    description.types["blk.2.future.weight"] = FORMATS_BY_NAME["IQ2_XS"].id
    description.shapes["blk.2.future.weight"] = (256,)
    after = description.build()
    assert after.ops == before.ops
    assert after.notes == (*before.notes, "1 unknown tensors are ignored: blk.2.future.weight")


@BOTH
def test_without_output_weight_the_embedding_is_the_head(describe: Callable[..., Description]) -> None:
    description = describe(4)
    del description.shapes["output.weight"]
    program = description.build()
    (logits,) = of_type(program, Logits)
    assert logits.weight.tensor == "token_embd.weight"
    assert any("tied" in note for note in program.notes)


@BOTH
def test_fused_gate_and_up_experts_are_two_halves_of_one_stack(describe: Callable[..., Description]) -> None:
    description = describe(4)
    del description.shapes["blk.2.ffn_gate_exps.weight"], description.shapes["blk.2.ffn_up_exps.weight"]
    description.shapes["blk.2.ffn_gate_up_exps.weight"] = (2048, 1024, 256)
    (layer,) = [x for x in description.build().expert_layers if x.layer == 2]
    assert layer.gate == Weight("blk.2.ffn_gate_up_exps.weight", 512, 2048, 0)
    assert layer.up == Weight("blk.2.ffn_gate_up_exps.weight", 512, 2048, 512)


@pytest.mark.parametrize(("describe", "rows"), [(qwen, (8192, 512, 512)), (laguna, (8192, 1024, 1024))])
def test_a_fused_attention_projection_is_cut_into_q_k_v(
    describe: Callable[..., Description], rows: tuple[int, int, int]
) -> None:
    description = describe(4)
    for x in "qkv":
        del description.shapes[f"blk.3.attn_{x}.weight"]
    description.shapes["blk.3.attn_qkv.weight"] = (2048, sum(rows))
    linear = [op.weight for op in of_type(description.build(), Linear) if op.weight.tensor == "blk.3.attn_qkv.weight"]
    assert [(w.first_row, w.rows) for w in linear] == [(0, rows[0]), (rows[0], rows[1]), (rows[0] + rows[1], rows[2])]


def test_the_shared_experts_gate_may_be_a_vector_or_a_matrix_of_one_row() -> None:
    description = qwen(4)
    before = description.build()
    description.shapes["blk.1.ffn_gate_inp_shexp.weight"] = (2048, 1)
    assert description.build() == before


def test_a_gate_that_is_neither_per_head_nor_per_element_is_refused() -> None:
    description = laguna(4)
    description.shapes["blk.1.attn_gate.weight"] = (2048, 65)
    with pytest.raises(ModelFileError, match=r"expected \{2048, 64\} or \{2048, 8192\}"):
        description.build()


# --- draft layers


def test_a_declared_draft_layer_is_skipped_whether_its_tensors_are_there_or_not() -> None:
    plain = qwen(8).build()
    description = qwen(8).set(block_count=9, nextn_predict_layers=1)
    absent = description.build()
    description.shapes |= qwen_block("blk.8", linear=False, draft=True)
    present = description.build()
    assert absent.ops == present.ops == plain.ops
    assert absent.notes == ("next-token prediction: blk.8 to blk.8 declared; its tensors are absent",)
    assert present.notes == ("next-token prediction: blk.8 to blk.8 declared; its 20 tensors are skipped",)


def test_a_draft_layer_is_recognised_by_its_tensors_when_it_is_not_declared() -> None:
    description = qwen(8).set(block_count=9)
    description.shapes |= qwen_block("blk.8", linear=False, draft=True)
    program = description.build()
    assert program.ops == qwen(8).build().ops
    assert "found, though not declared" in program.notes[0]


def test_a_draft_layer_of_an_uncomputable_type_does_no_harm() -> None:
    description = qwen(4).set(block_count=5, nextn_predict_layers=1)
    description.shapes |= qwen_block("blk.4", linear=False, draft=True)
    description.types["blk.4.attn_q.weight"] = FORMATS_BY_NAME["IQ1_S"].id
    assert description.build().ops == qwen(4).build().ops
