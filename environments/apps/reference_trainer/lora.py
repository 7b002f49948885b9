"""LoRA as the GGUF adapter that llama.cpp loads. A reader never meets a half-written file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from environments.apps.reference_trainer.llama import LINEARS, Lora, Model


def new_lora(model: Model, rank: int, seed: int) -> Lora:
    """Random `a`, zero `b`: the adapter starts as the identity, and its first gradient reaches `b`."""
    rng = np.random.default_rng(seed)
    adapter = {}
    for name in LINEARS:
        layers, outputs, inputs = model.weights["upper"][name].shape
        random = rng.standard_normal((layers, rank, inputs)) / np.sqrt(inputs)
        adapter[name] = {
            "a": random.astype(np.float32),
            "b": np.zeros((layers, outputs, rank), np.float32),
        }
    return adapter


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


def read_adapter(path: Path) -> tuple[dict[str, dict[str, np.ndarray]], float, int]:
    """(lora, alpha, first layer) of a file that `write_adapter` wrote."""
    reader = gguf.GGUFReader(path)
    tensors: dict[str, Any] = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    layers = sorted({int(name.split(".")[1]) for name in tensors})
    lora = {
        name: {part: np.stack([tensors[f"blk.{i}.{name}.weight.lora_{part}"] for i in layers]) for part in ("a", "b")}
        for name in LINEARS
    }
    return lora, float(reader.fields["adapter.lora.alpha"].contents()), layers[0]
