"""Model servers for `hermes-rl bench loop`: each answers every prompt with one call of the terminal after a fixed time.

`stand-in`: the token recorder over the policy stand-in as a process of its own, so that the HTTP client is part of the
CPU measured. `in-process`: the token recorder over a backend inside this process, without HTTP. `text`: no tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agent_loop.backends import Generation, TokenBackend, VllmBackend
from agent_loop.model import Conversation, Message, ModelCall, ModelServer, ModelTurn, Sampling, Segment, ToolSchema
from agent_loop.recorder import Recorder
from agent_loop.standin import chatml_tokenizer
from agent_loop.tokens.probe import probe_template
from tool_parsers import get_parser

KINDS = ("stand-in", "in-process", "text")

_ARGUMENTS = {"command": "ls -la src && wc -l src/*.py"}
_WORDS = "I look at the next part of the project. " * 4
_CALL = json.dumps({"name": "terminal", "arguments": _ARGUMENTS})
_TURN = f"<think>\n{_WORDS}\n</think>\n\n<tool_call>\n{_CALL}\n</tool_call>"


@asynccontextmanager
async def bench_server(kind: str, latency_s: float) -> AsyncIterator[ModelServer]:
    """A model server of one of `KINDS`."""
    if kind == "text":
        yield _TextServer(latency_s)
    elif kind == "in-process":
        yield _recorder(_FixedBackend(latency_s))
    else:
        async with _standin_process(latency_s) as url:
            server = _recorder(VllmBackend(url))
            try:
                yield server
            finally:
                await server.close()


def _recorder(backend: TokenBackend) -> Recorder:
    return Recorder(backend, probe_template(chatml_tokenizer()), get_parser("hermes"))


@asynccontextmanager
async def _standin_process(latency_s: float) -> AsyncIterator[str]:
    command = ["-m", "agent_loop.standin", "--say", _TURN, "--latency-s", str(latency_s)]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=quiet, stdout=asyncio.subprocess.PIPE, stderr=quiet
    )
    try:
        if process.stdout is None or not (line := await process.stdout.readline()):
            raise RuntimeError("the stand-in did not start")
        yield line.decode().strip()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class _FixedBackend:
    """Samples the same turn every time, after a fixed time."""

    def __init__(self, latency_s: float) -> None:
        tokenizer = chatml_tokenizer()
        self._ids = tokenizer.encode(_TURN, add_special_tokens=False)
        if tokenizer.eos_token_id is not None:
            self._ids.append(tokenizer.eos_token_id)
        self._latency_s = latency_s

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """The fixed turn."""
        await asyncio.sleep(self._latency_s)
        return Generation(list(self._ids), [-0.5] * len(self._ids), "stop")

    async def close(self) -> None:
        """Nothing to drop."""


class _TextServer:
    """Chat without tokens, inside this process."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Conversation:
        """A conversation that remembers nothing."""
        return _TextConversation(self.latency_s)

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int | None:
        """No tokenizer."""
        return None


class _TextConversation:
    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s

    def append(self, messages: Sequence[Message]) -> None:
        """Nothing to keep."""

    def restart(self, messages: Sequence[Message]) -> None:
        """Nothing to keep."""

    async def sample(self, sampling: Sampling) -> ModelTurn:
        """The fixed turn."""
        await asyncio.sleep(self._latency_s)
        made = (ModelCall("terminal", json.dumps(_ARGUMENTS)),)
        return ModelTurn(_WORDS, made, finish_reason="tool_calls", sampled_tokens=60)

    def prompt_tokens(self) -> int | None:
        """Unknown."""
        return None

    def segments(self) -> list[Segment]:
        """None."""
        return []

    def state(self) -> dict[str, Any] | None:
        """None."""
        return None
