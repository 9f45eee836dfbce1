"""Models of one file or several: any way of naming a set finds it, and what is wrong is said in one line."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_writer import I32, U16, GgufBytes, generate_model

from sparkd.errors import ModelFileError, SparkError, UnsupportedError
from sparkd.gguf.model_file import Identity, ModelFile


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        ModelFile.open(path)
    line = str(caught.value)
    assert "\n" not in line and str(path.parent) in line
    return line


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    """The same model whole, in three parts, and with an empty first part."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("whole", "split", "empty_first")}
    overrides = {"n_layer": 2}

    def make(name: str, **options) -> None:
        generate_model("laguna", "tinyk", "q4_k_m", folders[name] / "m.gguf", overrides=overrides, **options)

    make("whole")
    make("split", split_max_size=800_000)
    make("empty_first", split_max_size=800_000, split_empty_first=True)
    return folders


def copy(folder: Path, to: Path) -> list[Path]:
    return sorted(Path(shutil.copy(file, to)) for file in folder.iterdir())


def tensor_bytes(model: ModelFile, name: str) -> bytes:
    tensor = model.tensor(name)
    with model.shards[tensor.shard].path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


@pytest.mark.parametrize("kind", ["split", "empty_first"])
def test_any_shard_and_the_folder_give_the_whole_set(sets, kind):
    whole = ModelFile.open(sets["whole"] / "m.gguf")
    files = sorted(sets[kind].iterdir())
    assert len(files) >= 3
    models = [ModelFile.open(path) for path in (*files, sets[kind])]
    for model in models:
        assert [shard.path for shard in model.shards] == files
        assert model.fingerprint == models[0].fingerprint
        assert model.tensors == models[0].tensors
        assert model.architecture == "laguna"
        assert model.total_bytes == sum(path.stat().st_size for path in files)
        assert model.tensor_bytes == whole.tensor_bytes
        assert model.notes == whole.notes == ()
    assert set(models[0].tensors) == set(whole.tensors)
    for name in whole.tensors:
        assert tensor_bytes(models[0], name) == tensor_bytes(whole, name)
    assert (kind == "empty_first") == all(tensor.shard > 0 for tensor in models[0].tensors.values())


@pytest.mark.parametrize("kind", ["whole", "split", "empty_first"])
def test_a_model_is_rebuilt_from_kept_headers_without_its_files(sets, kind):
    model = ModelFile.open(sets[kind])
    headers = [bytes(shard.header) for shard in model.shards]
    files = [(Path("/gone") / shard.path.name, shard.identity) for shard in model.shards]
    again = ModelFile.from_headers(headers, files)
    assert again.tensors == model.tensors
    assert again.fingerprint == model.fingerprint
    assert dict(again.metadata).keys() == dict(model.metadata).keys()
    assert list(again.metadata.strings("tokenizer.ggml.merges")) == list(
        model.metadata.strings("tokenizer.ggml.merges")
    )
    assert [shard.data_offset for shard in again.shards] == [shard.data_offset for shard in model.shards]
    with pytest.raises(ModelFileError, match=r"/gone/.*inside"):
        ModelFile.from_headers([headers[0][:-40], *headers[1:]], files)


def test_shards_carry_header_and_identity(sets):
    for shard in ModelFile.open(sets["split"]).shards:
        assert shard.identity == Identity.of(shard.path.stat())
        assert shard.header == shard.path.read_bytes()[: shard.data_offset]


def test_a_missing_shard_is_named(sets, tmp_path):
    files = copy(sets["split"], tmp_path)
    files[1].unlink()
    for path in (files[0], files[-1], tmp_path):
        line = refusal(path)
        assert files[1].name in line and files[0].name not in line.replace(str(path), "")
    files[0].unlink()
    assert files[0].name in refusal(tmp_path)


def test_two_models_in_one_folder_are_both_named(sets, tmp_path):
    copy(sets["split"], tmp_path)
    shutil.copy(sets["whole"] / "m.gguf", tmp_path / "other.gguf")
    line = refusal(tmp_path)
    assert "2 models" in line and "other.gguf" in line and "m-*-of-" in line
    assert len(ModelFile.open(tmp_path / "other.gguf").shards) == 1


def test_parts_of_two_sets_under_one_name_are_refused(sets, tmp_path):
    files = copy(sets["split"], tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    generate_model("laguna", "tinyk", "q4_k_m", other / "m.gguf", split_max_size=400_000)
    foreign = sorted(other.iterdir())
    assert len(foreign) > len(files)
    shutil.copy(foreign[1], files[1])
    line = refusal(files[0])
    assert str(files[1]) in line and f"of {len(foreign)}" in line and "different sets" in line


def shard(no: int, count: int, total: int, tensors: list[str], architecture: str = "laguna") -> bytes:
    file = GgufBytes().text("general.architecture", architecture)
    file.key("split.no", U16, no).key("split.count", U16, count).key("split.tensors.count", I32, total)
    for name in tensors:
        file.tensor(name, (8,))
    return file.build()


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"no": 1, "count": 2, "total": 3}, "split.tensors.count"),
        ({"no": 0, "count": 2, "total": 2}, "part 1 of 2"),
        ({"no": 1, "count": 3, "total": 2}, "part 2 of 3"),
        ({"no": 1, "count": 2, "total": 2, "architecture": "qwen35moe"}, "general.architecture"),
        ({"no": 1, "count": 2, "total": 2, "tensors": ["a"]}, "'a'"),
        ({"no": 1, "count": 2, "total": 2, "tensors": ["b", "c"]}, "3 tensors"),
        ({"no": 5, "count": 2, "total": 2}, "contradict"),
    ],
)
def test_split_keys_that_do_not_match_are_refused(tmp_path, second, said):
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(shard(0, 2, 2, ["a"]))
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(shard(**{"tensors": ["b"], **second}))
    assert said in refusal(tmp_path)


