"""Answers the tool calls of one running script. The frames come over a socket inside the slot.

Anyone in the slot can connect to the socket: only frames with this execution's secret are answered. Calls are taken
from several threads at once, up to the limit; a tool that the rollout does not have is always refused.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from typing import Any

from agent_loop.runtime import NestedCall
from agent_loop.tools.json_text import dump
from agent_loop.tools.tool import ToolContext
from sandbox_pool.errors import SandboxError

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 200_000
PIECE_CHARS = 25_000
"""Escaped once more as JSON, no piece of this length is longer than a frame may be."""


class ScriptBridge:
    """The agent's end of one execution."""

    def __init__(self, ctx: ToolContext, token: str) -> None:
        self._ctx = ctx
        self.token = token
        self._names = frozenset(tool.name for tool in ctx.script_tools)
        self._calls: set[asyncio.Task[Any]] = set()
        """Tasks that run `handle`, one for each frame."""
        self._pieces: dict[str, list[str]] = {}
        self._closed = False
        self._made = 0
        self.nested: list[NestedCall] = []
        self.started = False
        """Whether a fitting Python has said hello."""
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the sandbox failed under a call: the script cannot go on, and neither can the rollout."""

    @property
    def calls_made(self) -> int:
        """Tool calls that were run."""
        return self._made

    async def handle(self, frame: bytes) -> bytes:
        """Answer one frame; every answer is one line of JSON."""
        try:
            request: Any = json.loads(frame)
        except (ValueError, RecursionError):
            return _refused("The request is not JSON.")
        if not isinstance(request, dict) or not _same(request.get("token"), self.token):
            return _refused("The request does not have this execution's secret.")
        if "hello" in request:
            self.started = True
            return b'{"ok": true}'
        if "more" in request:
            return self._piece(request["more"])
        return await self._call(request.get("tool"), request.get("args"))

    async def _call(self, name: Any, arguments: Any) -> bytes:
        if self._closed:
            return _refused("The script has ended.")
        if name not in self._names:
            available = ", ".join(sorted(self._names)) or "none"
            return _refused(f"Tool {name!r} is not available in scripts here. Available: {available}.")
        limit = self._ctx.config.script.max_calls
        if self._made >= limit:
            return _refused(f"The limit of {limit} tool calls for one script is reached.")
        self._made += 1
        task = asyncio.current_task()
        if task is not None:
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        try:
            outcome, record = await self._ctx.call_nested(name, arguments)
        except SandboxError as error:
            if not self.fault.done():
                self.fault.set_exception(error)
            return _refused("The sandbox was lost.")
        except Exception as error:  # the script waits for an answer, whatever went wrong here
            log.exception("a script's call of %s failed", name)
            return _refused(f"{name} failed: {type(error).__name__}: {error}")
        self.nested.append(record)
        return self._reply(outcome.text)

    def _reply(self, text: str) -> bytes:
        """A result as one frame, or the first piece of one that is too long for a frame."""
        data = text.encode("utf-8", "replace")
        if len(data) <= MAX_FRAME_BYTES:
            return data
        key = secrets.token_hex(8)
        self._pieces[key] = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
        return self._piece(key)

    def _piece(self, key: Any) -> bytes:
        pieces = self._pieces.get(key) if isinstance(key, str) else None
        if not pieces:
            return _refused("There is no more of that result.")
        piece = pieces.pop(0)
        if not pieces:
            del self._pieces[key]
        return dump({"piece": piece, "more": key if pieces else None}).encode("utf-8", "replace")

    async def close(self) -> None:
        """Stop the calls that still run: nothing of a script outlives it."""
        self._closed = True
        running = list(self._calls)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if not self.fault.done():
            self.fault.cancel()


def _same(given: Any, token: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _refused(reason: str) -> bytes:
    return dump({"error": reason}).encode("utf-8", "replace")
