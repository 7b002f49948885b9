"""Images of leases: finds their layers in this host's store, and takes those it lacks from the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Optional

from ..faults import SlotError
from ..host_files import NotPrivate
from ..images.layer_archive import LayerRefused
from ..images.layer_store import LayerMissing, LayerStore
from ..images.own_root import OwnImage
from ..images.user_ids import run_module
from ..isolation.levels import Level
from ..slots.slots import Slot
from .peer import Reply, Request

Read = Callable[[], Awaitable[Optional[bytes]]]  # noqa: UP045  (Python 3.9 evaluates it)
AT_ONCE = 3
"""Layers that are unpacked at the same time."""


class Together:
    """What all layers of an image say of it together."""

    def __init__(self, store: LayerStore, diff_ids: list[str]) -> None:
        self.joined = [store.joined(diff_ids)] if store.needs_joining(diff_ids) else []
        """The layer on top of them, where one is needed."""
        self.high_ids = sorted({number for diff_id in diff_ids for number in store.notes(diff_id)["high_ids"]})

    def is_gone(self) -> bool:
        """Whether that layer is missing: nobody made it yet, or it was removed with one of those below."""
        return not all(map(os.path.isdir, self.joined))


async def join_layers(store: LayerStore, diff_ids: list[str]) -> None:
    """Make the layer on top of these, where one is needed and not there. Raises LayerMissing."""
    store.hold(diff_ids)
    if Together(store, diff_ids).is_gone():
        await work_on_store({"do": "join", "store": store.path, "overlay": store.overlay, "diff_ids": diff_ids})


def _folder(path: str) -> dict[str, Any]:
    if not os.path.isdir(path):
        raise SlotError("image", f"the image {path!r} is not a folder of this host")
    return {"key": path, "layers": [os.path.realpath(path)], "env": {}, "workdir": "", "user": ""}


class ImageRequests:
    """The store behind one server."""

    def __init__(self, store: LayerStore, max_bytes: int, level: Level, own: OwnImage | None = None) -> None:
        self.own = own
        """The image of the container this server runs in."""
        self._store = store
        self._level = level
        self._max_bytes = max_bytes
        self._room: asyncio.Semaphore | None = None
        self._together: dict[tuple[str, ...], Together] = {}

    async def resolve(self, name: str | None, image: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """What a slot is built from: the layers' folders, topmost first, and the image's settings."""
        if not name:
            return None
        if not self._level.namespaces:
            raise SlotError(
                "image",
                f"a slot with an image needs namespaces, and slots here are isolated by {self._level.name}"
                + (" (SYS_ADMIN would give a container namespaces)" if self.own else ""),
            )
        if self.own is not None and name == self.own.name:
            return self.own.layers()
        if image is None:
            return _folder(name)
        wanted = [str(diff_id) for diff_id in image["layers"]]
        paths = self._hold(name, wanted)
        key = tuple(wanted)
        if key not in self._together or self._together[key].is_gone():
            self._together[key] = Together(self._store, wanted)
        together = self._together[key]
        if together.is_gone():
            await join_layers(self._store, wanted)
        return {
            "key": str(image["key"]),
            "layers": [*together.joined, *dict.fromkeys(reversed(paths))],
            "high_ids": together.high_ids,
            "env": {str(key): str(value) for key, value in image["env"].items()},
            "workdir": str(image["workdir"]),
            "user": str(image["user"]),
            "diff_ids": wanted,
        }

    def _hold(self, name: str, wanted: list[str]) -> list[str]:
        try:
            return self._store.hold(wanted)
        except LayerMissing:
            missing = self._store.missing(wanted)
            raise SlotError("layers", f"{len(missing)} layers of {name} are not on this host", layers=missing) from None
        except LayerRefused as error:
            raise SlotError("image", str(error)) from error

    def let_go(self, slots: Iterable[Slot]) -> None:
        """Other processes may remove layers that no slot stands on."""
        used: set[str] = set()
        for slot in slots:
            if slot.stands:
                image = json.loads(slot.shape)[0].get("image") if slot.shape else None
                used.update((image or {}).get("diff_ids") or ())
        self._store.let_go(used)

    async def put_layer(self, request: Request) -> Reply:
        """Unpack the stream of the request; answered at once when the layer is here, or comes from elsewhere."""
        header = request.header
        asked: dict[str, Any] = {
            "do": "put",
            "store": self._store.path,
            "overlay": self._store.overlay,
            "diff_id": str(header["diff_id"]),
            "digest": header.get("digest"),
            "max_bytes": self._max_bytes,
        }
        try:
            self._store.make()
            if not self._store.missing([asked["diff_id"]]):
                return {"had": True}, b""
        except LayerRefused as error:
            raise SlotError("image", str(error)) from error
        except (NotPrivate, OSError) as error:
            raise SlotError("scratch", f"layers cannot be kept in {self._store.path}: {error}") from error
        if self._room is None:
            self._room = asyncio.Semaphore(AT_ONCE)
        async with self._room:
            return await work_on_store(asked, request.next_chunk), b""


async def work_on_store(asked: Mapping[str, Any], read: Read | None = None) -> dict[str, Any]:
    """Have a process of its own unpack or remove layers; its answer, or the SlotError that it stands for."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *run_module("layer_store"), json.dumps(asked), stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    feeding = asyncio.ensure_future(_feed(process.stdin, read))
    try:
        line = await process.stdout.readline()
    finally:
        feeding.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # it has answered, or is no longer wanted; its draft is removed by the next one
        await process.wait()
    answer: dict[str, Any] = json.loads(line) if line else {"error": "the process that unpacks it died", "kind": ""}
    if "error" in answer:
        kind = "scratch" if answer["kind"] == "scratch" else "image"
        what = f"the layer {asked['diff_id'][:23]}... is" if "diff_id" in asked else "the layers are"
        raise SlotError(kind, f"{what} refused: {answer['error']}")
    return answer


async def _feed(target: asyncio.StreamWriter, read: Read | None) -> None:
    with contextlib.suppress(ConnectionError):
        while read is not None:
            data = await read()
            if data is None:
                break
            target.write(data)
            await target.drain()
        target.close()
