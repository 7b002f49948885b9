"""Inference servers that take token ids and give token ids with logprobs: one small interface, one file per server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent_loop.model.backends.backend import Generation, Scorer, TokenBackend
from agent_loop.model.backends.http import JsonClient
from agent_loop.model.backends.llamacpp import LlamaCppBackend
from agent_loop.model.backends.sglang import SGLangBackend
from agent_loop.model.backends.vllm import VllmBackend, VllmGenerateBackend, VllmScaleOutBackend
from agent_loop.model.contract import ModelRefused

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

BACKENDS: dict[str, Callable[..., TokenBackend]] = {
    "llamacpp": LlamaCppBackend,
    "vllm": VllmBackend,
    "vllm-scale-out": VllmScaleOutBackend,
    "vllm-generate": VllmGenerateBackend,
    "sglang": SGLangBackend,
}
SIGNS = (("/props", "llamacpp"), ("/model_info", "sglang"), ("/get_model_info", "sglang"), ("/version", "vllm"))
"""Addresses that only this server has; SGLang's older ones have `/get_model_info`."""


async def connect(
    url: str,
    kind: str = "auto",
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    ca_file: Path | str | None = None,
) -> TokenBackend:
    """The backend for a server; `auto` asks the server what it is."""
    if kind == "auto":
        kind = await _kind_of(JsonClient(url, api_key=api_key, timeout_s=30.0, ca_file=ca_file))
    if kind not in BACKENDS:
        raise ValueError(f"unknown backend {kind!r}: one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[kind](url, model=model, api_key=api_key, timeout_s=timeout_s, ca_file=ca_file)


async def _kind_of(client: JsonClient) -> str:
    try:
        for path, kind in SIGNS:
            try:
                await client.get(path)
            except ModelRefused:
                continue
            return kind
    finally:
        await client.close()
    raise ModelRefused(f"{client.url}: answers neither as llama.cpp nor as SGLang nor as vLLM: name the backend")
