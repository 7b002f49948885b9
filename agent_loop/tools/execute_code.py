"""execute_code: a Python script in the sandbox that calls the rollout's tools itself.

The script and a generated `hermes_tools` module go in through stdin of one command; tool calls come back over a socket
inside the slot. When the call returns, whether done, failed, timed out or cancelled, nothing of the script is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import signal
from typing import Any

from agent_loop.tools.errors import InvalidArguments, ToolFailure
from agent_loop.tools.hygiene import cap_bytes, strip_ansi
from agent_loop.tools.json_text import dump
from agent_loop.tools.script_bridge import ScriptBridge
from agent_loop.tools.script_stub import describe, script_source, stub_module
from agent_loop.tools.tool import Tool, ToolContext, ToolReturn, load_schema
from sandbox_pool.errors import SandboxError
from sandbox_pool.results import ExecResult

_NO_PYTHON = 127
_OLD_PYTHON = 86
_NOTE_BYTES = 500
_INTERRUPTS = {128 + number: number.name for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)}
"""Exit codes of a shell whose command was killed from outside."""


async def run(ctx: ToolContext, arguments: dict[str, Any]) -> ToolReturn:
    """Run the script; the result says how it ended and what it printed."""
    code = arguments["code"]
    if not code.strip():
        raise InvalidArguments("The code is empty.", status="error")
    try:
        code.encode()
    except UnicodeEncodeError:
        raise InvalidArguments("The code has characters that are not valid Unicode.", status="error") from None
    name = secrets.token_hex(8)
    scratch = await ctx.workspace.scratch()
    folder, socket_path = f"{scratch}/hermes_code_{name}", f"{scratch}/hermes_rpc_{name}.sock"
    bridge = ScriptBridge(ctx, token=secrets.token_hex(16))
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
    _check_python(bridge, result)
    return ToolReturn(
        _report(ctx, bridge, result),
        timed_out=result.timed_out,
        nested=tuple(bridge.nested),
        exit_code=result.exit_code,
    )


async def _execute(ctx: ToolContext, bridge: ScriptBridge, job: bytes) -> ExecResult:
    limits = ctx.config.script
    boot = shlex.quote(script_source("boot.py"))
    python = "$(command -v python3 || command -v python)"
    running = asyncio.ensure_future(
        ctx.sandbox.exec(
            f'( python={python} && exec "$python" -c {boot} || exit {_NO_PYTHON} )',
            timeout_s=limits.timeout_s,
            cwd=ctx.workspace.way_back(),
            stdin=job,
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


def _report(ctx: ToolContext, bridge: ScriptBridge, result: ExecResult) -> dict[str, Any]:
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


def describe_for(tool: Tool, ctx: ToolContext) -> dict[str, Any]:
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
