"""A chat-completions server on loopback that plays scripted HTTP answers and keeps what it was sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


def message(
    content: str | None = None, *made: dict[str, Any], finish: str | None = None, **fields: Any
) -> dict[str, Any]:
    """A completion with one choice; `fields` go into the message."""
    answer: dict[str, Any] = {"role": "assistant", "content": content, **fields}
    if made:
        answer["tool_calls"] = list(made)
    choice = {"index": 0, "message": answer, "finish_reason": finish or ("tool_calls" if made else "stop")}
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


def tool_call(arguments: Any, name: str = "terminal", call_id: str = "call_1") -> dict[str, Any]:
    """A tool call as servers write it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


class ChatScript:
    """Answers in order: a body, or an HTTP status with an error text."""

    def __init__(self, *answers: dict[str, Any] | tuple[int, str]) -> None:
        self._answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    async def _handle(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        answer = self._answers.pop(0)
        if isinstance(answer, tuple):
            status, text = answer
            return web.json_response({"error": {"message": text, "type": "error", "code": None}}, status=status)
        return web.json_response(answer)


@asynccontextmanager
async def chat_server(*answers: dict[str, Any] | tuple[int, str]) -> AsyncIterator[ChatScript]:
    """Serve the answers at `script.url` until the end of the block."""
    script = ChatScript(*answers)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script._handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    script.url = f"http://{host}:{port}/v1"
    try:
        yield script
    finally:
        await runner.cleanup()
