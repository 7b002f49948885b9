"""Background processes of a slot: started, read, written to, signalled, waited for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from ..faults import SlotError, TimedOut
from ..slots.channel import Message
from ..slots.exec_messages import KEEPER_GRACE_S, exit_code, run_message, surroundings
from ..slots.instance import READY_TIMEOUT_S, Instance
from ..slots.jobs import Job
from ..slots.slots import Slot
from .peer import Reply, Request

MAX_PROCESSES = 256
_numbers = itertools.count(1)


async def _spawn(_slot: Slot, instance: Instance, request: Request, body: bytes) -> Reply:
    _forget_oldest(instance)
    header = request.header
    terminal = (int(header.get("rows", 30)), int(header.get("cols", 120))) if header.get("pty") else None
    fields, raw = run_message(body, surroundings(header), None)
    job = instance.spawn(terminal)
    job.run(fields, raw)
    # A command that stops whatever it can may do so to a shell before its exec, and the keeper waits for that.
    with job.dropped_after(READY_TIMEOUT_S):
        pid = await job.started
    name = f"p{next(_numbers)}"
    instance.processes[name] = job
    return {"process": name, "pid": pid}, b""


def _forget_oldest(instance: Instance) -> None:
    """Finished processes are kept for their log, up to a number."""
    if len(instance.processes) < MAX_PROCESSES:
        return
    for name, job in list(instance.processes.items()):
        if job.exit.done():
            instance.processes.pop(name).discard()
            return
    raise SlotError("refused", f"{MAX_PROCESSES} background processes are running in this slot")


def _find(instance: Instance, request: Request) -> Job:
    name = str(request.header.get("process"))
    if name not in instance.processes:
        raise SlotError("refused", f"no process {name!r} in this slot")
    return instance.processes[name]


def _status(job: Job) -> int | None:
    if not job.exit.done():
        return None
    message: Message = job.exit.result()
    return exit_code(message.number("status"), False)[0]


async def _poll(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    return {"code": _status(_find(instance, request))}, b""


async def _list(_slot: Slot, instance: Instance, _request: Request, _body: bytes) -> Reply:
    found = [
        {"process": name, "pid": job.started.result(), "code": _status(job)} for name, job in instance.processes.items()
    ]
    return {"processes": found}, b""


async def _wait(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    """Answered at the moment the process ends, or after the time given."""
    job = _find(instance, request)
    timeout_s = request.header.get("timeout_s")
    try:
        await asyncio.wait_for(asyncio.shield(job.exit), timeout_s)
    except TimedOut:
        return {"code": None}, b""
    return {"code": _status(job)}, b""


async def _log(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    message = await _find(instance, request).log(int(request.header.get("offset") or 0), request.header.get("limit"))
    return {"offset": message.number("offset"), "dropped": message.number("dropped")}, message.raw


async def _input(_slot: Slot, instance: Instance, request: Request, body: bytes) -> Reply:
    job = _find(instance, request)
    if job.exit.done():
        raise SlotError("refused", "the process has ended and reads no more input")
    job.channel.send("input", [("eof", int(bool(request.header.get("eof"))))], body)
    return {}, b""


async def _signal(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    number = int(request.header["number"])
    if not 1 <= number <= 64:
        raise SlotError("refused", f"no signal {number}")
    _find(instance, request).channel.send("signal", [("number", number)])
    return {}, b""


async def _kill(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    """The process with everything it started; answered when nothing of it is left."""
    job = _find(instance, request)
    job.kill()
    with job.dropped_after(KEEPER_GRACE_S):
        await asyncio.shield(job.exit)
    return {"code": _status(job)}, b""


async def _resize(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    size = [("rows", int(request.header["rows"])), ("cols", int(request.header["cols"]))]
    _find(instance, request).channel.send("resize", size)
    return {}, b""


HANDLERS: dict[str, Callable[[Slot, Instance, Request, bytes], Awaitable[Reply]]] = {
    "spawn": _spawn,
    "poll": _poll,
    "processes": _list,
    "wait": _wait,
    "log": _log,
    "input": _input,
    "signal": _signal,
    "kill": _kill,
    "resize": _resize,
}
