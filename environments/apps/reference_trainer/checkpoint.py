"""Checkpoints: all of a `State` in one npz, written whole and then renamed; going on from one is bit for bit the same
as never having stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from environments.apps.reference_trainer.adam import AdamState
from environments.apps.reference_trainer.learner import State
from environments.apps.reference_trainer.llama import Lora

LAST = "last"


class CheckpointMismatch(ValueError):
    """The checkpoint is of another adapter than the settings ask for."""


def save_checkpoint(folder: Path, state: State, keep: int) -> Path:
    """Write `step-NNNN.npz`, point `last` to it, and remove all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{state.step:04}.npz"
    arrays: dict[str, Any] = {
        f"{kind}.{name}.{part}": np.asarray(array)
        for kind, tree in (("lora", state.lora), ("mean", state.adam.mean), ("square", state.adam.square))
        for name, matrices in tree.items()
        for part, array in matrices.items()
    }
    partial = folder / f"{path.name}.partial"
    with partial.open("wb") as file:
        np.savez(file, step=state.step, updates=state.updates, **arrays)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    link = folder / f"{LAST}.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.replace(folder / LAST)
    for old in sorted(folder.glob("step-*.npz"))[:-keep]:
        old.unlink()
    return path


def load_checkpoint(folder: Path, like: State) -> State | None:
    """The last state, or None when there is none yet. `like` has the shapes that the settings ask for."""
    path = folder / LAST
    if not path.is_file():
        return None
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file)

    def tree(kind: str, model: Lora) -> Lora:
        return {
            name: {part: _fitting(path, arrays, f"{kind}.{name}.{part}", array) for part, array in matrices.items()}
            for name, matrices in model.items()
        }

    adam = AdamState(tree("mean", like.adam.mean), tree("square", like.adam.square))
    return State(int(arrays["step"]), int(arrays["updates"]), tree("lora", like.lora), adam)


def _fitting(path: Path, arrays: dict[str, Any], key: str, like: Any) -> Any:
    found = arrays.get(key)
    if found is None or found.shape != like.shape:
        shape = None if found is None else found.shape
        raise CheckpointMismatch(
            f"{path}: {key} is {shape}, the settings ask for {like.shape}; resume with the rank, first_layer and model "
            "it was started with, or start anew without resume"
        )
    return found
