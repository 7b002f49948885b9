"""MCP servers of one rollout: their tools become tools of the model.

A server that does not start, ends, or cannot be reached is infrastructure: `McpServerLost` ends the rollout and nothing
is scored. One that runs in the slot, and ends there after its start, is the agent's own doing (`SandboxDestroyed`): it
can end every process of its slot. What a tool itself reports as an error is for the model to read. Each server lives in
a task of its own, because the SDK may cancel the task that opened it; calls come from any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT, jsonrpc_message_adapter

from agent_loop.records.tape import random_name
from agent_loop.tools.config import McpServerConfig
from agent_loop.tools.own_tools import script_parameters
from agent_loop.tools.script.execute_code import script_source
from agent_loop.tools.tool import CallContext, Tool, ToolFailure, outcome_of
from agent_loop.turn.tool_call import ToolOutcome
from sandbox_pool.errors import SandboxDestroyed, SandboxError, did_you_mean

if TYPE_CHECKING:
    from sandbox_pool.client.sandbox import Sandbox

log = logging.getLogger(__name__)

STDERR_CHARS = 500
ALIVE_TIMEOUT_S = 10.0
"""How long a server that let a call time out may take to answer another question before it counts as lost."""
MOST_PAGES = 100
MOST_HEARD_CHARS = 32 << 20
"""Of one message from a slot, and of all that wait for the session: programs there can speak in the server's place."""


class McpServerLost(SandboxError):
    """An MCP server did not start, or ended: the rollout cannot go on, and shows nothing of the policy."""


