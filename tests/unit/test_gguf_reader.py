"""Untrusted headers: everything is bounded, every refusal names its place."""

from __future__ import annotations

import os
import struct
import tracemalloc

import numpy as np
import pytest
from gguf_writer import ARRAY, BOOL, F32, I32, STRING, U8, U32, U64, GgufBytes, tiny_gguf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sparkd.errors import ModelFileError, SparkError
from sparkd.gguf.formats import FORMATS, FORMATS_BY_NAME, Arithmetic, dequantise
from sparkd.gguf.inspect import inspect
from sparkd.gguf.model_file import Identity, ModelFile
from sparkd.gguf.reader import parse_header, read_header

HUGE = 1 << 63


def parse(raw: bytes, size: int | None = None):
    return parse_header(raw, len(raw) if size is None else size, "m.gguf")


def refusal(raw: bytes, size: int | None = None) -> str:
    """The one line that refuses the file; it costs less than 64 MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            parse(raw, size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    line = str(caught.value)
    assert line.startswith("m.gguf: ") and "\n" not in line
    return line


def preamble(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_give_the_same_model(version):
    header = parse(tiny_gguf(version).build())
    metadata = header.metadata
    assert header.version == version
    assert metadata.text("general.architecture") == "laguna"
    assert metadata.integer("laguna.block_count") == 2
    assert metadata.number("laguna.rope.freq_base") == 1e4
    assert metadata.boolean("laguna.expert_weights_norm") is True
    assert metadata.integers("laguna.attention.head_count", 2) == (4, 8)
    assert metadata.integers("laguna.block_count", 3) == (2, 2, 2)
    assert list(metadata.strings("tokenizer.ggml.tokens")) == ["a", "b", "ä", ""]
    np.testing.assert_array_equal(metadata.numbers("tokenizer.ggml.token_type"), np.ones(4, np.int32))
    stack = header.tensors["blk.1.ffn_down_exps.weight"]
    assert (stack.columns, stack.rows, stack.slices, stack.slice_bytes) == (8, 8, 2, 256)
    assert stack.slice_offset(1) == stack.offset + 256
    assert header.data_end == len(tiny_gguf(version).build())


def test_an_array_of_2_to_the_63_elements_in_a_file_of_51_bytes_is_refused():
    raw = preamble(0, 1) + struct.pack("<Q", 3) + b"big" + struct.pack("<IIQ", ARRAY, U32, HUGE)
    line = refusal(raw)
    assert "'big'" in line and "9223372036854775808" in line and "byte 43" in line


@pytest.mark.parametrize("element", [U8, U64, STRING])
def test_array_lengths_are_checked_before_the_array_is_read(element):
    head = preamble(0, 1) + struct.pack("<Q", 3) + b"big" + struct.pack("<II", ARRAY, element)
    for length in (HUGE, 2**64 - 1, 1 << 61, 1 << 24, 100):
        line = refusal(head + struct.pack("<Q", length) + bytes(64))
        assert "'big'" in line and str(length) in line and "byte 43" in line


@pytest.mark.parametrize("length", [HUGE, 2**64 - 1, 1 << 25])
def test_string_lengths_are_checked_before_the_string_is_read(length):
    value = preamble(0, 1) + struct.pack("<Q", 3) + b"big" + struct.pack("<IQ", STRING, length)
    assert "'big'" in refusal(value) and "byte 39" in refusal(value) and str(length) in refusal(value)
    name = preamble(0, 1) + struct.pack("<Q", length) + bytes(16)
    assert "name of key 0" in refusal(name) and "byte 24" in refusal(name)
    element = preamble(0, 1) + struct.pack("<Q", 3) + b"big" + struct.pack("<IIQQ", ARRAY, STRING, 1, length)
    assert "'big'" in refusal(element) and "byte 51" in refusal(element)


@pytest.mark.parametrize("count", [HUGE, 2**64 - 1, 1 << 40, 1000])
def test_counts_of_keys_and_tensors_that_cannot_fit_are_refused(count):
    assert "tensor count" in refusal(preamble(count, 0)) and "byte 8" in refusal(preamble(count, 0))
    assert "key count" in refusal(preamble(0, count)) and "byte 16" in refusal(preamble(0, count))


def test_a_huge_header_in_a_huge_file_is_refused_at_the_limit(tmp_path):
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(preamble(0, 16))
        for index in range(16):
            file.write(struct.pack("<Q", 1) + bytes([65 + index]) + struct.pack("<IIQ", ARRAY, U64, 1 << 22))
            file.seek(8 << 22, os.SEEK_CUR)
        file.truncate(3 << 30)
    with pytest.raises(ModelFileError, match=r"'B'.*limit of 64 MiB"):
        ModelFile.open(path)


def test_arrays_of_arrays_are_refused():
    nested = struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", U8, 1) + b"\0"
    assert "'deep'" in refusal(GgufBytes().raw_key("deep", ARRAY, nested).build())


@pytest.mark.parametrize("type", [13, 255, 1 << 31])
def test_unknown_value_types_are_refused_by_number(type):
    assert f"is {type}" in refusal(GgufBytes().raw_key("odd", type, bytes(8)).build())
    array = struct.pack("<IQ", type, 1) + bytes(8)
    assert f"is {type}" in refusal(GgufBytes().raw_key("odd", ARRAY, array).build())


def test_a_boolean_is_0_or_1():
    assert "'flag'" in refusal(GgufBytes().raw_key("flag", BOOL, b"\7").build())


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 30, 2**32 - 1])
def test_alignments_that_are_no_sensible_power_of_two_are_refused(alignment):
    line = refusal(tiny_gguf().u32("general.alignment", alignment).build())
    assert "general.alignment" in line and str(alignment) in line


def test_an_alignment_must_be_an_integer():
    assert "general.alignment" in refusal(tiny_gguf().text("general.alignment", "32").build())
    assert "general.alignment" in refusal(tiny_gguf().key("general.alignment", BOOL, True).build())


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_other_alignments_are_followed(alignment):
    file = GgufBytes(alignment=alignment).u32("general.alignment", alignment)
    raw = file.tensor("a", (3,)).tensor("b", (5,)).build()
    header = parse(raw)
    assert header.data_offset % alignment == 0 and header.data_offset == len(file.header())
    assert header.tensors["b"].offset == header.data_offset + -(-12 // alignment) * alignment


def test_a_million_dimensions_are_refused():
    info = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1_000_000) + bytes(64)
    line = refusal(preamble(1, 0) + info)
    assert "'t'" in line and "1000000 dimensions" in line and "byte 24" in line
    assert "0 dimensions" in refusal(GgufBytes().tensor("t", ()).build())


@pytest.mark.parametrize(
    "shape",
    [(1 << 32, 1 << 32, 2), (1 << 63, 2), (2**64 - 1,) * 4, (1 << 62, 2), (0,), (4, 0), (1 << 33, 1 << 31, 1, 1)],
)
def test_shapes_whose_size_would_wrap_or_vanish_are_refused(shape):
    line = refusal(GgufBytes().tensor("t", shape, nbytes=32).build())
    assert "'t'" in line and "shape" in line and "byte 24" in line


def test_a_size_is_exact_beyond_64_bits():
    line = refusal(GgufBytes().tensor("t", (1 << 62,), nbytes=32).build())
    assert f"{(4 << 62) - 32} bytes are missing" in line


def test_rows_are_whole_blocks():
    line = refusal(GgufBytes().tensor("t", (128, 2), type=12, nbytes=144).build())
    assert "'t'" in line and "Q4_K" in line and "128" in line


@pytest.mark.parametrize("id", [4, 5, 31, 36, 42, 999, 2**32 - 1])
def test_unknown_tensor_types_are_refused_by_number(id):
    line = refusal(GgufBytes().tensor("t", (256,), type=id, nbytes=1024).build())
    assert "'t'" in line and f"type {id}" in line


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_every_known_type_is_read_with_its_size(format):
    tensor = parse(GgufBytes().tensor("t", (512, 3), type=format.id, nbytes=6 * 1024 * 8).build()).tensors["t"]
    assert tensor.format is format
    assert tensor.nbytes == 3 * tensor.row_bytes == 3 * 512 // format.block * format.bytes


def test_duplicates_are_refused():
    assert "'general.name'" in refusal(tiny_gguf().text("general.name", "again").build())
    assert "'output.weight'" in refusal(tiny_gguf().tensor("output.weight", (8,)).build())


def test_tensors_may_not_overlap():
    line = refusal(GgufBytes().tensor("a", (16,)).tensor("b", (16,), offset=32).build() + bytes(64))
    assert "'a'" in line and "'b'" in line and "overlap" in line


def test_offsets_are_aligned():
    line = refusal(GgufBytes().tensor("a", (8,), offset=8).build() + bytes(64))
    assert "'a'" in line and "offset 8" in line


@pytest.mark.parametrize("offset", [1 << 20, 1 << 62, 2**64 - 32])
def test_offsets_past_the_end_are_refused_with_the_missing_bytes(offset):
    line = refusal(GgufBytes().tensor("a", (8,), offset=offset).build() + bytes(32))
    assert "'a'" in line and f"{offset} bytes are missing" in line


def test_a_cut_file_says_how_many_bytes_are_missing():
    raw = tiny_gguf().build()
    for missing in (1, 31, 700):
        assert f" {missing} bytes are missing" in refusal(raw[:-missing])


def test_every_cut_of_a_file_is_refused():
    raw = tiny_gguf().build()
    for length in range(len(raw)):
        with pytest.raises(ModelFileError, match=r"^m\.gguf: "):
            parse(raw[:length])


def test_other_files_are_told_apart():
    raw = tiny_gguf().build()
    assert "empty" in refusal(b"")
    assert "not a GGUF file" in refusal(b"PK\3\4" + raw)
    assert "not a GGUF file" in refusal(b"GG\0")
    assert "missing" in refusal(b"GGUF")
    assert "version 1 " in refusal(preamble(0, 0, version=1))
    assert "version 4 " in refusal(preamble(0, 0, version=4))
    assert "big-endian" in refusal(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


def test_names_must_be_utf8():
    assert "UTF-8" in refusal(preamble(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", U8, 0))
    assert "'k'" in refusal(GgufBytes().text("k", b"\xff").build())


def test_a_string_of_an_array_that_is_not_utf8_is_named_when_it_is_wanted():
    metadata = parse(GgufBytes().array("words", STRING, ["ok", b"\xff"]).build()).metadata
    with pytest.raises(ModelFileError, match=r"m.gguf: key 'words': string 1 at byte .* UTF-8"):
        metadata.strings("words")[0]


def test_wrong_or_missing_keys_are_named():
    metadata = parse(tiny_gguf().key("laguna.nan", F32, float("nan")).build()).metadata
    for read in (
        lambda: metadata.integer("general.name"),
        lambda: metadata.integer("laguna.expert_weights_norm"),
        lambda: metadata.integer("laguna.rope.freq_base"),
        lambda: metadata.number("laguna.nan"),
        lambda: metadata.text("laguna.block_count"),
        lambda: metadata.boolean("laguna.block_count"),
        lambda: metadata.integers("laguna.attention.head_count", 3),
        lambda: metadata.integers("tokenizer.ggml.tokens", 4),
        lambda: metadata.booleans("laguna.block_count", 2),
        lambda: metadata.numbers("tokenizer.ggml.tokens"),
        lambda: metadata.strings("tokenizer.ggml.token_type"),
    ):
        with pytest.raises(ModelFileError, match=r"^m.gguf: key '.*' is .*, not "):
            read()
    with pytest.raises(ModelFileError, match="key 'absent' is missing"):
        metadata.integer("absent")
    assert metadata.integer("absent", 7) == 7
    assert metadata.integers("absent", 2, default=0) == (0, 0)
    assert metadata.booleans("laguna.attention.head_count", 2) == (True, True)


def test_arrays_behave_like_sequences_of_plain_values():
    metadata = parse(tiny_gguf().array("flags", BOOL, [True, False]).build()).metadata
    heads, flags = metadata["laguna.attention.head_count"], metadata["flags"]
    assert list(heads) == [4, 8] and type(heads[0]) is int and heads[-1:] == [8]
    assert list(flags) == [True, False] and type(flags[0]) is bool
    assert metadata.strings("tokenizer.ggml.tokens").index("ä") == 2


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    raw = tiny_gguf().build()
    path.write_bytes(raw[:100])
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(ModelFileError, match="cut while it was read"):
            read_header(fd, len(raw), str(path))
    finally:
        os.close(fd)


def test_a_20_gib_file_with_a_big_vocabulary_is_opened_from_its_header_alone(tmp_path, monkeypatch):
    words = [f"token{index}" for index in range(250_000)]
    file = GgufBytes().text("general.architecture", "qwen35moe").array("tokenizer.ggml.tokens", STRING, words)
    file.array("tokenizer.ggml.merges", STRING, words).array("tokenizer.ggml.token_type", I32, [1] * len(words))
    header = file.tensor("big", (2048, 1 << 20, 5), type=0).header()
    path = tmp_path / "m.gguf"
    with path.open("wb") as out:
        out.write(header)
        out.truncate(len(header) + file.data_bytes)
    assert path.stat().st_size > 20 << 30
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or pread(fd, size, at))
    tracemalloc.start()
    try:
        model = ModelFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(read) <= 1 << 20 and sum(read) <= len(header) + (1 << 20)
    assert peak < 64 << 20
    assert model.shards[0].header == header
    assert model.metadata.strings("tokenizer.ggml.tokens")[249_999] == "token249999"


_NUMBERS = st.sampled_from([0, 1, 2, 3, 255, 1 << 31, (1 << 32) - 1, 1 << 62, HUGE, 2**64 - 1])
_EDITS = st.lists(st.tuples(st.integers(0, 5000), st.one_of(st.binary(min_size=1, max_size=4), _NUMBERS)), max_size=4)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=_EDITS, cut=st.one_of(st.none(), st.integers(0, 5000)), tail=st.binary(max_size=40))
@example(edits=[], cut=None, tail=b"")
@example(edits=[(8, HUGE)], cut=None, tail=b"")
def test_a_damaged_file_opens_or_is_refused_in_one_line(tmp_path, edits, cut, tail):
    raw = bytearray(tiny_gguf().build())
    for place, edit in edits:
        patch = edit if isinstance(edit, bytes) else struct.pack("<Q", edit)
        place %= len(raw)
        raw[place : place + len(patch)] = patch
    path = tmp_path / "m.gguf"
    path.write_bytes(raw[:cut] + tail)
    try:
        model = ModelFile.open(path)
        inspect(model)
        list(model.metadata.strings("tokenizer.ggml.tokens"))
        again = ModelFile.from_headers([s.header for s in model.shards], [(s.path, s.identity) for s in model.shards])
    except SparkError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
    else:
        assert again.tensors == model.tensors and again.fingerprint == model.fingerprint
        assert all(t.offset + t.nbytes <= path.stat().st_size for t in model.tensors.values())


@settings(max_examples=300, deadline=None)
@given(noise=st.binary(max_size=300))
def test_noise_after_the_magic_is_refused_or_read(noise):
    raw = b"GGUF\3\0\0\0" + noise
    try:
        header = parse(raw)
    except ModelFileError as error:
        assert str(error).startswith("m.gguf: ")
    else:
        assert header.data_offset <= len(raw)


def test_the_types_that_are_computed_have_their_arithmetic():
    by_class = {kind: {f.name for f in FORMATS.values() if f.arithmetic is kind} for kind in Arithmetic}
    assert by_class == {
        Arithmetic.FLOAT: {"F32", "F16", "BF16", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4"},
        Arithmetic.INT32: {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"},
        Arithmetic.INT256: {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"},
    }


def test_block_sizes_agree_with_the_gguf_package():
    import gguf

    for id, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if id.name != "Q8_1":  # the package counts its two half-precision scales as single precision
            assert (FORMATS[id].name, FORMATS[id].block, FORMATS[id].bytes) == (id.name, block, size)


def test_dequantised_values_are_those_of_the_blocks():
    block = np.zeros(34, np.uint8)
    block[:2] = np.array([0.5], np.float16).view(np.uint8)
    block[2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    values = dequantise(FORMATS_BY_NAME["Q8_0"], np.tile(block, 6), (3, 2, 32))
    np.testing.assert_array_equal(values, np.broadcast_to(np.arange(-16, 16) / 2, (3, 2, 32)))
    bf16 = dequantise(FORMATS_BY_NAME["BF16"], np.array([0x80, 0x3F, 0, 0xC0], np.uint8), (2,))
    np.testing.assert_array_equal(bf16, np.array([1, -2], np.float32))
    with pytest.raises(ValueError, match="takes 34 bytes, got 33"):
        dequantise(FORMATS_BY_NAME["Q8_0"], block[:33], (32,))


def test_identity_tells_a_touched_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"1")
    before = Identity.of(path.stat())
    os.utime(path, ns=(1, 1))
    assert Identity.of(path.stat()) != before
