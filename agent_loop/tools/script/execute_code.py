"""execute_code: a Python script in the sandbox that calls the rollout's tools itself.

The script and a generated `hermes_tools` module go in through stdin of one command; tool calls come back over a socket
inside the slot. When the call returns, whether done, failed, timed out or cancelled, nothing of the script is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from agent_loop.records.tape import random_name
from agent_loop.tools.output import cap_bytes, dump, strip_ansi
from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, ToolFailure, load_schema, outcome_of
from agent_loop.turn.tool_call import ToolCallRecord, ToolOutcome, output_keeper
from sandbox_pool.errors import SandboxError
from sandbox_pool.results import ExecResult

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 200_000
PIECE_CHARS = 25_000
"""Escaped once more as JSON, no piece of this length is longer than a frame may be."""


class ScriptBridge:
    """The agent's end of one execution."""

    def __init__(self, ctx: CallContext, token: str) -> None:
        self._ctx = ctx
        self.token = token
        self._names = frozenset(tool.name for tool in ctx.script_tools)
        self._calls: set[asyncio.Task[Any]] = set()
        """Tasks that run `handle`, one for each frame."""
        self._pieces: dict[str, list[str]] = {}
        self._closed = False
        self._made = 0
        self.nested: list[ToolCallRecord] = []
        self.started = False
        """Whether a fitting Python has said hello."""
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the sandbox failed under a call: the script cannot go on, and neither can the rollout."""

    @property
    def calls_made(self) -> int:
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
            call = await self._ctx.call_nested(name, arguments)
        except SandboxError as error:
            if not self.fault.done():
                self.fault.set_exception(error)
            return _refused("The sandbox was lost.")
        except Exception as error:  # the script waits for an answer, whatever went wrong here
            log.exception("a script's call of %s failed", name)
            return _refused(f"{name} failed: {type(error).__name__}: {error}")
        self.nested.append(call)
        return self._reply(call.text)

    def _reply(self, text: str) -> bytes:
        """A result as one frame, or the first piece of one that is too long for a frame."""
        data = text.encode("utf-8", "replace")
        if len(data) <= MAX_FRAME_BYTES:
            return data
        key = random_name(8)
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


@lru_cache(maxsize=4)
def script_source(name: str) -> str:
    """Text of a file of the `script` folder."""
    return files("agent_loop.tools.script").joinpath(name).read_text("utf-8")


def signature(tool: Tool) -> str:
    """How a script calls the tool: `read_file(path, offset=1, limit=500)`."""
    return f"{tool.name}({', '.join(_parameter(tool, name) for name in tool.script_parameters or ())})"


def _parameter(tool: Tool, name: str) -> str:
    schema: dict[str, Any] = tool.parameters["properties"][name]
    if name in tool.parameters.get("required", ()) and "default" not in schema:
        return name
    return f"{name}={schema.get('default')!r}"


def describe(tools: Sequence[Tool]) -> str:
    """The lines of the tool's description that say what a script may call."""
    if not tools:
        return "  (none are enabled)"
    return "\n".join(f"  {signature(tool)} -> dict" for tool in tools)


def stub_module(tools: Sequence[Tool], socket_path: str, token: str) -> str:
    """Source of `hermes_tools.py`."""
    parts = [script_source("hermes_tools_base.py"), f"_agent.update(socket={socket_path!r}, token={token!r})\n"]
    parts.extend(_function(tool) for tool in tools)
    return "\n\n".join(parts)


def _function(tool: Tool) -> str:
    passed = ", ".join(f"{name}={name}" for name in tool.script_parameters or ())
    summary = tool.schema["description"].split("\n", 1)[0]
    return f"def {signature(tool)}:\n    {summary!r}\n    return _call({tool.name!r}, {passed})\n"


_NO_PYTHON = 127
_OLD_PYTHON = 86
_NOTE_BYTES = 500
_INTERRUPTS = {128 + number: number.name for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)}
"""Exit codes of a shell whose command was killed from outside."""


