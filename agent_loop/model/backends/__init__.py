"""Inference servers that take token ids and give token ids with logprobs: one small interface, one file per server."""

from agent_loop.model.backends.backend import Generation, Scorer, TokenBackend
from agent_loop.model.backends.connect import BACKENDS, connect
from agent_loop.model.backends.llamacpp import LlamaCppBackend
from agent_loop.model.backends.sglang import SGLangBackend
from agent_loop.model.backends.vllm import VllmBackend, VllmGenerateBackend, VllmScaleOutBackend

__all__ = [
    "BACKENDS",
    "Generation",
    "LlamaCppBackend",
    "SGLangBackend",
    "Scorer",
    "TokenBackend",
    "VllmBackend",
    "VllmGenerateBackend",
    "VllmScaleOutBackend",
    "connect",
]
