"""A client that keeps leases of any pool busy until it is killed: `python pool_program.py CONFIG.json LEASES`."""

import asyncio
import sys
from pathlib import Path

from sandbox_pool import PoolConfig, SlotPool


async def main(config, leases):
    async with SlotPool.from_config(config) as pool:
        boxes = await asyncio.gather(*(pool.acquire(f"task-{n}") for n in range(leases)))
        running = [asyncio.create_task(box.exec("setsid sleep 7777 & sleep 7778")) for box in boxes]
        await asyncio.sleep(0.2)
        print("busy", flush=True)
        await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(main(PoolConfig.model_validate_json(Path(sys.argv[1]).read_text()), int(sys.argv[2])))
