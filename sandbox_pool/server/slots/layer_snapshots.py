"""Snapshots: the writable layer of a slot, kept as a read-only layer that any number of forks start from at no cost.

A small working directory is kept as the packed bytes instead: writing it into a slot that waits is faster than building
one on a layer of its own, and nothing is left to remove.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..faults import SlotError, file_error
from ..images.user_ids import remove_mapped
from ..isolation.levels import Level, Place, run_uid
from .file_worker import Worker
from .instance import Instance
from .slots import Slot
from .zygote import Zygote

OVERHEAD = 16 << 20
"""What the description of the files in a full slot may take."""
_RECORD = struct.Struct("!cI")
"""Of an exported snapshot: m (description), d (data of the current layer), n (layer complete)."""


SMALL = 64 << 10
"""Bytes of a packed working directory that stays in memory; all of them together take no more than `MOST_SMALL`."""
MOST_SMALL = 32 << 20
_ENTRY = struct.Struct("<cIIIqQH")
"""Head of an entry in a packed tree (helper/archive.c): kind, mode, owner, group, time, size, length of its path."""


@dataclass(frozen=True)
class ShellState:
    """What the shell of a slot had: kept only on request, because it decides what every later command means."""

    variables: bytes
    cwd: str
    root: str
    """The slot's directory where slots have no root of their own; paths in the state begin with it."""

    def moved_to(self, root: str) -> ShellState:
        """The same state for a slot with another directory."""
        variables = self.variables.replace(self.root.encode(), root.encode())
        return ShellState(variables, self.cwd.replace(self.root, root), root)


@dataclass(frozen=True)
class Snapshot:
    """What a fork starts from."""

    layers: tuple[str, ...]
    """Directories, topmost first."""
    state: ShellState | None = None
    """None: a fork starts in a shell of its own, in the working directory of its spec."""
    packed: bytes = b""
    """A small working directory; then there are no layers."""
    workdir: str = ""
    """Where it was, below the slot's root."""


