"""The run directory: what a resumed run keeps, and who may write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.apps.learn.run_folder import RunFolder, read_entries
from environments.errors import UsageError
from support.learn_entries import evaluation, step


def save(folder: Path, number: int) -> None:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    (checkpoints / f"step-{number:04}.npz").touch()
    (checkpoints / "last").unlink(missing_ok=True)
    (checkpoints / "last").symlink_to(f"step-{number:04}.npz")


def test_a_resumed_run_forgets_what_came_after_its_last_checkpoint(tmp_path):
    with RunFolder(tmp_path) as folder:
        for entry in (evaluation(0, 0.1), step(1), step(2)):
            folder.add(entry)
    save(tmp_path, 1)
    with RunFolder(tmp_path, resume=True) as folder:
        assert folder.saved_step == 1
        assert [entry["step"] for entry in folder.entries] == [0, 1]
    assert read_entries(tmp_path) == folder.entries


def test_a_run_is_not_overwritten_unless_told_so_and_not_written_twice(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.add(step(1))
        with pytest.raises(UsageError, match="another process"), RunFolder(tmp_path, resume=True):
            pass
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="--resume goes on"), RunFolder(tmp_path):
        pass
    with RunFolder(tmp_path, fresh=True) as folder:
        assert folder.entries == []
    assert (tmp_path / "notes.txt").exists()
