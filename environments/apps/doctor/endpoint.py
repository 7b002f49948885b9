"""The model endpoints and tokenizers that a config names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from environments.apps.doctor.findings import ANSWER_WITHIN_S, Finding
from environments.config.loader import masked


async def http_status(url: str) -> int | None:
    """Status of a GET, or None when nothing answers there."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError, ValueError, OSError):
        return None


async def endpoints(settings: Mapping[str, Any]) -> list[Finding]:
    """One finding for each model server and each tokenizer named anywhere in a config."""
    urls = dict.fromkeys(_values(settings, "base_url"))
    tokenizers = dict.fromkeys(_values(settings, "tokenizer_name"))
    asked = [_endpoint(url) for url in urls] + [asyncio.to_thread(_tokenizer, name) for name in tokenizers]
    return list(await asyncio.gather(*asked))


async def _endpoint(url: str) -> Finding:
    shown = masked({"base_url": url})["base_url"]
    root = url.rstrip("/").removesuffix("/v1")
    for probe in (f"{root}/health", f"{root}/v1/models"):
        status = await http_status(probe)
        if status == 200:
            return Finding("endpoint", "ok", f"{shown} answers")
    if status is None:
        return Finding("endpoint", "broken", f"{shown} does not answer", "start the model server, or correct base_url")
    return Finding("endpoint", "limited", f"{shown} answers HTTP {status}", "check the address and the API key")


def _tokenizer(name: str) -> Finding:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(name, local_files_only=not Path(name).exists())
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0][:120]
        return Finding("tokenizer", "broken", f"{name}: {reason}", "download it once, or give a local folder")
    return Finding("tokenizer", "ok", name)


def _values(settings: Any, key: str) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            if name == key and isinstance(value, str) and value:
                yield value
            else:
                yield from _values(value, key)
    elif isinstance(settings, list):
        for value in settings:
            yield from _values(value, key)