class SnapshotStore:
    """Snapshots of this host, below its scratch directory."""

    def __init__(self, place: Place, zygote: Zygote, level: Level) -> None:
        directory = os.path.join(place.layers, "snapshots")
        self._place = place
        self._directory = directory
        self._zygote = zygote
        self._level = level
        self._layer_fields = [("layer", 1), ("userxattr", int(level.user_ns))]
        self._snapshots: dict[str, Snapshot] = {}
        self._numbers = itertools.count(1)
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o700)

    def _find(self, name: str) -> Snapshot:
        if name not in self._snapshots:
            raise SlotError("refused", f"no snapshot {name!r} on this host")
        return self._snapshots[name]

    def layers(self, name: str) -> tuple[str, ...]:
        """Layers a fork of this snapshot is built on."""
        layers = self._find(name).layers
        return layers if self._level.namespaces else ()

    async def restore(self, name: str, slot: Slot) -> None:
        """Give a fork the shell state of the original if it was kept, and its files where they could not be a layer."""
        snapshot, instance = self._find(name), slot.instance
        assert instance is not None
        state = snapshot.state
        if not self._level.namespaces:
            state = state and state.moved_to(os.path.dirname(instance.workdir))
        if snapshot.packed:
            await self._write_small(snapshot.packed, slot, instance)
        elif not self._level.namespaces:
            root = os.path.dirname(instance.workdir)
            with self._host_worker("pack", snapshot.layers[0]) as source:
                await source.status()
                owner = run_uid(self._level, self._place, slot.index)
                await self._unpack(root, source.read, *([] if owner is None else [("owner", owner)]))
        if state is not None:
            instance.restore(state.variables, state.cwd)

    async def _write_small(self, packed: bytes, slot: Slot, instance: Instance) -> None:
        """Into a slot that nobody has worked in. What its image has there was packed, or removed by the agent."""
        if self._level.namespaces:
            fields = [("do", "unpack"), *self._layer_fields, ("clear", 1)]
            worker = Worker(_sender(instance), fields, instance.workdir, instance.check_still_alive)
        else:
            owner = run_uid(self._level, self._place, slot.index)
            named = [] if owner is None else [("owner", owner)]
            worker = self._host_worker("unpack", instance.workdir, *named)
        with worker:
            await worker.status()
            await worker.send(packed)
            await worker.status()

    def _new_directory(self) -> str:
        """Hidden while it is filled, so that collecting leaves it alone."""
        return os.path.join(self._directory, f".{os.getpid()}-{next(self._numbers)}")

    def _host_worker(self, do: str, path: str, *fields: tuple[str, Any]) -> Worker:
        def start(values: list[tuple[str, Any]], fd: int) -> None:
            self._zygote.start_worker(values, fd)

        return Worker(start, [("do", do), *self._layer_fields, *fields], path)

    async def take(self, slot: Slot, instance: Instance, *, workspace: bool, keep_state: bool) -> str:
        """Copy the writable layer of a slot, or its working directory alone, for forks that are clean otherwise."""
        target = self._new_directory()
        root = "" if self._level.namespaces else os.path.dirname(instance.workdir)
        disk_mb = json.loads(slot.shape)[0].get("disk_mb")
        limit = [("max_bytes", (disk_mb << 20) + OVERHEAD)] if disk_mb else []
        state = ShellState(await instance.saved_state(), instance.cwd, root) if keep_state else None
        pack = self._pack_workdir if workspace else self._pack_slot
        with pack(instance, limit) as source:
            await source.status()
            if workspace:
                workdir = instance.workdir[len(root) :]
                return await self._keep_workdir(target, workdir, source, state)
            await self._unpack_new(target, "", source.read)
        base = slot.layers if self._level.namespaces else ()
        return self._add(Snapshot((*self._publish([target]), *base), state))

    async def _keep_workdir(self, target: str, workdir: str, source: Worker, state: ShellState | None) -> str:
        """In memory while it is small, else as a layer."""
        taken = sum(len(snapshot.packed) for snapshot in self._snapshots.values())
        room = SMALL if taken + SMALL <= MOST_SMALL else 0
        start, ended = b"", False
        while not ended and len(start) <= room:
            data = await source.read()
            start, ended = start + data, not data
        if ended:
            await _check_whole(start, source)
            return self._add(Snapshot((), state, start, workdir))
        await self._unpack_new(target, workdir, _after(start, source.read))
        return self._add(Snapshot(self._publish([target]), state))

    async def _unpack_new(self, target: str, workdir: str, read: Callable[[], Awaitable[bytes]]) -> None:
        """Opaque when it is a working directory: what the image has there was either packed or removed by the agent."""
        opaque = [("opaque", 1)] if workdir and self._level.namespaces else []
        try:
            await self._unpack(target + workdir, read, *opaque)
        except BaseException:
            await _remove([target])
            raise

    async def _as_layers(self, name: str) -> Snapshot:
        """For those who need a layer: another host, or a download."""
        snapshot = self._find(name)
        if snapshot.packed:
            target = self._new_directory()
            await self._unpack_new(target, snapshot.workdir, _after(snapshot.packed))
            snapshot = Snapshot(self._publish([target]), snapshot.state)
            if name in self._snapshots:  # else it was dropped meanwhile, and the layer is collected with the next one
                self._snapshots[name] = snapshot
        return snapshot

    def _pack_slot(self, instance: Instance, limit: list[tuple[str, Any]]) -> Worker:
        if not self._level.namespaces:
            return self._host_worker("pack", os.path.dirname(instance.workdir), *limit)

        fields = [("do", "pack"), *self._layer_fields, *limit]
        return Worker(_sender(instance), fields, "", instance.check_still_alive)

    def _pack_workdir(self, instance: Instance, limit: list[tuple[str, Any]]) -> Worker:
        """By a process inside the slot, so that a link in place of the folder leads to nothing of the host."""
        fields = self._layer_fields if self._level.namespaces else [("fork", 1)]
        packs = [("do", "pack"), *fields, *limit]
        return Worker(_sender(instance), packs, instance.workdir, instance.check_still_alive)

    async def _unpack(self, target: str, read: Callable[[], Awaitable[bytes]], *fields: tuple[str, Any]) -> None:
        with self._host_worker("unpack", target, *fields) as worker:
            await worker.status()
            while True:
                data = await read()
                if not data or not await worker.send(data):
                    break
            await worker.status()

    def _add(self, snapshot: Snapshot) -> str:
        new = os.path.basename(self._new_directory()).lstrip(".")
        name = os.path.basename(snapshot.layers[0]) if snapshot.layers else new
        self._snapshots[name] = snapshot
        return name

    async def drop(self, name: str, in_use: Callable[[], set[str]]) -> None:
        """Forget a snapshot; its layers go when no slot and no other snapshot stands on them."""
        self._snapshots.pop(name, None)
        await self.collect(in_use)

    async def collect(self, in_use: Callable[[], set[str]]) -> None:
        """Remove layers nobody needs; which ones slots stand on is asked only where there are layers."""
        there = [entry for entry in os.listdir(self._directory) if not entry.startswith(".")]
        needed = {path for snapshot in self._snapshots.values() for path in snapshot.layers}
        needed |= in_use() if there else set()
        unused = []
        for entry in there:
            path = os.path.join(self._directory, entry)
            if path not in needed:
                unused.append(self._new_directory())
                os.rename(path, unused[-1])  # hidden: a request that comes meanwhile does not remove it again
        await _remove(unused)

    async def export(self, name: str, send: Callable[[bytes], Awaitable[None]]) -> None:
        """The snapshot as a byte stream for another host."""
        snapshot = await self._as_layers(name)
        state = snapshot.state
        places = None if state is None else [state.cwd, state.root]
        description = {"layers": len(snapshot.layers), "state": places}
        text = json.dumps(description).encode() + b"\0" + (state.variables if state else b"")
        await send(_RECORD.pack(b"m", len(text)) + text)
        for layer in snapshot.layers:
            with self._host_worker("pack", layer) as worker:
                await worker.status()
                while True:
                    data = await worker.read()
                    if not data:
                        break
                    await send(_RECORD.pack(b"d", len(data)) + data)
            await send(_RECORD.pack(b"n", 0))

    async def import_(self, receive: Callable[[], Awaitable[bytes | None]]) -> str:
        """The inverse of `export`."""
        records = RecordReader(receive)
        kind, text = await records.next()
        if kind != b"m":
            raise SlotError("protocol", "not an exported snapshot")
        description, _, variables = text.partition(b"\0")
        facts = json.loads(description)
        layers: list[str] = []
        try:
            for _ in range(int(facts["layers"])):
                layers.append(self._new_directory())
                await self._unpack(layers[-1], records.layer)
        except BaseException:
            await _remove(layers)
            raise
        state = None if facts["state"] is None else ShellState(variables, *facts["state"])
        return self._add(Snapshot(self._publish(layers), state))

    def _publish(self, layers: Sequence[str]) -> tuple[str, ...]:
        """Give complete layers their visible names."""
        final = []
        for layer in layers:
            path = os.path.join(self._directory, os.path.basename(layer).lstrip("."))
            os.rename(layer, path)
            final.append(path)
        return tuple(final)


