"""Finds out which server answers at an address."""

from __future__ import annotations

from collections.abc import Callable

from agent_loop.model.backends.backend import TokenBackend
from agent_loop.model.backends.http import JsonClient
from agent_loop.model.backends.llamacpp import LlamaCppBackend
from agent_loop.model.backends.sglang import SGLangBackend
from agent_loop.model.backends.vllm import VllmBackend, VllmGenerateBackend, VllmScaleOutBackend
from agent_loop.model.contract import ModelRefused

BACKENDS: dict[str, Callable[..., TokenBackend]] = {
    "llamacpp": LlamaCppBackend,
    "vllm": VllmBackend,
    "vllm-scale-out": VllmScaleOutBackend,
    "vllm-generate": VllmGenerateBackend,
    "sglang": SGLangBackend,
}
SIGNS = (("/props", "llamacpp"), ("/get_model_info", "sglang"), ("/version", "vllm"))
"""An address that only this server has."""


async def connect(
    url: str, kind: str = "auto", *, api_key: str | None = None, timeout_s: float = 600.0
) -> TokenBackend:
    """The backend for a server; `auto` asks the server what it is."""
    if kind == "auto":
        kind = await _kind_of(url, api_key)
    if kind not in BACKENDS:
        raise ValueError(f"unknown backend {kind!r}: one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[kind](url, api_key=api_key, timeout_s=timeout_s)


async def _kind_of(url: str, api_key: str | None) -> str:
    client = JsonClient(url, api_key=api_key, timeout_s=30.0)
    try:
        for path, kind in SIGNS:
            try:
                await client.get(path)
            except ModelRefused:
                continue
            return kind
    finally:
        await client.close()
    raise ModelRefused(f"{url}: answers neither as llama.cpp nor as SGLang nor as vLLM: name the backend")
