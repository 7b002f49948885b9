"""Exec and lease of slots in containers, with local slots and the engines' own exec, in one run.

    PYTHONPATH=tests python tests/benchmarks/pool_containers.py [ROUNDS]

Rounds are interleaved, so that other work on the machine meets all of them alike.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

from sandbox_pool import PoolConfig, SlotPool
from support import container_engines
from support.containers import Unavailable


async def timed(work):
    began_s = time.perf_counter()
    await work
    return (time.perf_counter() - began_s) * 1000


async def lease_once(pool):
    async with pool.lease("bench"):
        pass


async def engine_exec(engine, container):
    await asyncio.to_thread(engine.run, "exec", container, "true")


async def main(rounds):
    async with contextlib.AsyncExitStack() as stack:
        work = stack.enter_context(tempfile.TemporaryDirectory())
        places = {"local": ("local", {})}
        engines = {}
        for name, start in (("docker", container_engines.docker), ("podman", container_engines.podman)):
            try:
                engine = engines[name] = stack.enter_context(start())
            except Unavailable as error:
                print(f"{name}: {error}")
                continue
            capable = engine.options(cap_add=["SYS_ADMIN"])
            places |= {name: (name, engine.options()), f"{name} SYS_ADMIN": (name, capable)}
            places[f"{name} through exec"] = (name, engine.options(data_path="exec"))
        pools, boxes = {}, {}
        for name, (provider, options) in places.items():
            config = PoolConfig(
                provider=provider,
                provider_options=options,
                state_dir=Path(work) / "state",
                slots_per_host=2,
                max_hosts=1,
            )
            pools[name] = await stack.enter_async_context(SlotPool.from_config(config))
            boxes[name] = await stack.enter_async_context(pools[name].lease("bench"))
        execs, leases = {name: [] for name in places}, {name: [] for name in places}
        for _ in range(rounds):
            for name in places:
                execs[name].append(await timed(boxes[name].exec("true")))
                leases[name].append(await timed(lease_once(pools[name])))
        control = statistics.median(execs["local"])
        print(f"{'place':22} {'isolation':11} {'exec p50':>9} {'x local':>8} {'lease p50':>10}   (ms)")
        for name in places:
            exec_ms, lease_ms = statistics.median(execs[name]), statistics.median(leases[name])
            level = boxes[name].host_info.isolation
            print(f"{name:22} {level:11} {exec_ms:9.2f} {exec_ms / control:8.2f} {lease_ms:10.2f}")
        for name, engine in engines.items():
            container = engine.containers()[0]
            taken = [await timed(engine_exec(engine, container)) for _ in range(max(5, rounds // 20))]
            ms = statistics.median(taken)
            print(f"{f'{name} exec (command)':34} {ms:9.2f} {ms / control:8.2f}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
