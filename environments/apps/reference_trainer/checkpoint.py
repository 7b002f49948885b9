"""The files of a run: the adapter that llama.cpp loads, and checkpoints that a run can be resumed from.

Each is written whole and then renamed, so that nobody reads half of it. A checkpoint is all of a `State` in one npz: a
resumed run is bit for bit the same as one that never stopped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from environments.apps.reference_trainer.learner import AdamState, State
from environments.apps.reference_trainer.llama import Lora

LAST = "last"


class CheckpointMismatch(ValueError):
    """The checkpoint does not fit the adapter that the settings ask for."""


def write_adapter(path: Path, lora: Lora, alpha: float, first_layer: int, version: str = "") -> None:
    """`lora_a` is [rank, in] and `lora_b` [out, rank]; llama.cpp scales by alpha / rank."""
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    writer.add_string("general.version", version)
    for name, matrices in lora.items():
        for part, stacked in matrices.items():
            for layer, matrix in enumerate(np.asarray(stacked, np.float32), first_layer):
                writer.add_tensor(f"blk.{layer}.{name}.weight.lora_{part}", np.ascontiguousarray(matrix))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


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
    """The last state, or None without one. `like` has the shapes that the settings ask for."""
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
            "it was started with, or start over without resume"
        )
    return found
