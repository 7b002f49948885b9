"""Inference servers that take token ids and give token ids with logprobs: one small interface, one file per server."""

from agent_loop.backends.base import Generation, Scorer, TokenBackend
from agent_loop.backends.detect import BACKENDS, connect
from agent_loop.backends.llamacpp import LlamaCppBackend
from agent_loop.backends.sglang import SGLangBackend
from agent_loop.backends.vllm import VllmBackend, VllmGenerateBackend, VllmScaleOutBackend

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
