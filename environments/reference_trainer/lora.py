"""The adapter that is trained: per linear map of each upper layer two thin matrices, W x + b (a x) * alpha / rank."""

from __future__ import annotations

import numpy as np

from environments.reference_trainer.model import LINEARS, Lora, Model


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
