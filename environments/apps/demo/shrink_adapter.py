"""`python -m environments.apps.demo.shrink_adapter IN.gguf OUT.gguf RANK`: an adapter of learn, small enough to ship.

Each pair of matrices is replaced by the nearest one of lower rank (SVD), in 16 bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np


def shrink(source: Path, target: Path, rank: int) -> None:
    """Write the adapter again with this rank."""
    reader = gguf.GGUFReader(source)
    tensors = {tensor.name: np.asarray(tensor.data, np.float32) for tensor in reader.tensors}
    names = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    alpha = float(reader.fields["adapter.lora.alpha"].parts[-1][0])
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    # llama.cpp scales by alpha / rank, which stays as it was.
    writer.add_float32("adapter.lora.alpha", alpha * rank / len(tensors[f"{names[0]}.lora_a"]))
    for name in names:
        a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        # The product b a is large and of low rank: its SVD comes from the small factors of both.
        left, left_small = np.linalg.qr(b)
        right, right_small = np.linalg.qr(a.T)
        u, sizes, v = np.linalg.svd(left_small @ right_small.T)
        roots = np.sqrt(sizes[:rank])
        writer.add_tensor(f"{name}.lora_a", _half((v @ right.T)[:rank] * roots[:, None]))
        writer.add_tensor(f"{name}.lora_b", _half((left @ u)[:, :rank] * roots))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _half(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix.astype(np.float16))


if __name__ == "__main__":
    shrink(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
