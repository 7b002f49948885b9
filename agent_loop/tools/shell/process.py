"""process: look at, talk to and end the background processes of this rollout."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Any

from agent_loop.tools.files.text_file import split_lines
from agent_loop.tools.output import strip_ansi
from agent_loop.tools.shell.process_table import Background
from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, ToolFailure, load_schema
from sandbox_pool.errors import SandboxError
from sandbox_pool.results import LogChunk

_POLL_CHARS = 1_000
_WAIT_CHARS = 2_000
_LIST_CHARS = 200
_LOG_LINES = 200
_KILL_GRACE_S = 2.0


async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    action = arguments["action"]
    if action == "list":
        return {"processes": [await _summary(ctx, entry) for entry in ctx.processes.all()]}
    if not arguments.get("session_id"):
        raise InvalidArguments(f"action '{action}' needs a session_id.")
    entry = ctx.processes.get(arguments["session_id"])
    await ctx.processes.refresh(entry)
    result = await _ACTIONS[action](ctx, entry, arguments)
    entry.end_told = entry.end_told or not entry.running
    return result


async def _log(ctx: CallContext, entry: Background, offset: int = 0) -> LogChunk:
    chunk = await entry.process.log(offset=offset)
    entry.log_end = chunk.next_offset
    return LogChunk(ctx.redact(strip_ansi(chunk.data)), chunk.offset, chunk.next_offset, chunk.dropped)


async def _tail(ctx: CallContext, entry: Background, chars: int) -> str:
    # A secret or an escape sequence cut in half would no longer be recognised: read more than is shown.
    return (await _log(ctx, entry, max(0, entry.log_end - chars * 4 - 4096))).data[-chars:]


def _state(entry: Background) -> dict[str, Any]:
    state: dict[str, Any] = {
        "session_id": entry.session_id,
        "status": "running" if entry.running else "exited",
        "pid": entry.process.pid,
        "uptime_seconds": int(entry.uptime_s()),
    }
    if not entry.running:
        state["exit_code"] = entry.exit_code
    return state


async def _summary(ctx: CallContext, entry: Background) -> dict[str, Any]:
    await ctx.processes.refresh(entry)
    entry.end_told = not entry.running
    return {
        **_state(entry),
        "command": ctx.redact(entry.command)[:200],
        "cwd": entry.cwd,
        "started_at": entry.started_at,
        "output_preview": await _tail(ctx, entry, _LIST_CHARS),
    }


async def _poll(ctx: CallContext, entry: Background, _: dict[str, Any]) -> dict[str, Any]:
    preview = await _tail(ctx, entry, _POLL_CHARS)
    return {**_state(entry), "command": ctx.redact(entry.command)[:200], "output_preview": preview}


async def _read_log(ctx: CallContext, entry: Background, arguments: dict[str, Any]) -> dict[str, Any]:
    chunk = await _log(ctx, entry)
    lines = split_lines(chunk.data)
    limit = arguments.get("limit") or _LOG_LINES
    offset = arguments.get("offset")
    first = max(0, len(lines) - limit) if offset is None else min(offset, len(lines))
    shown = lines[first : first + limit]
    result = {
        **_state(entry),
        "output": "\n".join(shown),
        "total_lines": len(lines),
        "showing": f"{len(shown)} lines from line {first + 1}",
        "next_offset": first + len(shown),
    }
    if chunk.offset:
        result["note"] = f"The first {chunk.offset:,} bytes of output are no longer kept: line 1 is the first kept one."
    return result


async def _wait(ctx: CallContext, entry: Background, arguments: dict[str, Any]) -> dict[str, Any]:
    asked, most = arguments.get("timeout"), ctx.config.max_timeout_s
    timeout_s = min(asked or ctx.config.default_timeout_s, most)
    note = f"The timeout of {asked} s was lowered to {most} s." if asked and asked > most else None
    if entry.running and (exit_code := await entry.process.wait(timeout_s=timeout_s)) is not None:
        entry.set_exit(exit_code)
    result = {**_state(entry), "output": await _tail(ctx, entry, _WAIT_CHARS)}
    if entry.running:
        result["status"] = "timeout"
        result["note"] = f"Still running after {timeout_s} s."
    if note:
        result["timeout_note"] = note
    return result


async def _kill(_ctx: CallContext, entry: Background, _: dict[str, Any]) -> dict[str, Any]:
    if not entry.running:
        return {**_state(entry), "status": "already_exited"}
    await entry.process.signal(signal.SIGTERM)
    exit_code = await entry.process.wait(timeout_s=_KILL_GRACE_S)
    # Also when it went by itself: what it started may have ignored the signal, or never got it.
    await entry.process.kill()
    if exit_code is None:
        exit_code = await entry.process.wait(timeout_s=_KILL_GRACE_S)
    if exit_code is None:
        raise ToolFailure(f"{entry.session_id} could not be killed.", status="error", session_id=entry.session_id)
    entry.set_exit(exit_code)
    return {**_state(entry), "status": "killed"}


async def _write(ctx: CallContext, entry: Background, arguments: dict[str, Any]) -> dict[str, Any]:
    return await _send(ctx, entry, arguments.get("data") or "")


async def _submit(ctx: CallContext, entry: Background, arguments: dict[str, Any]) -> dict[str, Any]:
    # A terminal's Enter key sends CR; the line discipline turns it into LF.
    return await _send(ctx, entry, (arguments.get("data") or "") + ("\r" if entry.pty else "\n"))


async def _send(ctx: CallContext, entry: Background, text: str) -> dict[str, Any]:
    data = text.encode("utf-8", "replace")
    await _input(ctx, entry, lambda: entry.process.write(data))
    return {"status": "ok", "session_id": entry.session_id, "bytes_written": len(data)}


async def _close(ctx: CallContext, entry: Background, _: dict[str, Any]) -> dict[str, Any]:
    await _input(ctx, entry, entry.process.close_stdin)
    return {"status": "ok", "session_id": entry.session_id, "message": "stdin closed"}


async def _input(ctx: CallContext, entry: Background, give: Callable[[], Awaitable[None]]) -> None:
    """Give input to a process that may end at any moment; that it has ended is an answer, not a fault."""
    if entry.running:
        try:
            return await give()
        except SandboxError:
            await ctx.processes.refresh(entry)
            if entry.running:
                raise
    raise ToolFailure("The process has already ended.", status="already_exited", exit_code=entry.exit_code)


_ACTIONS: dict[str, Callable[[CallContext, Background, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "poll": _poll,
    "log": _read_log,
    "wait": _wait,
    "kill": _kill,
    "write": _write,
    "submit": _submit,
    "close": _close,
}

TOOL = Tool(schema=load_schema("process"), toolset="terminal", run=run)
