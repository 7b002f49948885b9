"""Gets the layers of images to hosts that lack them: looks an image up once, then sends what each host asks for.

What a tag stood for when it was first asked for holds for the life of the pool: all tasks of a run get the same image.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox_pool.config import ImageSettings
from sandbox_pool.errors import ImageError, LayersMissing, ScratchFull
from sandbox_pool.images.dockerfile import build
from sandbox_pool.images.image_source import Image, Layer, kind_of, read_layout
from sandbox_pool.images.registry import BlobCache, Registries
from sandbox_pool.server.build.helper_build import cache_dir
from sandbox_pool.server.faults import SlotError
from sandbox_pool.server.host_files import NotPrivate
from sandbox_pool.server.images.layer_store import LayerMissing, LayerStore
from sandbox_pool.server.serving.image_requests import join_layers, work_on_store

if TYPE_CHECKING:
    from sandbox_pool.client.host_client import HostClient
    from sandbox_pool.client.sandbox import Sandbox
    from sandbox_pool.pool.host import PooledHost
    from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)
AT_ONCE = 3
"""Layers on their way to one host."""
ROUNDS = 3
"""A layer that was sent may be gone again, when another pool needed the room."""


class Images:
    """Images of one pool, or of one command."""

    def __init__(self, settings: ImageSettings, cache: Path | None = None) -> None:
        self._cache = cache or cache_dir()
        self.blobs = BlobCache(self._cache / "blobs")
        self.registries = Registries(self.blobs, settings.mirrors)
        self._settings = settings
        self._found: dict[str, asyncio.Task[Image]] = {}
        self._sending: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._room: dict[str, asyncio.Semaphore] = {}

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = [*self._found.values(), *self._sending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.registries.close()
        await asyncio.to_thread(self.blobs.collect, int(self._settings.max_gb * 2**30))

    async def find(self, name: str) -> Image:
        """The image of this name; ImageError when there is none. All who ask for it share one look."""
        task = self._found.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._found[name] = asyncio.get_running_loop().create_task(self._find(name))
        return await asyncio.shield(task)

    async def _find(self, name: str) -> Image:
        kind, rest = kind_of(name)
        if kind == "registry":
            return await self.registries.image(name)
        if kind == "dockerfile":
            archive = await build(Path(rest).expanduser(), self._cache / "built")
            name = f"docker-archive:{archive}"
        return await asyncio.to_thread(read_layout, name)

    async def pull(self, name: str, store: LayerStore) -> list[str]:
        """Unpack what a store of this machine lacks of an image; the layers it lacked."""
        image = await self.find(name)
        try:
            await asyncio.to_thread(store.make)
            missing = set(store.missing(layer.diff_id for layer in image.layers))
            at_once = asyncio.Semaphore(AT_ONCE)
            layers = {layer.diff_id: layer for layer in image.layers if layer.diff_id in missing}
            await asyncio.gather(*(self._unpack(layer, store, at_once) for layer in layers.values()))
            await join_layers(store, [layer.diff_id for layer in image.layers])
        except LayerMissing:
            room = f"{self._settings.max_gb:g} GB"
            raise ImageError(
                f"{name} does not stay in {store.path}, which may hold {room}: raise images.max_gb"
            ) from None
        except (NotPrivate, OSError) as error:
            raise ScratchFull(f"layers cannot be kept in {store.path}: {error}") from error
        except SlotError as error:
            raise (ScratchFull if error.kind == "scratch" else ImageError)(str(error)) from error
        finally:
            store.let_go(set())
        return sorted(missing)

    async def _unpack(self, layer: Layer, store: LayerStore, room: asyncio.Semaphore) -> None:
        asked = {
            "do": "put",
            "store": store.path,
            "overlay": store.overlay,
            "diff_id": layer.diff_id,
            "digest": layer.digest,
            "max_bytes": int(self._settings.max_gb * 2**30),
        }
        pieces = aiter(layer.blob())

        async def read() -> bytes | None:
            return await anext(pieces, None)

        async with room:
            await work_on_store(asked, read)
        if layer.digest is not None:
            self.blobs.drop(layer.digest)

    async def lease(
        self,
        host: PooledHost,
        client: HostClient,
        slot: int,
        task_id: str,
        spec: SandboxSpec,
        snapshot: str | None,
    ) -> Sandbox:
        """As `HostClient.lease`, with the image's layers sent to a host that lacks some."""
        assert spec.image is not None
        image = await self.find(spec.image)
        for left in range(ROUNDS, -1, -1):
            try:
                return await client.lease(slot, task_id=task_id, spec=spec, snapshot=snapshot, image=image.on_wire())
            except LayersMissing as error:
                if not left:
                    raise
                here = host.host is not None and host.host.address.startswith("unix:")
                await self._send_missing(host.name, client, image, set(error.layers), keep_blobs=not here)
        raise ImageError(f"{spec.image}: its layers do not stay on {host.name}")

    async def _send_missing(
        self, host: str, client: HostClient, image: Image, missing: set[str], *, keep_blobs: bool
    ) -> None:
        layers = {layer.diff_id: layer for layer in image.layers if layer.diff_id in missing}
        began_s = time.monotonic()
        log.info("%s: sending %d of %d layers to %s", image.name, len(layers), len(image.layers), host)
        sending = []
        for layer in layers.values():
            key = host, layer.diff_id
            task = self._sending.get(key)
            if task is None or task.done():
                work = self._send(host, client, layer, keep_blobs)
                task = self._sending[key] = asyncio.get_running_loop().create_task(work)
            sending.append(task)
        for task in sending:  # shielded: another lease may wait for the same layer
            await asyncio.shield(task)
        log.info("%s: on %s after %.1f s", image.name, host, time.monotonic() - began_s)

    async def _send(self, host: str, client: HostClient, layer: Layer, keep_blobs: bool) -> None:
        room = self._room.setdefault(host, asyncio.Semaphore(AT_ONCE))
        async with room:
            await client.put_layer(layer.diff_id, layer.digest, layer.blob())
        if layer.digest is not None and not keep_blobs:
            self.blobs.drop(layer.digest)


async def collect_layers(store: LayerStore, max_bytes: int) -> dict[str, Any]:
    """Remove half unpacked layers that nobody works on, and whole ones and downloads until the rest fits; what went."""
    asked = {"do": "gc", "store": store.path, "overlay": store.overlay, "max_bytes": max_bytes}
    try:
        removed = await work_on_store(asked)
    except SlotError as error:
        raise ScratchFull(str(error)) from error
    downloads = await asyncio.to_thread(BlobCache(cache_dir() / "blobs").collect, max_bytes)
    return {**removed, "download_bytes": downloads}
