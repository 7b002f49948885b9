"""Snapshots: the writable layer of a slot, kept as a read-only layer that any number of forks start from at no cost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..faults import SlotError
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
            root = os.path.dirname(instance.workdir)
            state = state and state.moved_to(root)
            with self._host_worker("pack", snapshot.layers[0]) as source:
                await source.status()
                owner = run_uid(self._level, self._place, slot.index)
                await self._unpack(root, source.read, *([] if owner is None else [("owner", owner)]))
        if state is not None:
            instance.restore(state.variables, state.cwd)

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
        pack = self._pack_workdir if workspace else self._pack_slot
        with pack(instance, limit) as source:
            await source.status()
            try:
                await self._unpack(target + instance.workdir[len(root) :] if workspace else target, source.read)
            except BaseException:
                await _remove([target])
                raise
        base = slot.layers if self._level.namespaces and not workspace else ()
        layers = (*self._publish([target]), *base)
        state = ShellState(await instance.saved_state(), instance.cwd, root) if keep_state else None
        return self._add(Snapshot(layers, state))

    def _pack_slot(self, instance: Instance, limit: list[tuple[str, Any]]) -> Worker:
        if not self._level.namespaces:
            return self._host_worker("pack", os.path.dirname(instance.workdir), *limit)

        def start(values: list[tuple[str, Any]], fd: int) -> None:
            instance.control.send("file", values, fds=[fd])

        return Worker(start, [("do", "pack"), *self._layer_fields, *limit], "", instance.check_still_alive)

    def _pack_workdir(self, instance: Instance, limit: list[tuple[str, Any]]) -> Worker:
        """By a process inside the slot, so that a link in place of the folder leads to nothing of the host."""

        def start(values: list[tuple[str, Any]], fd: int) -> None:
            instance.control.send("file", values, fds=[fd])

        # Opaque: what the image has there was either packed or removed by the agent.
        fields = [*self._layer_fields, ("opaque", 1)] if self._level.namespaces else [("fork", 1)]
        return Worker(start, [("do", "pack"), *fields, *limit], instance.workdir, instance.check_still_alive)

    async def _unpack(self, target: str, read: Callable[[], Awaitable[bytes]], *fields: tuple[str, Any]) -> None:
        with self._host_worker("unpack", target, *fields) as worker:
            await worker.status()
            while True:
                data = await read()
                if not data or not await worker.send(data):
                    break
            await worker.status()

    def _add(self, snapshot: Snapshot) -> str:
        name = os.path.basename(snapshot.layers[0])
        self._snapshots[name] = snapshot
        return name

    async def drop(self, name: str, in_use: set[str]) -> None:
        """Forget a snapshot; its layers go when no slot and no other snapshot stands on them."""
        self._snapshots.pop(name, None)
        await self.collect(in_use)

    async def collect(self, in_use: set[str]) -> None:
        """Remove layers nobody needs."""
        needed = {path for snapshot in self._snapshots.values() for path in snapshot.layers} | in_use
        unused = []
        for entry in os.listdir(self._directory):
            path = os.path.join(self._directory, entry)
            if path not in needed and not entry.startswith("."):
                unused.append(self._new_directory())
                os.rename(path, unused[-1])  # hidden: a request that comes meanwhile does not remove it again
        await _remove(unused)

    async def export(self, name: str, send: Callable[[bytes], Awaitable[None]]) -> None:
        """The snapshot as a byte stream for another host."""
        snapshot = self._find(name)
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
