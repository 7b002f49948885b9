"""Starts and stops the llama.cpp server as a child process of this one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast
from urllib.parse import urlsplit

from agent_loop.local_models.cpu_model.gguf import transformers_tokenizer
from agent_loop.local_models.cpu_model.weights import AS_IS, EXACT, CpuModelMissing, copy_as, smollm2_gguf
from agent_loop.local_models.standin.chatml import chatml_template
from agent_loop.model.backends.llamacpp import LlamaCppBackend

if TYPE_CHECKING:
    from agent_loop.model.tokens.template import Tokenizer

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
RESTART_PAUSE_S = 5.0
STOP_TIMEOUT_S = 10.0
CONTEXT_TOKENS = 2048


class CpuModelError(RuntimeError):
    """The server did not come up; the message ends with the end of its log."""


class CpuModel:
    """`async with CpuModel(f16=True) as model:` ... `model.url`, `model.tokenizer`, `model.backend()`."""

    def __init__(
        self,
        *,
        model: Path | str | None = None,
        f16: bool = False,
        weights: str = AS_IS,
        context_tokens: int = CONTEXT_TOKENS,
        parallel: int = 4,
        threads: int | None = None,
        poll: int | None = None,
        lora: Path | str | None = None,
        cache: Path | None = None,
        chat_template: str | None = None,
        version: str | None = None,
        state_folder: str | None = None,
    ) -> None:
        """`context_tokens` is the context of each of the `parallel` slots; `lora` is a GGUF adapter.

        `weights` is the type its matrices are served in: Q8_0, F16, F32, or as they are in the file. With a `version`
        each answer's `model` is NAME@VERSION. In `state_folder` the server may save the state of its slots.
        On F16 (`f16` for short) and F32 attention is in 32 bits, so that sampling and asking again agree closely.

        llama.cpp's threads wait for each other by spinning: where other processes want the cores too, one thread is
        several times as fast as two (measured: 4.7 s against 26 s for 30 tokens under load). `poll` is how eagerly they
        spin, 0 (not at all) to 100; llama.cpp's own default is 50.
        """
        self._model, self._cache = Path(model) if model else None, cache
        self._weights = "F16" if f16 and weights == AS_IS else weights
        self._version, self._state_folder = version, state_folder
        self._context_tokens, self._parallel = context_tokens, parallel
        self._threads = threads or os.cpu_count() or 1
        self._poll = poll
        self._lora = lora
        self._chat_template = chat_template
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None
        self.url = ""
        self.context_tokens = context_tokens

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process else None

    @cached_property
    def path(self) -> Path:
        """The weights that are served."""
        source = self._model or smollm2_gguf()
        return source if self._weights == AS_IS else copy_as(source, self._weights, self._cache)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer, with the ChatML template that writes tools."""
        return cast("Tokenizer", transformers_tokenizer(self.path, self._chat_template or chatml_template()))

    def backend(self) -> LlamaCppBackend:
        """A new token backend for this server."""
        return LlamaCppBackend(self.url)

    async def __aenter__(self) -> CpuModel:
        try:
            await asyncio.wait_for(self._start(), START_TIMEOUT_S)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def ended(self) -> str:
        """Wait for the end of the server; the end of its log."""
        if self._process is None:
            return ""
        await self._process.wait()
        return self._log_tail() if self._log is not None else ""

    async def keep_alive(self) -> None:
        """Start the server again, at the same address, whenever it ends by itself. Runs until it is cancelled."""
        port = urlsplit(self.url).port
        while True:
            said = await self.ended()
            log.warning("the llama.cpp server ended and is started again: %s", said or "it said nothing")
            await self._stop()
            try:
                await asyncio.wait_for(self._start(port), START_TIMEOUT_S)
            except (CpuModelError, TimeoutError) as error:
                log.error("the llama.cpp server could not be started again: %s", error)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _start(self, port: int | None = None) -> None:
        _require_llamacpp()
        options = {
            "owner": os.getpid(),
            "model": str(await asyncio.to_thread(lambda: self.path)),
            "port": port or free_port(),
            "context_tokens": self._context_tokens,
            "parallel": self._parallel,
            "threads": self._threads,
            "poll": self._poll,
            "full_attention": self._weights in EXACT,
            "lora": str(self._lora) if self._lora else None,
            "state_folder": self._state_folder,
            "alias": f"{self.path.stem}@{self._version}" if self._version is not None else None,
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _stop
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "agent_loop.local_models.cpu_model",
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            # llama.cpp may write to the same stream: the address is the line that is JSON.
            if line.startswith(b'{"url"'):
                self.url = json.loads(line)["url"]
                return
        raise CpuModelError(f"the llama.cpp server did not start: {self._log_tail()}")

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _log_tail(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read()[-500:].decode("utf-8", "replace").strip()


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _require_llamacpp() -> None:
    import importlib.util

    if importlib.util.find_spec("xllamacpp") is None:
        raise CpuModelMissing("no llama.cpp here: `pip install xllamacpp gguf && hermes-rl model get`")
