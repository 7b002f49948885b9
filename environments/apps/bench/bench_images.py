"""What an image costs: leases and commands in slots with it beside slots without, unpacking beside `tar x`.

Each round measures both in turn, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.images.image_source import Image, is_folder
from sandbox_pool.images.supply import Images
from sandbox_pool.server.images.layer_store import LayerStore


@dataclass(frozen=True)
class Promise:
    """A ratio that must be kept."""

    text: str
    kept: Callable[[float], bool]


REST_S = 0.01
"""Between two turns: the slot of the one before is built anew, which is not what the next one measures."""
PROMISES = {
    "lease_p50": Promise("<= 1.2", lambda ratio: ratio <= 1.2),
    "exec_p50": Promise("<= 1.1", lambda ratio: ratio <= 1.1),
    "unpack_speed": Promise(">= 0.5 of tar x", lambda ratio: ratio >= 0.5),
}


async def bench_image(config: PoolConfig, rounds: int) -> dict[str, Any]:
    """Ratios of slots with `config.spec.image` to slots without, and the times they come from."""
    assert config.spec.image is not None
    result: dict[str, Any] = {"image": config.spec.image}
    plain = config.model_copy(update={"spec": SandboxSpec(), "slots_per_host": 1, "max_hosts": 2, "min_hosts": 0})
    async with SlotPool.from_config(plain) as without, SlotPool.from_config(plain) as with_image:
        began_s = time.monotonic()
        async with with_image.lease("first", config.spec) as box:
            result["first_lease_s"] = round(time.monotonic() - began_s, 3)
            result["isolation"] = f"{box.host_info.isolation}-{box.host_info.variant}"
        times: dict[str, list[float]] = {name: [] for name in ("lease", "image_lease", "exec", "image_exec")}
        for _ in range(rounds):
            for prefix, pool, spec in (("", without, SandboxSpec()), ("image_", with_image, config.spec)):
                await asyncio.sleep(REST_S)
                lease_ms, exec_ms = await _one(pool, spec)
                times[f"{prefix}lease"].append(lease_ms)
                times[f"{prefix}exec"].append(exec_ms)
    medians = {name: statistics.median(values) for name, values in times.items()}
    result |= {f"{name}_p50_ms": round(value, 3) for name, value in medians.items()}
    result["lease_p50"] = round(medians["image_lease"] / medians["lease"], 2)
    result["exec_p50"] = round(medians["image_exec"] / medians["exec"], 2)
    if not is_folder(config.spec.image):
        result |= await _bench_unpacking(config, config.spec.image)
    return result


async def _one(pool: SlotPool, spec: SandboxSpec) -> tuple[float, float]:
    began_s = time.monotonic()
    async with pool.lease("bench", spec) as box:
        leased_s = time.monotonic()
        await box.exec("true")
        began_exec_s = time.monotonic()
        await box.exec("echo hi")
        return (leased_s - began_s) * 1000, (time.monotonic() - began_exec_s) * 1000


async def _bench_unpacking(config: PoolConfig, name: str) -> dict[str, Any]:
    images = Images(config.images)
    with tempfile.TemporaryDirectory(prefix="hrl-bench-", dir="/var/tmp") as folder:
        try:
            image = await images.find(name)
            files = await _blobs(image, Path(folder))
            ours_s, tar_s = [], []
            for turn in range(3):
                tar_s.append(await _tar(files, Path(folder) / f"tar-{turn}"))
                store = LayerStore(str(Path(folder) / f"store-{turn}"), "user")
                began_s = time.monotonic()
                await images.pull(name, store)
                ours_s.append(time.monotonic() - began_s)
        finally:
            await images.close()
    ours, tar = min(ours_s), min(tar_s)
    return {"unpack_s": round(ours, 3), "tar_x_s": round(tar, 3), "unpack_speed": round(tar / ours, 2)}


async def _blobs(image: Image, folder: Path) -> list[Path]:
    paths = []
    for number, layer in enumerate(image.layers):
        path = folder / f"blob-{number}"
        with path.open("wb") as file:
            async for piece in layer.blob():
                file.write(piece)
        paths.append(path)
    return paths


async def _tar(files: list[Path], target: Path) -> float:
    """Layer after layer into folders of their own, as a user without us would do it."""
    began_s = time.monotonic()
    for number, path in enumerate(files):
        place = target / str(number)
        place.mkdir(parents=True)
        process = await asyncio.create_subprocess_exec("tar", "-x", "-f", str(path), "-C", str(place))
        if await process.wait():
            raise RuntimeError(f"tar could not unpack {path}")
    return time.monotonic() - began_s
