"""What is unusual about a file is said, and the report adds up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from gguf_writer import I32, STRING, GgufBytes, generate_model, tiny_gguf

from sparkd.gguf.inspect import inspect
from sparkd.gguf.model_file import ModelFile


@pytest.fixture
def notes(tmp_path):
    def of(file, tail: bytes = b"") -> str:
        path = tmp_path / "m.gguf"
        path.write_bytes(file.build() + tail)
        return "\n".join(ModelFile.open(path).notes)

    return of


def test_an_ordinary_file_has_no_notes(notes):
    assert notes(tiny_gguf().text("some.unknown.key", "is not odd"), tail=bytes(31)) == ""


def test_a_draft_layer_is_recognised_whether_its_tensors_are_present_or_absent(notes):
    def file(blocks: int):
        made = GgufBytes().text("general.architecture", "qwen35moe").u32("qwen35moe.block_count", 41)
        made.u32("qwen35moe.nextn_predict_layers", 1).array("tokenizer.ggml.tokens", STRING, ["a"])
        for block in range(blocks):
            made.tensor(f"blk.{block}.attn_norm.weight", (8,))
        return made

    assert notes(file(41)) == "the next-token-prediction layer (block 40) is present and skipped"
    assert notes(file(40)) == "the next-token-prediction layer (block 40) has no tensors in this file"


def test_undeclared_draft_tensors_and_absent_blocks_are_said(notes):
    undeclared = tiny_gguf().tensor("blk.1.nextn.enorm.weight", (8,))
    assert "block 1 has next-token-prediction tensors" in notes(undeclared)
    assert "1 blocks from 7 on lie beyond block_count = 2" in notes(tiny_gguf().tensor("blk.7.attn_norm.weight", (8,)))
    impossible = tiny_gguf().u32("laguna.nextn_predict_layers", 2**32 - 1)
    assert "nextn_predict_layers is 4294967295, of 2 blocks" in notes(impossible)


def test_a_vocabulary_that_disagrees_with_the_keys_is_said(notes):
    file = tiny_gguf().u32("laguna.vocab_size", 5).u32("tokenizer.ggml.eos_token_id", 4)
    said = notes(file.array("tokenizer.ggml.scores", I32, [0] * 3))
    assert "vocab_size is 5, the tokenizer has 4 tokens" in said
    assert "'tokenizer.ggml.eos_token_id' is 4, outside the 4 tokens" in said
    assert "tokenizer.ggml.scores has 3 entries" in said
    bare = GgufBytes().text("general.architecture", "laguna").array("tokenizer.ggml.tokens", STRING, ["a"])
    assert "token_embd.weight has 4 rows, the tokenizer has 1 tokens" in notes(bare.tensor("token_embd.weight", (8, 4)))
    assert "no tokenizer" in notes(GgufBytes().text("general.architecture", "laguna"))


def test_a_label_that_most_weights_contradict_is_said(notes):
    def file(label: int):
        made = GgufBytes().text("general.architecture", "laguna").u32("general.file_type", label)
        return made.array("tokenizer.ggml.tokens", STRING, ["a"]).tensor("w", (256, 2), type=12, nbytes=288)

    assert notes(file(15)) == ""
    assert "says Q6_K, but most weights (100 %) are Q4_K" in notes(file(18))
    assert "77, a label that is unknown" in notes(file(77))


def test_bytes_that_belong_to_nothing_are_said(notes):
    assert "5000 bytes after the last tensor" in notes(tiny_gguf(), tail=bytes(5000))
    gap = tiny_gguf()
    gap.data_bytes += 8192
    assert "8192 bytes between tensors belong to none" in notes(gap.tensor("late", (8,)))


def report_of(path: Path):
    report = inspect(ModelFile.open(path))
    assert json.loads(json.dumps(dataclasses.asdict(report)))["path"] == str(path)
    assert sum(row.bytes for row in report.formats) == sum(row.bytes for row in report.shapes) == report.tensor_bytes
    assert sum(row.tensors for row in report.formats) == sum(row.tensors for row in report.shapes)
    assert sum(row.weights for row in report.formats) == report.parameters
    assert sum(row.bytes for row in report.files) == report.file_bytes
    return report


def test_the_report_of_a_model_adds_up(model_path, recipes):
    name = "laguna-tinyk-s1-q5_k_m"
    report = report_of(model_path(name))
    assert report.parameters == recipes[name]["parameters"]
    assert report.file_bytes == recipes[name]["files"][0]["bytes"]
    assert (report.architecture, report.label, report.version) == ("laguna", "Q5_K_M", 3)
    assert (report.blocks, report.draft_blocks, report.width, report.tokens) == (3, 0, 256, 640)
    assert (report.experts, report.experts_used, report.tied_head) == (8, 2, False)
    assert report.layers[0].experts == 0 and report.layers[0].record_bytes is None and report.layers[0].gate == "Q5_K"
    assert {row.name for row in report.formats if row.computable} == {row.name for row in report.formats}
    assert report.notes == ()


def test_records_of_mixed_types_are_counted_by_size(model_path):
    report = report_of(model_path("laguna-tinyk-s1-q4_k_m"))
    sizes = {row.bytes: row.records for row in report.records}
    for layer in report.layers[1:]:
        assert layer.record_bytes in sizes
    assert sum(sizes.values()) == 8 * 2 and sum(row.layers for row in report.records) == 2


def test_fused_experts_have_the_records_of_separate_ones(tmp_path):
    reports = []
    for fused in (False, True):
        path = tmp_path / f"{fused}.gguf"
        generate_model("qwen35moe", "tinyk", "q4_k", path, overrides={"fuse_gate_up": fused})
        reports.append(report_of(path))
    separate, fused = reports
    assert not any(layer.fused for layer in separate.layers) and all(layer.fused for layer in fused.layers)
    assert separate.records == fused.records
    assert separate.parameters == fused.parameters


def test_a_generated_draft_layer_is_told_apart(tmp_path):
    path = tmp_path / "m.gguf"
    generate_model("qwen35moe", "tinyk", "q8_0", path, overrides={"n_nextn": 1, "tied": True})
    report = report_of(path)
    assert report.draft_blocks == 1 and report.tied_head
    assert [layer.draft for layer in report.layers] == [False] * (report.blocks - 1) + [True]
    assert report.notes == (f"the next-token-prediction layer (block {report.blocks - 1}) is present and skipped",)


def test_types_that_cannot_be_computed_are_noted(tmp_path):
    path = tmp_path / "m.gguf"
    file = GgufBytes().text("general.architecture", "laguna").array("tokenizer.ggml.tokens", STRING, ["a"])
    path.write_bytes(file.tensor("grid", (256,), type=19, nbytes=50).build())
    report = report_of(path)
    assert report.formats[0].computable is False
    assert report.notes == ("sparkd cannot compute yet with IQ1_S (1 tensors)",)


def test_the_record_of_a_real_expert_has_the_size_of_the_format_tables(tmp_path):
    """gate and up Q4_K, down Q6_K, 512 x 2048: 2,039,808 bytes."""
    path = tmp_path / "m.gguf"
    file = GgufBytes().text("general.architecture", "qwen35moe").u32("qwen35moe.block_count", 1)
    for part, shape, type, size in (
        ("gate", (2048, 512, 2), 12, 589_824),
        ("up", (2048, 512, 2), 12, 589_824),
        ("down", (512, 2048, 2), 14, 860_160),
    ):
        file.tensor(f"blk.0.ffn_{part}_exps.weight", shape, type, nbytes=2 * size)
    path.write_bytes(file.build())
    (layer,) = report_of(path).layers
    assert (layer.gate, layer.up, layer.down, layer.experts) == ("Q4_K", "Q4_K", "Q6_K", 2)
    assert layer.record_bytes == 2_039_808
