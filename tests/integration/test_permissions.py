"""A daemon whose user may not reach its model says once which folder is in the way, for whom, and what to do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from other_user import as_nobody

from sparkd.demo.main import MODEL as DEMO


@pytest.fixture
def places(open_folder: Path) -> tuple[Path, Path]:
    """A model three folders deep, and a folder that the other user may write."""
    (open_folder / "data" / "models").mkdir(parents=True)
    (open_folder / "runs").mkdir()
    (open_folder / "runs").chmod(0o777)
    return Path(shutil.copy(DEMO, open_folder / "data" / "models")), open_folder / "runs" / "run"


def serve(model: Path, run_dir: Path) -> str:
    """What a daemon of another user says before it ends with exit code 1."""
    done = as_nobody("-m", "sparkd.cli", "serve", str(model), "--run-dir", str(run_dir), "--config", "/dev/null")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert not run_dir.exists() or list(run_dir.iterdir()) == [], "nothing was left behind"
    return done.stderr


def test_a_folder_that_the_daemon_may_not_pass_is_named_once_with_user_and_fix(places: tuple[Path, Path]) -> None:
    model, run_dir = places
    closed = model.parent.parent
    closed.chmod(0o700)
    said = serve(model, run_dir).splitlines()
    reason = f"sparkd: {model}: user nobody may not pass through the folder {closed}; "
    assert said[-1] == f"{reason}allow it (setfacl -m u:nobody:x {closed}) or move the model"
    assert len(said) == 2 and said[0].startswith("sparkd: socket "), "it does not try again"
    closed.chmod(0o711)
    model.parent.chmod(0o600)
    assert f"may not pass through the folder {model.parent}; " in serve(model, run_dir)


def test_a_file_that_the_daemon_may_not_read_is_named_with_user_and_fix(places: tuple[Path, Path]) -> None:
    model, run_dir = places
    model.chmod(0o600)
    said = serve(model, run_dir)
    assert f"user nobody may not read the file {model}; allow it (setfacl -m u:nobody:r {model})" in said


def test_a_link_into_a_closed_folder_names_the_folder_it_leads_to(places: tuple[Path, Path]) -> None:
    model, run_dir = places
    link = model.parents[2] / "link.gguf"
    link.symlink_to(model)
    model.parent.chmod(0o700)
    assert f"{link}: user nobody may not pass through the folder {model.parent}; " in serve(link, run_dir)


def test_a_run_directory_that_cannot_be_made_is_named(places: tuple[Path, Path]) -> None:
    model, _ = places
    said = serve(model, model.parent / "run")
    assert re.search(rf"sparkd: {model.parent / 'run'}: cannot be the run directory: Permission denied; choose", said)
