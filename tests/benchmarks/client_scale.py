"""What one client can drive: the real pool (dispatch, fleet, journal) over slot servers that answer at once.

    python tests/benchmarks/client_scale.py --hosts 100 --slots 100 --leases 20000

The servers are stubs in this process, so what is measured is the client's own part of a lease: CPU per lease, leases
per second, memory per slot. docs/scale.md puts it beside the parts that are measured with real servers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent_loop import own_process
from sandbox_pool import PoolConfig, SlotPool
from support.pool_fake_host import FakePlace


def memory_mb() -> float:
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) / 1024 for row in rows if row.startswith("Pss:"))


async def measure(hosts: int, slots: int, leases: int, folder: Path) -> dict[str, float]:
    place = FakePlace(slots=slots)
    config = PoolConfig(
        slots_per_host=slots,
        min_hosts=hosts,
        max_hosts=hosts,
        max_starting=hosts,
        create_interval_s=0.0,
        state_dir=folder,
        health_interval_s=60.0,
    )
    before_mb = memory_mb()
    async with SlotPool(config, place, place.connect) as pool:
        began = time.monotonic()
        held = await asyncio.gather(*(pool.acquire(f"all-{n}") for n in range(hosts * slots)))
        all_s, all_mb = time.monotonic() - began, memory_mb()
        await asyncio.gather(*(lease.release() for lease in held))
        del held
        numbers = iter(range(leases))

        async def worker() -> None:
            for number in numbers:
                await (await pool.acquire(f"t{number}")).release()

        began, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(worker() for _ in range(1000)))
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    return {
        "slots": hosts * slots,
        "all_leased_s": round(all_s, 2),
        "kb_per_slot": round((all_mb - before_mb) * 1024 / (hosts * slots), 2),
        "leases_per_s": round(leases / wall_s),
        "cpu_ms_per_lease": round(1000 * cpu_s / leases, 3),
        "leases_per_cpu_s": round(leases / cpu_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--slots", type=int, default=100)
    parser.add_argument("--leases", type=int, default=20_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, value in own_process.run(measure(args.hosts, args.slots, args.leases, Path(folder))).items():
            print(f"{name:>18} {value}")


if __name__ == "__main__":
    main()
