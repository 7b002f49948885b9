"""How soon a task gets a slot on Modal when creates take as long as Modal's: `python tests/benchmarks/pool_modal.py`.

On an emulated Modal whose creates take 2 s (the published median of Modal's own is 1.5 to 1.9 s): 200 tasks, as many at
a time as there are slots, on 4 sandboxes of 16 slots, each task busy for 0.5 to 3 s. Counted are all leases after the
first fill, the 64 that are asked for at the same moment among them. One sandbox per task costs each task a create.
"""

import asyncio
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.pool.metrics import percentile

TASKS, SANDBOXES, SLOTS, CREATE_S, PROMISED_MS = 200, 4, 16, 2.0, 50.0
TASK_S = (0.5, 3.0)


async def measure(folder, data_path):
    config = PoolConfig(
        provider="modal",
        slots_per_host=SLOTS,
        min_hosts=SANDBOXES,
        max_hosts=SANDBOXES,
        max_starting=SANDBOXES,
        state_dir=folder / data_path,
        provider_options={"data_path": data_path},
    )
    lengths_s = [random.Random(number).uniform(*TASK_S) for number in range(TASKS)]
    waits_s, began_s = [], time.perf_counter()
    places = asyncio.Semaphore(SANDBOXES * SLOTS)
    async with SlotPool.from_config(config) as pool:
        filling = [pool.acquire(f"fill-{n}") for n in range(SANDBOXES * SLOTS)]
        boxes = await asyncio.gather(*filling)
        fill_s = time.perf_counter() - began_s
        await asyncio.gather(*(box.release() for box in boxes))

        async def task(number):
            async with places:
                asked_s = time.perf_counter()
                async with pool.lease(f"task-{number}") as box:
                    waits_s.append(time.perf_counter() - asked_s)
                    await box.exec(f"echo working; sleep {lengths_s[number]:.2f}")

        began_s = time.perf_counter()
        await asyncio.gather(*map(task, range(TASKS)))
        return fill_s, time.perf_counter() - began_s, sorted(waits_s)


def start_emulator():
    """In a process of its own, as Modal is; the variables with which it is reached."""
    emulator = subprocess.Popen(
        [sys.executable, "-m", "emulators.modal", "--create-delay", f"{CREATE_S:g}"],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    variables = {}
    while "NO_PROXY" not in variables:
        line = emulator.stdout.readline()
        if not line:
            sys.exit("the emulator did not start")
        name, _, value = line.removeprefix("export ").strip().partition("=")
        variables[name] = "".join(shlex.split(value))
    return emulator, variables


def main():
    folder = Path(tempfile.mkdtemp(prefix="hrl-bench-"))
    emulator, variables = start_emulator()
    os.environ.update(variables)
    try:
        for data_path in ("tunnel", "exec"):
            fill_s, wall_s, waits_s = asyncio.run(measure(folder, data_path))
            p50_ms, p95_ms = statistics.median(waits_s) * 1000, percentile(waits_s, 0.95) * 1000
            print(
                f"{data_path}: {TASKS} tasks on {SANDBOXES} sandboxes of {SLOTS} slots, creates of {CREATE_S:g} s: "
                f"first fill {fill_s:.1f} s, then lease p50 {p50_ms:.1f} ms, p95 {p95_ms:.1f} ms "
                f"(promised: p50 under {PROMISED_MS:g} ms), all tasks in {wall_s:.1f} s"
            )
    finally:
        emulator.terminate()
        emulator.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
