"""What a command costs through Nomad beside the same on this machine: `python tests/benchmarks/pool_nomad.py`.

Starts a private agent on loopback; commands alternate between the two slots, so that both see the same load.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sandbox_pool import PoolConfig, SlotPool
from support.nomad_agent import MISSING, Agent, find_nomad

ROUNDS = 1000


async def measure(agent, folder):
    options = {"address": agent.address, "token": agent.pool_token()}
    far = PoolConfig(provider="nomad", slots_per_host=1, state_dir=folder / "far", provider_options=options)
    near = PoolConfig(slots_per_host=1, state_dir=folder / "near")
    times = {"nomad": [], "local": []}
    async with (
        SlotPool.from_config(far) as nomad,
        SlotPool.from_config(near) as local,
        nomad.lease("a") as far_box,
        local.lease("b") as near_box,
    ):
        for number in range(ROUNDS + 50):
            for name, box in (("nomad", far_box), ("local", near_box)):
                began_s = time.perf_counter()
                await box.exec("true")
                if number >= 50:
                    times[name].append(time.perf_counter() - began_s)
    return {name: statistics.median(values) * 1000 for name, values in times.items()}


def main():
    if find_nomad() is None:
        sys.exit(MISSING)
    folder = Path(tempfile.mkdtemp(prefix="hrl-bench-"))
    agent = Agent(folder / "agent").start()
    try:
        medians = asyncio.run(measure(agent.wait_ready(), folder))
    finally:
        agent.close()
    ratio = medians["nomad"] / medians["local"]
    print(f"exec p50, ms: nomad {medians['nomad']:.2f}, local {medians['local']:.2f}; {ratio:.2f} x (promised: 1.3 x)")


if __name__ == "__main__":
    main()
