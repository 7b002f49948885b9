"""A real language model on the CPU: SmolLM2-135M on a real llama.cpp server, from two packages (`[cpu-model]`).

`async with CpuModel() as model: model.url, model.tokenizer, model.backend()`. The server is a child process on loopback
that dies with its owner.
"""

from agent_loop.local_models.cpu_model.gguf import gguf_tokenizer
from agent_loop.local_models.cpu_model.llama_server import CpuModel, CpuModelError
from agent_loop.local_models.cpu_model.updatable_model import UpdatableModel
from agent_loop.local_models.cpu_model.weights import CpuModelMissing, copy_as, f16_copy, smollm2_gguf

__all__ = [
    "CpuModel",
    "CpuModelError",
    "CpuModelMissing",
    "UpdatableModel",
    "copy_as",
    "f16_copy",
    "gguf_tokenizer",
    "smollm2_gguf",
]
