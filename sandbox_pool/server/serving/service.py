"""What the server does for a client: every operation of PROTOCOL.md, checked against lease epoch and request id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..faults import SlotError, TimedOut
from ..images.below import is_brought
from ..network_rules import parse_rule
from ..slots.channel import Message
from ..slots.exec_messages import KEEPER_GRACE_S
from ..slots.instance import Instance
from ..slots.jobs import Job
from ..slots.layer_snapshots import SnapshotStore
from ..slots.slots import Slot, Slots
from . import file_requests, process_requests, wire
from .image_requests import ImageRequests
from .peer import Connection, Reply, Request
from .slot_bridge import open_bridge

SERVER_VERSION = "0.1.0"

SlotHandler = Callable[[Slot, Instance, Request, bytes], Awaitable[Reply]]
OF_THE_SESSION = frozenset({"exec", "spawn", "stop_processes", "forget_state", "snapshot"})
"""Operations that go on from the last command: a session that was lent to a client is taken back for them."""
KILLED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
START_ATTEMPTS = 3
MAX_OUTCOMES = 1024
"""Recorded outcomes per lease; a client that repeats a request does so soon."""


class Service:
    """The operations, and who is connected."""

    def __init__(
        self,
        token: str,
        slots: Slots,
        snapshots: SnapshotStore,
        *,
        facts: Mapping[str, Any],
        scratch: str,
        images: ImageRequests,
    ) -> None:
        self.token = token
        self.slots = slots
        self.snapshots = snapshots
        self._facts = dict(facts)
        self._scratch = scratch
        self._started = time.monotonic()
        self.connections: set[Connection] = set()
        self.last_seen = time.monotonic()
        self.stopping = asyncio.Event()
        self.settle_s = 0.0
        """How long a death by SIGTERM or SIGKILL is kept back: where a scheduler ends the server, it ends the commands
        a moment before or after, and that is no exit code of theirs."""
        self._host_ops: dict[str, Callable[[Request], Awaitable[Reply]]] = {
            "health": self._health,
            "slots": self._slots,
            "lease": self._lease,
            "release": self._release,
            "shutdown": self._shutdown,
            "drop_snapshot": self._drop_snapshot,
            "export_snapshot": self._export_snapshot,
            "import_snapshot": self._import_snapshot,
            "put_layer": images.put_layer,
        }
        self._images = images
        self._slot_ops: dict[str, SlotHandler] = {
            "exec": self._exec,
            "cut": _cut,
            "stop_processes": _stop_processes,
            "forget_state": _forget_state,
            "snapshot": self._snapshot,
            "serve": open_bridge,
            "network": _network,
            **file_requests.HANDLERS,
            **process_requests.HANDLERS,
        }

    def info(self) -> dict[str, Any]:
        """What a client is told after its token was accepted."""
        return {
            "protocol": wire.PROTOCOL,
            "server_version": SERVER_VERSION,
            "pid": os.getpid(),
            "slots": len(self.slots.all),
            "image": self._images.own.name if self._images.own else None,
            **self._facts,
        }

    def connected(self, connection: Connection) -> None:
        """A client showed its token."""
        self.connections.add(connection)
        self.last_seen = time.monotonic()

    def disconnected(self, connection: Connection) -> None:
        """A client went away; the owner's time to come back starts now."""
        self.connections.discard(connection)
        self.last_seen = time.monotonic()

    def report_fault(self, error: BaseException) -> None:
        """To the server's own log."""
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)

    async def handle(self, request: Request, body: bytes) -> Reply:
        """Dispatch one request."""
        op = str(request.header.get("op"))
        host_op = self._host_ops.get(op)
        if host_op is not None:
            return await host_op(request)
        slot_op = self._slot_ops.get(op)
        if slot_op is None:
            raise SlotError("protocol", f"unknown operation {op!r}")
        slot = self.slots.get(int(request.header["slot"]), int(request.header["epoch"]))
        instance = slot.instance
        if instance is None:
            raise SlotError("lost", f"slot {slot.index} has no process")
        identity = request.header.get("rid")
        slot.calls += 1
        try:
            if op in OF_THE_SESSION:
                await instance.recall()
            if identity is None:
                return await self._settled(await slot_op(slot, instance, request, body))
            return await self._settled(await _once(slot, str(identity), lambda: slot_op(slot, instance, request, body)))
        except SlotError as error:
            kills = self.slots.builder.cgroups.memory_kills(slot.index) - slot.memory_kills
            if error.kind != "lost" or kills <= 0:
                raise
            raise SlotError(
                "destroyed", f"{error} ({kills} processes of the slot were killed: its memory is full)"
            ) from error
        finally:
            slot.calls -= 1
            slot.used_s = time.monotonic()

    async def _settled(self, reply: Reply) -> Reply:
        """The reply, unless it may tell of a command that was ended together with this server."""
        if self.settle_s and reply[0].get("code") in KILLED:
            with contextlib.suppress(TimedOut):
                await asyncio.wait_for(self.stopping.wait(), self.settle_s)
        if self.settle_s and self.stopping.is_set():
            raise SlotError("lost", "the server is being ended, and its commands with it")
        return reply

    async def _health(self, _request: Request) -> Reply:
        self._images.let_go(self.slots.all)
        usage = shutil.disk_usage(self._scratch)
        states: dict[str, int] = {}
        for slot in self.slots.all:
            states[slot.state] = states.get(slot.state, 0) + 1
        return {
            "scratch_free_mb": usage.free >> 20,
            "scratch_total_mb": usage.total >> 20,
            "states": states,
            "uptime_s": time.monotonic() - self._started,
        }, b""

    async def _slots(self, _request: Request) -> Reply:
        return {"slots": [slot.report() for slot in self.slots.all]}, b""

    async def _lease(self, request: Request) -> Reply:
        header = request.header
        layers: Sequence[str] = ()
        if header.get("snapshot"):
            layers = self.snapshots.layers(str(header["snapshot"]))
        spec = dict(header["spec"])
        spec["image"] = await self._images.resolve(spec.get("image"), header.get("image"))
        lease = self.slots.lease(int(header["slot"]), str(header["task_id"]), spec, layers)
        # A client that is cancelled meanwhile must not leave a slot half built: the lease is finished or undone here.
        slot = await _finish_or_undo(asyncio.ensure_future(lease), self.slots)
        if header.get("snapshot"):
            await self._restore(str(header["snapshot"]), slot)
        assert slot.instance is not None
        brought = is_brought(slot.instance.shell_program)
        reply = {"epoch": slot.epoch, "workdir": slot.instance.workdir, "shell_brought": brought}
        return {**reply, **self._line(request, slot.instance)}, b""

    def _line(self, request: Request, instance: Instance) -> dict[str, Any]:
        """For a client that can take descriptors: a line of its own to the session. Not where the end of a command may
        have to be kept back."""
        return {} if self.settle_s else request.lend(instance)

    async def _exec(self, slot: Slot, instance: Instance, request: Request, body: bytes) -> Reply:
        header = request.header
        split = int(header.get("command", len(body)))
        for attempt in range(START_ATTEMPTS):
            async with self.slots.turn_to_start(instance):
                job, log = instance.start(header, body[:split], body[split:])
                message = await _run(instance, job, log, request)
            if not instance.not_begun(job, message, attempt):
                break
        reply, output = instance.finish(header, job, log, message)
        await instance.recall()  # a client that was lent the session before must not go on in that
        self.slots.used(slot)
        return reply if "rid" in header else {**reply, **self._line(request, instance)}, output

    async def _restore(self, snapshot: str, slot: Slot) -> None:
        try:
            await self.snapshots.restore(snapshot, slot)
        except BaseException:
            await self.slots.release(slot.index, slot.epoch)
            raise

    async def _release(self, request: Request) -> Reply:
        header = request.header
        report = self.slots.release(int(header["slot"]), int(header["epoch"]))
        result = await asyncio.shield(asyncio.ensure_future(report))
        await self.snapshots.collect(self.slots.layers_in_use)
        return result, b""

    async def _shutdown(self, _request: Request) -> Reply:
        self.stopping.set()
        return {}, b""

    async def _snapshot(self, slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
        if request.header.get("stop"):
            await instance.kill_all()
        wanted = {name: bool(request.header.get(name)) for name in ("workspace", "keep_state")}
        return {"snapshot": await self.snapshots.take(slot, instance, **wanted)}, b""

    async def _drop_snapshot(self, request: Request) -> Reply:
        await self.snapshots.drop(str(request.header["snapshot"]), self.slots.layers_in_use)
        return {}, b""

    async def _export_snapshot(self, request: Request) -> Reply:
        await self.snapshots.export(str(request.header["snapshot"]), request.push_data)
        return {}, b""

    async def _import_snapshot(self, request: Request) -> Reply:
        return {"snapshot": await self.snapshots.import_(request.next_chunk)}, b""


async def _once(slot: Slot, identity: str, run: Callable[[], Awaitable[Reply]]) -> Reply:
    """The recorded outcome when this id was seen before; else run it and record it."""
    known = slot.outcomes.get(identity)
    if known is not None:
        return await asyncio.shield(known)
    outcome: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    slot.outcomes[identity] = outcome
    if len(slot.outcomes) > MAX_OUTCOMES:
        slot.outcomes.pop(next(iter(slot.outcomes)))
    try:
        reply = await run()
    except asyncio.CancelledError:
        outcome.set_exception(SlotError("cancelled", "this request was cancelled"))
        outcome.exception()  # marked as seen: perhaps the same request never comes again
        raise
    except Exception as error:
        outcome.set_exception(error)
        outcome.exception()
        raise
    outcome.set_result(reply)
    return reply


async def _finish_or_undo(lease: asyncio.Future[Slot], slots: Slots) -> Slot:
    try:
        return await asyncio.shield(lease)
    except asyncio.CancelledError:
        slot = await lease
        await slots.release(slot.index, slot.epoch)
        raise


async def _cut(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    return await instance.cut_outcome(request.header)


async def _run(instance: Instance, job: Job, log: str, request: Request) -> Message:
    """Until the command ends; its keeper is not relied upon to end it in time."""
    job.on_alive = lambda elapsed_s: request.push("alive", s=elapsed_s)
    loop = asyncio.get_running_loop()
    timeout_ms = int(request.header.get("timeout_ms") or 0)
    overdue = loop.call_later(timeout_ms / 1000 + KEEPER_GRACE_S, job.drop) if timeout_ms else None
    try:
        return await job.outcome()
    except asyncio.CancelledError:
        job.kill()
        late = loop.call_later(KEEPER_GRACE_S, job.drop)
        message = await job.outcome()  # the caller hears of the cancellation only when nothing of the command is left
        late.cancel()
        reply, output = instance.finish(request.header, job, log, message)
        if request.header.get("tell_stopped"):
            request.push("stopped", output, **reply)
        raise
    finally:
        if overdue is not None:
            overdue.cancel()


async def _stop_processes(_slot: Slot, instance: Instance, _request: Request, _body: bytes) -> Reply:
    # No shell is warmed up here: it would restore the slot's state, and so run what the slot wrote, after the stop.
    return {"count": await instance.kill_all()}, b""


async def _network(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    """What the slot asked its proxy for; with `allow` the list changes from now on."""
    proxy, entries = instance.proxy, request.header.get("allow")
    if entries is not None:
        if proxy is None:
            raise SlotError("refused", "this slot has no network rules that could be changed")
        try:
            proxy.rules = [parse_rule(str(entry)) for entry in entries]
        except ValueError as error:
            raise SlotError("refused", str(error)) from None
    return {"hosts": [] if proxy is None else proxy.report()}, b""


async def _forget_state(_slot: Slot, instance: Instance, _request: Request, _body: bytes) -> Reply:
    instance.forget_state()
    return {}, b""


def owner_gone(service: Service, ttl_s: float | None) -> bool:
    """Whether no client has been here for longer than the owner is given."""
    return bool(ttl_s and not service.connections and time.monotonic() - service.last_seen > ttl_s)