class McpServer:
    """One server, from `start` to `close`."""

    def __init__(self, name: str, config: McpServerConfig, sandbox: Sandbox, scratch: str) -> None:
        self.name = name
        self._config = config
        self._sandbox = sandbox
        self._scratch = scratch
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[tuple[Client, list[Any]]] = asyncio.get_running_loop().create_future()
        self._life: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._said = ""
        """The end of what the server wrote to stderr, once it has ended."""

    async def start(self) -> list[Tool]:
        """Its tools, under their names here."""
        self._life = asyncio.create_task(self._live(), name=f"mcp {self.name}")
        racing: set[asyncio.Future[Any]] = {self._ready, self._life}
        await asyncio.wait(racing, timeout=self._config.start_timeout_s, return_when="FIRST_COMPLETED")
        if not self._ready.done():
            waited = "" if self._life.done() else f"no answer in {self._config.start_timeout_s:g} s"
            await self.close()
            raise self._lost(f"did not start{f': {waited}' if waited else ''}")
        self._client, listed = self._ready.result()
        return [self._tool(entry) for entry in self._wanted(listed)]

    async def close(self) -> None:
        """End the session, and the server with it."""
        self._closing.set()
        if self._life is not None:
            if not self._ready.done():
                self._life.cancel()
            await asyncio.wait({self._life})

    async def _live(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                Client(self._transport(), read_timeout_seconds=self._config.start_timeout_s, cache=None)
            )
            listed, cursor = [], None
            for _ in range(MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                listed += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            self._ready.set_result((client, listed))
            await self._closing.wait()

    def _transport(self) -> Any:
        if self._config.url:
            return self._over_http()
        return self._in_slot() if self._config.where == "slot" else self._on_host()

    @contextlib.asynccontextmanager
    async def _over_http(self) -> AsyncIterator[Any]:
        headers = {name: value.get_secret_value() for name, value in self._config.headers.items()}
        async with (
            create_mcp_http_client(headers) as http,
            streamable_http_client(self._config.url, http_client=http) as streams,
        ):
            yield streams

    @contextlib.asynccontextmanager
    async def _on_host(self) -> AsyncIterator[Any]:
        program, *arguments = self._config.command
        parameters = StdioServerParameters(command=program, args=arguments, env=self._config.env)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            try:
                async with stdio_client(parameters, errlog=errors) as streams:
                    yield streams
            finally:
                errors.seek(0)
                self._said = errors.read()[-STDERR_CHARS:]

    @contextlib.asynccontextmanager
    async def _in_slot(self) -> AsyncIterator[Any]:
        """Streams whose other end is the relay in the slot: it asks for what to say, and brings what it hears."""
        sandbox, token = self._sandbox, random_name(16)
        to_session, read = anyio.create_memory_object_stream[Any](math.inf)
        write, from_session = anyio.create_memory_object_stream[Any](0)
        pieces: list[str] = []
        heard_chars = 0

        async def handle(frame: bytes) -> bytes:
            request = json.loads(frame)
            if request.get("token") != token:
                return b'{"error": "The request does not have the secret."}'
            if "next" in request:
                try:
                    message = await from_session.receive()
                except (anyio.EndOfStream, anyio.ClosedResourceError):
                    return b"{}"
                return json.dumps({"text": message.message.model_dump_json(by_alias=True, exclude_unset=True)}).encode()
            nonlocal heard_chars
            pieces.append(str(request["text"]))
            heard_chars += len(pieces[-1])
            if heard_chars > MOST_HEARD_CHARS:
                to_session.close()
                return b"{}"
            if not request["more"]:
                heard = "".join(pieces)
                pieces.clear()
                to_session.send_nowait(_parsed(heard))
                waiting = to_session.statistics().current_buffer_used
                heard_chars = heard_chars if waiting else 0
            return b'{"ok": true}'

        path = f"{self._scratch}/hermes_mcp_{random_name(8)}.sock"
        job = {"socket": path, "token": token, "command": self._config.command}
        async with sandbox.serve(path, handle):
            python = (
                f'exec "$(command -v python3 || command -v python)" -c {shlex.quote(script_source("mcp_relay.py"))}'
            )
            process = await sandbox.spawn(python, env=self._config.env)
            await process.write(json.dumps(job) + "\n")

            async def until_it_ends() -> None:
                try:
                    await process.wait()
                finally:
                    to_session.close()  # the session then knows that nobody answers any more

            watching = asyncio.create_task(until_it_ends())
            try:
                yield read, write
            finally:
                watching.cancel()
                await asyncio.wait({watching})
                with contextlib.suppress(SandboxError):
                    self._said = (await process.log()).data[-STDERR_CHARS:]
                    await process.kill()
                for stream in (to_session, read, write, from_session):
                    stream.close()

    def _wanted(self, listed: Sequence[Any]) -> list[Any]:
        if self._config.tools is None:
            return list(listed)
        by_name = {entry.name: entry for entry in listed}
        for name in self._config.tools:
            if name not in by_name:
                raise McpServerLost(f"the MCP server {self.name!r} has no tool {name!r}; {did_you_mean(name, by_name)}")
        return [by_name[name] for name in self._config.tools]

    def _tool(self, entry: Any) -> Tool:
        prefix = f"{self.name}_" if self._config.prefix is None else self._config.prefix
        name = re.sub(r"\W", "_", f"{prefix}{entry.name}", flags=re.ASCII)[:64]
        schema: Mapping[str, Any] = entry.input_schema or {"type": "object", "properties": {}}

        async def run(ctx: CallContext, arguments: dict[str, Any]) -> ToolOutcome:
            return await self.call(entry.name, arguments)

        return Tool(
            schema={"name": name, "description": entry.description or entry.title or entry.name, "parameters": schema},
            toolset="mcp",
            run=run,
            script_parameters=script_parameters(name, schema),
        )

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        """Call one of its tools. ToolFailure is the model's to read; a server that is gone ends the rollout."""
        if self._client is None or self._life is None:
            raise RuntimeError("the server was not started")
        if self._life.done():
            raise self._lost("ended")
        allowed_s = self._config.timeout_s
        asking = asyncio.ensure_future(self._client.call_tool(name, arguments, read_timeout_seconds=allowed_s))
        try:
            await asyncio.wait({asking, self._life}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self._lost("ended")
            return _outcome(asking.result())
        except MCPError as error:
            await self._raise_unless_alive(error)
            if error.code == REQUEST_TIMEOUT:
                return outcome_of(
                    {"error": f"{name} was stopped after {allowed_s:g} s: it took too long."}, timed_out=True
                )
            raise ToolFailure(error.message) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, OSError) as error:
            raise await self._ended(error) from error
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    async def _raise_unless_alive(self, error: MCPError) -> None:
        """A closed connection is a lost server; one over HTTP is asked whether it is still there."""
        if error.code == CONNECTION_CLOSED:
            raise await self._ended(error) from error
        if not (self._config.url and self._client):
            return
        try:
            async with asyncio.timeout(ALIVE_TIMEOUT_S):
                await self._client.list_tools()
        except MCPError as another:
            if another.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT) or another.code == error.code:
                raise await self._ended(error) from error
        except (TimeoutError, OSError, anyio.ClosedResourceError) as another:
            raise await self._ended(another) from another

    async def _ended(self, error: Exception) -> SandboxError:
        """After the session's end, so that what the server said last is known."""
        await self.close()
        return self._lost(f"ended ({str(error) or type(error).__name__})")

    def _lost(self, what: str) -> SandboxError:
        cause = None
        if self._life is not None and self._life.done() and not self._life.cancelled():
            cause = self._life.exception()
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        parts = [f"the MCP server {self.name!r} {what}", *([str(cause) or type(cause).__name__] if cause else [])]
        parts += [" ".join(self._said.split())] if self._said.strip() else []
        in_slot = self._config.where == "slot" and not self._config.url
        return (SandboxDestroyed if in_slot and self._client is not None else McpServerLost)(": ".join(parts))


def _parsed(line: str) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


def _outcome(result: Any) -> ToolOutcome:
    """What the model reads: the texts, or the structured result where there are none."""
    texts = [_text(block) for block in result.content]
    text = "\n".join(texts)
    if result.is_error:
        raise ToolFailure(text or "The tool failed.")
    if not texts and result.structured_content is not None:
        return outcome_of(dict(result.structured_content))
    return outcome_of({"result": text})


def _text(block: Any) -> str:
    """Of a block of any kind. What is no text is named, so that the model knows that there was something."""
    held = block.resource if block.type == "resource" else block
    if isinstance(text := getattr(held, "text", None), str):
        return text
    named = [str(value) for value in (getattr(held, "uri", None), getattr(held, "mime_type", None)) if value]
    return f"[{' '.join([block.type, *named])}]"


@contextlib.asynccontextmanager
async def mcp_tools(
    servers: Mapping[str, McpServerConfig], sandbox: Sandbox, scratch: str
) -> AsyncIterator[list[Tool]]:
    """The tools of all servers, which run as long as the block. `scratch` is a folder of the slot."""
    started = [McpServer(name, config, sandbox, scratch) for name, config in servers.items()]
    try:
        async with asyncio.TaskGroup() as group:
            starting = [group.create_task(server.start()) for server in started]
        yield [tool for task in starting for tool in task.result()]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for server in started:
            await server.close()
