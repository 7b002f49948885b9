"""A client that leases many slots, keeps them busy, says so, and waits to be killed. Run as a program."""

import asyncio
import sys
from pathlib import Path

from sandbox_pool import PoolConfig, SlotPool


async def main(state_dir, scratch_dir, slots):
    config = PoolConfig(
        provider="local", slots_per_host=slots, max_hosts=1, state_dir=Path(state_dir), scratch_dir=Path(scratch_dir)
    )
    async with SlotPool.from_config(config) as pool:
        boxes = await asyncio.gather(*(pool.acquire(f"task-{n}") for n in range(slots)))
        await asyncio.gather(*(box.exec("setsid sleep 7777 & head -c 100000 /dev/zero > f") for box in boxes))
        running = [asyncio.create_task(box.exec("sleep 7778")) for box in boxes]
        await asyncio.sleep(0.2)
        print("busy", flush=True)
        await asyncio.gather(*running)


def main_sync(state_dir, scratch_dir, slots):
    """The same with the wrapper for plain threads."""
    config = PoolConfig(slots_per_host=slots, max_hosts=1, state_dir=Path(state_dir), scratch_dir=Path(scratch_dir))
    with SlotPool.sync(config) as pool:
        boxes = [pool.lease(f"task-{n}") for n in range(slots)]
        for box in boxes:
            box.exec("sleep 7777 &")
        print("busy", flush=True)
        boxes[0].exec("sleep 7778")


if __name__ == "__main__":
    if "--sync" in sys.argv:
        main_sync(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
