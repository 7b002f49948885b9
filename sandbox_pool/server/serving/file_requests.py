"""File operations of the protocol."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from ..faults import SlotError
from ..slots.file_worker import Worker
from ..slots.instance import Instance
from ..slots.slots import Slot
from .peer import Reply, Request

INLINE_BYTES = 32 << 10
"""Content up to this size goes to the slot in one message with its request, without waiting for the slot to ask."""
LIST_BYTES = 8 << 20
"""Of the names in one directory with what is said of each: some hundred thousand. More is refused."""
KINDS = {"f": "file", "d": "dir", "l": "symlink", "o": "other"}


def slot_path(instance: Instance, request: Request) -> str:
    """The path asked for, relative ones from the working directory of the spec."""
    path = str(request.header.get("path") or "")
    if "\0" in path or not path:
        raise SlotError("refused", f"not a path: {path!r}")
    if instance.alias and (path == instance.alias or path.startswith(instance.alias + "/")):
        path = instance.workdir + path[len(instance.alias) :]
    return os.path.join(instance.workdir, path)


def open_worker(
    instance: Instance, request: Request, do: str, *fields: tuple[str, Any], content: bytes = b""
) -> Worker:
    """A worker in the slot for this request's path; `content` goes with the request."""
    instance.check_alive()

    def start(values: list[tuple[str, Any]], fd: int) -> None:
        instance.control.send("file", values, content, fds=[fd])

    return Worker(start, [("do", do), *fields], slot_path(instance, request), instance.check_still_alive)


def _stat_fields(text: str) -> dict[str, Any]:
    kind, size, mode, mtime = text.split(" ")
    return {"kind": KINDS[kind], "size": int(size), "mode": int(mode, 8), "mtime_ns": int(mtime)}


async def _stat(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    with open_worker(instance, request, "stat") as worker:
        return _stat_fields(await worker.status()), b""


async def _list(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    with open_worker(instance, request, "list") as worker:
        await worker.status()
        entries = (await worker.read_all(LIST_BYTES)).split(b"\0")[:-1]
    found = []
    for entry in entries:
        kind, size, mode, mtime, name = entry.split(b" ", 4)
        stat = _stat_fields(b" ".join((kind, size, mode, mtime)).decode())
        found.append({"name": name.decode("utf-8", "replace"), **stat})
    return {"entries": sorted(found, key=lambda item: str(item["name"]))}, b""


async def _remove(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    recursive = int(bool(request.header.get("recursive")))
    with open_worker(instance, request, "remove", ("recursive", recursive)) as worker:
        await worker.status()
    return {}, b""


async def _read(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    """Small files in the answer itself, larger ones as a stream before it."""
    length = request.header.get("length")
    fields = [("offset", int(request.header.get("offset") or 0)), ("length", -1 if length is None else int(length))]
    with open_worker(instance, request, "read", *fields) as worker:
        await worker.status()
        pending = await worker.read()
        while True:
            data = await worker.read()
            if not data:
                return {}, pending
            await request.push_data(pending)
            pending = data


async def _write(_slot: Slot, instance: Instance, request: Request, body: bytes) -> Reply:
    """The whole content in the body, or as a stream when `stream` is set."""
    header = request.header
    size = int(header["size"])
    fields: list[tuple[str, Any]] = [("size", size)]
    if header.get("mode") is not None:
        fields.append(("mode", int(header["mode"])))
    if not header.get("stream") and len(body) <= INLINE_BYTES:
        with open_worker(instance, request, "write", *fields, ("inline", 1), content=body) as worker:
            await worker.status()
        return {}, b""
    with open_worker(instance, request, "write", *fields) as worker:
        await worker.status()
        await worker.send(body)
        if header.get("stream"):
            await _relay_in(request, worker)
        await worker.status()
    return {}, b""


async def _relay_in(request: Request, worker: Worker) -> None:
    """Client to slot. When the slot stops taking data the rest is read and dropped: the slot's status says why."""
    taking = True
    while True:
        data = await request.next_chunk()
        if data is None:
            return
        taking = taking and await worker.send(data)


async def _pack(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    with open_worker(instance, request, "pack") as worker:
        await worker.status()
        while True:
            data = await worker.read()
            if not data:
                return {}, b""
            await request.push_data(data)


async def _unpack(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    with open_worker(instance, request, "unpack") as worker:
        await worker.status()
        await _relay_in(request, worker)
        await worker.status()
    return {}, b""


HANDLERS: dict[str, Callable[[Slot, Instance, Request, bytes], Awaitable[Reply]]] = {
    "stat": _stat,
    "list": _list,
    "remove": _remove,
    "read": _read,
    "write": _write,
    "pack": _pack,
    "unpack": _unpack,
}
