"""Leases and rollouts by the thousand: memory, descriptors, disk and latency must stay flat.

    make soak SOAK_LEASES=50000 SOAK_ROLLOUTS=5000

Prints a line per thousand (or per twentieth of a smaller run). The exit code is 1 when the last quarter needs more than
the second one: the first fills caches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent_loop import own_process
from hermes_rl import PoolConfig, Rollouts, SlotPool
from support.env_tasks import NumberEnv, sometimes_right, standin_model

AT_ONCE = 16
MORE_MEMORY_MB, MORE_MEMORY = 16.0, 1.10
MORE_LATENCY = 2.0
"""What the last quarter may need over the second: the machine's own unrest, not growth."""
JOURNAL_KB = 8192
"""SQLite writes its log back every 4 MB."""


@dataclass(frozen=True)
class Line:
    """Where things stand after so many."""

    done: int
    client_mb: float
    servers_mb: float
    descriptors: int
    scratch_files: int
    journal_kb: float
    p50_ms: float
    p99_ms: float
    per_s: float

    def text(self) -> str:
        return (
            f"{self.done:>7} {self.client_mb:>9.1f} {self.servers_mb:>10.1f} {self.descriptors:>6} "
            f"{self.scratch_files:>6} {self.journal_kb:>8.0f} "
            f"{self.p50_ms:>8.2f} {self.p99_ms:>8.2f} {self.per_s:>7.1f}"
        )


HEAD = "   done client_mb servers_mb     fd  files journ_kb   p50_ms   p99_ms   per_s"


def memory_mb(pid: int) -> float:
    """Private and shared memory of a process, each shared page divided by its users."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(row.split()[1]) / 1024 for row in rows if row.startswith("Pss:")), 0.0)


def below(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(inner for child in children for inner in below(child))]


async def soak(folder: Path, total: int, one: Callable[[int], Awaitable[None]]) -> list[Line]:
    """`one(n)` for n up to `total`, some at once; a line per thousand."""
    lines: list[Line] = []
    numbers, took = iter(range(total)), list[float]()
    step, began = min(1000, max(1, total // 20)), time.monotonic()

    async def worker() -> None:
        nonlocal began
        for number in numbers:
            started = time.monotonic()
            await one(number)
            took.append(time.monotonic() - started)
            if len(took) == step:
                lines.append(look(folder, (len(lines) + 1) * step, took, time.monotonic() - began))
                print(lines[-1].text(), flush=True)
                took.clear()
                began = time.monotonic()

    print(HEAD, flush=True)
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    return lines


def look(folder: Path, done: int, took: list[float], wall_s: float) -> Line:
    ordered = sorted(took)
    return Line(
        done,
        memory_mb(os.getpid()),
        sum(map(memory_mb, below(os.getpid()))),
        len(list(Path("/proc/self/fd").iterdir())),
        sum(1 for _ in (folder / "scratch").rglob("*")),
        sum(path.stat().st_size for path in (folder / "state").rglob("pool.db*")) / 1024,
        statistics.median(ordered) * 1000,
        ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000,
        len(took) / wall_s,
    )


def growth(lines: list[Line]) -> list[str]:
    """What is not flat, in words; needs eight lines to say anything."""
    quarter = len(lines) // 4
    if quarter < 2:
        return [f"{len(lines)} lines are too few to judge"]
    early, late = lines[quarter : 2 * quarter], lines[-quarter:]

    def mean(name: str, part: list[Line]) -> float:
        return statistics.fmean(getattr(line, name) for line in part)

    found = []
    for name in ("client_mb", "servers_mb", "descriptors", "scratch_files", "journal_kb", "p50_ms"):
        before, after = mean(name, early), mean(name, late)
        allowed = {
            "p50_ms": before * MORE_LATENCY,
            "descriptors": before + AT_ONCE,
            "scratch_files": before * 1.5 + 50,
            "journal_kb": max(before * 1.5, JOURNAL_KB),
        }.get(name, before * MORE_MEMORY + MORE_MEMORY_MB)
        if after > allowed:
            found.append(f"{name} grows from {before:.1f} to {after:.1f}")
    return found


async def soak_leases(folder: Path, total: int) -> list[Line]:
    config = PoolConfig(slots_per_host=AT_ONCE, state_dir=folder / "state", scratch_dir=folder / "scratch")
    async with SlotPool.from_config(config) as pool:

        async def one(number: int) -> None:
            async with pool.lease(f"soak-{number}") as box:
                result = await box.exec(f"echo {number} > f; cat f")
                assert result.output == f"{number}\n", result

        return await soak(folder, total, one)


async def soak_rollouts(folder: Path, total: int) -> list[Line]:
    config = PoolConfig(slots_per_host=AT_ONCE * 2, state_dir=folder / "state", scratch_dir=folder / "scratch")
    async with (
        SlotPool.from_config(config) as pool,
        standin_model(sometimes_right, keep_log=False) as (model, _),
        Rollouts(NumberEnv(pool, model, max_token_length=8192)) as rollouts,
    ):

        async def one(number: int) -> None:
            samples = await rollouts.group({"id": f"n{number}", "number": number}, 1)
            assert len(samples) == 1

        return await soak(folder, total, one)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", type=int, default=50_000)
    parser.add_argument("--rollouts", type=int, default=5_000)
    args = parser.parse_args()
    found = []
    for name, total, run in (("leases", args.leases, soak_leases), ("rollouts", args.rollouts, soak_rollouts)):
        if not total:
            continue
        folder = Path(tempfile.mkdtemp(prefix="hermes-soak-"))
        print(f"{total} {name}, {AT_ONCE} at once")
        try:
            found += [f"{name}: {what}" for what in growth(own_process.run(run(folder, total)))]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(found) or "flat")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