def _sender(instance: Instance) -> Callable[[list[tuple[str, Any]], int], None]:
    """Starts a worker inside the slot."""

    def start(values: list[tuple[str, Any]], fd: int) -> None:
        instance.control.send("file", values, fds=[fd])

    return start


def _after(start: bytes, more: Callable[[], Awaitable[bytes]] | None = None) -> Callable[[], Awaitable[bytes]]:
    """Reads these bytes first."""
    first = [start]

    async def read() -> bytes:
        return first.pop() if first else await more() if more else b""

    return read


async def _check_whole(packed: bytes, source: Worker) -> None:
    """A tree that was refused says why in its last entry; one without a last entry was cut off with its worker."""
    at, kind, size = 0, b"", 0
    while at + _ENTRY.size <= len(packed) and kind not in (b"e", b"E"):
        kind, _, _, _, _, size, length = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size + (0 if kind in (b"e", b"E") else size + length)
    if kind not in (b"e", b"E"):
        raise await source.gone()
    if kind == b"E":
        raise file_error(size or errno.EIO, source.path)


async def _remove(paths: Sequence[str]) -> None:
    """In a thread: an agent decides how many files there are, and other slots must not wait for them."""
    for path in paths:
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, remove_mapped, path))


class RecordReader:
    """Cuts an exported stream into its records, however it was chunked on the way."""

    def __init__(self, receive: Callable[[], Awaitable[bytes | None]]) -> None:
        self._receive = receive
        self._buffer = b""

    async def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = await self._receive()
            if data is None:
                raise SlotError("protocol", "the snapshot ended too early")
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    async def next(self) -> tuple[bytes, bytes]:
        """Kind and content of the next record."""
        kind, size = _RECORD.unpack(await self._take(_RECORD.size))
        return kind, await self._take(size)

    async def layer(self) -> bytes:
        """Data of the current layer; empty at its end."""
        kind, data = await self.next()
        return b"" if kind == b"n" else data