def test_a_renamed_shard_is_refused_with_the_name_it_should_have(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(shard(1, 3, 3, ["a"]))
    assert "m-00002-of-00003.gguf" in refusal(path)
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(GgufBytes().text("general.architecture", "laguna").build())
    assert "part 1 of 1" in refusal(path)


def test_a_set_of_one_is_a_model(tmp_path):
    path = tmp_path / "m-00001-of-00001.gguf"
    path.write_bytes(shard(0, 1, 1, ["a"]))
    assert set(ModelFile.open(tmp_path).tensors) == {"a"}
    path.write_bytes(GgufBytes().text("general.architecture", "laguna").build())
    assert ModelFile.open(path).architecture == "laguna"


def test_an_absent_a_foreign_and_an_empty_path_are_told_apart(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.gguf")
    (tmp_path / "readme.md").write_text("hello")
    assert "no .gguf file" in refusal(tmp_path)
    assert "not a GGUF file" in refusal(tmp_path / "readme.md")
    (tmp_path / "m.gguf").touch()
    assert "empty" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / "m.gguf" / "inner.gguf")
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refusal(tmp_path / "pipe")


def test_a_path_with_impossible_characters_is_refused():
    with pytest.raises(ModelFileError, match="null"):
        ModelFile.open(Path("model\0.gguf"))


def test_a_file_without_architecture_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(GgufBytes().text("general.name", "x").build())
    assert "'general.architecture' is missing" in refusal(path)


def test_missing_tensors_and_types_without_arithmetic_are_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    file = GgufBytes().text("general.architecture", "laguna")
    path.write_bytes(file.tensor("grid", (256,), type=19, nbytes=50).tensor("plain", (8,)).build())
    model = ModelFile.open(path)
    assert model.computable("plain").nbytes == 32
    assert model.tensor("grid").format.name == "IQ1_S"
    with pytest.raises(UnsupportedError, match=r"m\.gguf: tensor 'grid' has type IQ1_S"):
        model.computable("grid")
    with pytest.raises(ModelFileError, match=r"tensor 'absent' is missing"):
        model.tensor("absent")


def as_another_user(action: Callable[[], str]) -> str:
    """What `action` returns in a child that has no privileges (root passes every permission check)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(writer, action().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def opening(path: Path) -> str:
    try:
        ModelFile.open(path)
    except SparkError as error:
        return f"{type(error).__name__} {error}"
    return "opened"


@pytest.fixture
def open_to_all():
    """A model two folders deep that every user may read."""
    top = Path(tempfile.mkdtemp(prefix="sparkd-test-"))
    try:
        path = top / "models" / "mine" / "m.gguf"
        path.parent.mkdir(parents=True)
        path.write_bytes(GgufBytes().text("general.architecture", "laguna").build())
        for entry in (top, top / "models", path.parent):
            entry.chmod(0o755)
        path.chmod(0o644)
        yield path
    finally:
        for entry in (top, top / "models", top / "models" / "mine"):
            entry.chmod(0o755)
        shutil.rmtree(top)


def test_the_folder_that_may_not_be_passed_is_named_with_the_user_and_the_fix(open_to_all):
    assert as_another_user(lambda: opening(open_to_all)) == "opened"
    blocked = open_to_all.parents[1]
    blocked.chmod(0o600)
    line = as_another_user(lambda: opening(open_to_all))
    assert line.startswith(f"ModelFileError {open_to_all}: user ")
    assert f"may not pass through the folder {blocked};" in line
    assert re.search(rf"setfacl -m u:\S+:x {re.escape(str(blocked))}\)", line)


def test_the_blocked_folder_behind_a_link_is_named(open_to_all):
    link = open_to_all.parents[2] / "link.gguf"
    link.symlink_to(open_to_all)
    assert as_another_user(lambda: opening(link)) == "opened"
    open_to_all.parent.chmod(0o600)
    line = as_another_user(lambda: opening(link))
    assert str(link) in line and f"may not pass through the folder {open_to_all.parent};" in line


def test_a_file_or_folder_that_may_not_be_read_is_named_with_the_fix(open_to_all):
    open_to_all.chmod(0)
    line = as_another_user(lambda: opening(open_to_all))
    assert f"may not read the file {open_to_all}" in line and "setfacl" in line
    open_to_all.parent.chmod(0o311)
    line = as_another_user(lambda: opening(open_to_all.parent))
    assert f"may not list the folder {open_to_all.parent}" in line and "setfacl" in line


def test_a_part_that_may_not_be_read_is_named(sets, open_to_all):
    open_to_all.unlink()
    parts = copy(sets["split"], open_to_all.parent)
    parts[1].chmod(0)
    assert f"may not read the file {parts[1]}" in as_another_user(lambda: opening(open_to_all.parent))
