"""Fixtures of the whole suite: generated test models and golden vectors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
#: Vocabulary and vectors of the bigger models lie beside a developer's checkout and in CI, not in this repository.
SHARED = Path(__file__).parent.parent.parent / "shared"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What daemons keep (profiles) goes into a folder of this run, not into the user's."""
    os.environ.pop("STATE_DIRECTORY", None)
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Processes of the tests can be interrupted, also where a shell has put this run into the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def recipes() -> dict[str, dict]:
    """Every test model by name: architecture, preset, quantisation, seed, size, sha256."""
    return {r["model"]: r for r in json.loads((DATA / "models" / "recipes.json").read_text())}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where generated models lie; SPARKD_TEST_MODELS keeps them between runs."""
    kept = os.environ.get("SPARKD_TEST_MODELS")
    if not kept:
        return tmp_path_factory.mktemp("models")
    Path(kept).mkdir(parents=True, exist_ok=True)
    return Path(kept)


@pytest.fixture(scope="session")
def model_path(recipes: dict[str, dict], model_dir: Path) -> Callable[[str], Path]:
    """Generate the model of a recipe (once) and check its sha256."""
    sys.path.insert(0, str(DATA / "tools"))
    import make_gguf

    def make(name: str) -> Path:
        recipe = recipes[name]
        path = model_dir / f"{name}.gguf"
        expected = recipe["files"][0]["sha256"]
        if not (path.exists() and _sha256(path) == expected):
            vocab = SHARED / "data" / "ggml-vocab-qwen35.gguf"
            if recipe["preset"] not in ("tiny", "tinyk") and not vocab.exists():
                pytest.skip(f"{name} needs the vocabulary {vocab}, which this checkout lacks")
            make_gguf.generate(
                recipe["arch"],
                recipe["preset"],
                recipe["quant"],
                recipe["seed"],
                str(path),
                str(vocab),
                overrides=recipe["overrides"],
            )
            assert _sha256(path) == expected, f"{name}: the generator made other bytes than the recipe says"
        return path

    return make


@pytest.fixture(scope="session")
def vectors_path() -> Callable[[str], Path]:
    """The golden vectors of a model; those of the bigger models are not in this repository."""

    def find(name: str) -> Path:
        for folder in (DATA / "vectors", SHARED / "vectors"):
            if (folder / f"{name}.npz").exists():
                return folder / f"{name}.npz"
        pytest.skip(f"the vectors of {name} are not in this checkout")

    return find


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are for one user alone."""
    made = Path(tempfile.mkdtemp(prefix="sparkd-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)