async def run(ctx: CallContext, arguments: dict[str, Any]) -> ToolOutcome:
    """Run the script; the result says how it ended and what it printed."""
    code = arguments["code"]
    if not code.strip():
        raise InvalidArguments("The code is empty.", status="error")
    try:
        code.encode()
    except UnicodeEncodeError:
        raise InvalidArguments("The code has characters that are not valid Unicode.", status="error") from None
    name = random_name(8)
    scratch = await ctx.workspace.scratch()
    folder, socket_path = f"{scratch}/hermes_code_{name}", f"{scratch}/hermes_rpc_{name}.sock"
    bridge = ScriptBridge(ctx, token=random_name(16))
    job = {
        "folder": folder,
        "files": {"hermes_tools.py": stub_module(ctx.script_tools, socket_path, bridge.token), "script.py": code},
    }
    result: ExecResult | None = None
    try:
        async with ctx.sandbox.serve(socket_path, bridge.handle):
            result = await _execute(ctx, bridge, dump(job).encode())
    finally:
        await bridge.close()
        if result is None or result.timed_out or result.exit_code in _INTERRUPTS:
            # Killed, it could not tidy up after itself. In a sandbox that is gone there is nothing to tidy up.
            with contextlib.suppress(SandboxError):
                await ctx.sandbox.remove(folder, recursive=True)
    if failure := ctx.workspace.unusable(ctx.workspace.start(), replace(result, output=result.stderr)):
        failure.fields["status"] = "error"
        raise failure
    _check_python(bridge, result)
    return outcome_of(
        _report(ctx, bridge, result),
        timed_out=result.timed_out,
        nested=tuple(bridge.nested),
        exit_code=result.exit_code,
    )


async def _execute(ctx: CallContext, bridge: ScriptBridge, job: bytes) -> ExecResult:
    limits, cwd, keep = ctx.config.script, ctx.workspace.start(), output_keeper()
    boot = shlex.quote(script_source("boot.py"))
    python = "$(command -v python3 || command -v python)"
    running = asyncio.ensure_future(
        ctx.sandbox.exec(
            f'( python={python} && exec "$python" -c {boot} || exit {_NO_PYTHON} )',
            timeout_s=limits.timeout_s,
            cwd=cwd,
            stdin=job,
            on_activity=ctx.while_running("execute_code"),
            on_stopped=lambda stopped: keep(ctx.redact(strip_ansi(stopped.output + stopped.stderr))),
            merge_stderr=False,
            max_output_chars=max(limits.stdout_bytes, limits.stderr_bytes),
        )
    )
    try:
        waiting: set[asyncio.Future[Any]] = {running, bridge.fault}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if bridge.fault.done():
            bridge.fault.result()
        return await running
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running})


def _check_python(bridge: ScriptBridge, result: ExecResult) -> None:
    if bridge.started or result.timed_out:
        return
    if result.exit_code == _OLD_PYTHON:
        raise ToolFailure(
            "execute_code needs Python 3.8 or newer; the sandbox's is older. Use the terminal.", status="error"
        )
    if result.exit_code == _NO_PYTHON:
        raise ToolFailure(
            "There is no Python in this sandbox: execute_code cannot run. Use the terminal.", status="error"
        )
    if result.exit_code == 0:
        raise ToolFailure("The sandbox's python3 ended without running the script. Use the terminal.", status="error")


def _report(ctx: CallContext, bridge: ScriptBridge, result: ExecResult) -> dict[str, Any]:
    limits = ctx.config.script
    # A note about what the server left out comes on top of the limit.
    room = limits.stdout_bytes + (_NOTE_BYTES if result.truncation else 0)
    output, _ = cap_bytes(ctx.redact(strip_ansi(result.output)), room)
    stderr, _ = cap_bytes(ctx.redact(strip_ansi(result.stderr)), limits.stderr_bytes)
    status, error = _status(result, stderr, limits.timeout_s)
    if status != "success" and stderr.strip():
        output = f"{output}\n--- stderr ---\n{stderr}" if output else f"--- stderr ---\n{stderr}"
    data: dict[str, Any] = {
        "status": status,
        "output": output,
        "tool_calls_made": bridge.calls_made,
        "duration_seconds": round(result.duration_s, 2),
    }
    if error:
        data["error"] = error
    return data


def _status(result: ExecResult, stderr: str, timeout_s: float) -> tuple[str, str | None]:
    if result.timed_out:
        return "timeout", f"The script was killed after {timeout_s:g} s."
    if killer := _INTERRUPTS.get(result.exit_code):
        return "interrupted", f"The script was killed by {killer}."
    if result.exit_code:
        last = stderr.strip().rsplit("\n", 1)[-1][:500]
        return "error", f"The script ended with exit code {result.exit_code}" + (f": {last}" if last else ".")
    return "success", None


def describe_for(tool: Tool, ctx: CallContext) -> dict[str, Any]:
    """The schema with the tools that scripts really have here, and the limits that really apply."""
    limits = ctx.config.script
    text = tool.schema["description"].format(
        tools=describe(ctx.script_tools),
        timeout_s=f"{limits.timeout_s:g}",
        max_calls=limits.max_calls,
        stdout_bytes=f"{limits.stdout_bytes:,}",
    )
    return {**tool.schema, "description": text}


TOOL = Tool(schema=load_schema("execute_code"), toolset="code_execution", run=run)
