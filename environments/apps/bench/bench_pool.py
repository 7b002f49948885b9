"""Measures a pool and its control, bare subprocesses, in the same run, so that a noisy machine affects both alike."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.apps.cli.bench import timed
from sandbox_pool.config import PoolConfig
from sandbox_pool.pool.lease import Lease
from sandbox_pool.pool.metrics import percentile
from sandbox_pool.pool.pool import SlotPool


def private_kb_below(root: int) -> int:
    """Private (not shared) memory of all descendants of a process, in kB."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat[stat.rfind(")") + 2 :].split()[1]), []).append(int(entry.name))
    total_kb, queue = 0, list(parents.get(root, []))
    while queue:
        pid = queue.pop()
        queue += parents.get(pid, [])
        total_kb += _private_kb(pid)
    return total_kb


def _private_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def available_memory_kb() -> int:
    """What the machine has left, the kernel's own memory counted: what slots take all told shows in it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


COMMAND = "echo hi"
CONTROL = ["bash", "-c", COMMAND]
WARM_UP = 5


@dataclass(frozen=True)
class BenchPlan:
    slots: int = 16
    rounds: int = 100
    throughput_s: float = 2.0
    """Wall time of each throughput sample; sandbox and control alternate."""
    throughput_turns: int = 2
    transfer_mb: int = 100
    rest_s: float = 20.0
    """How long slots are left alone before they count as idle: their shells rest after 10 to 15 s."""


@dataclass
class Samples:
    """Milliseconds by name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, began_s: float) -> None:
        """Record the time since `began_s`."""
        self.values.setdefault(name, []).append((time.perf_counter() - began_s) * 1000)

    def summary(self) -> dict[str, dict[str, float]]:
        """p50, p95 and p99 by name."""
        return {
            name: {f"p{q}": round(percentile(sorted(values), q / 100), 3) for q in (50, 95, 99)}
            for name, values in self.values.items()
        }


Progress = Callable[[str], None]


async def run_bench(pool: SlotPool, plan: BenchPlan, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure everything; the result is plain data, latencies in milliseconds."""
    samples = Samples()
    async with pool.lease("bench-probe") as box:
        info = box.host_info
    progress("memory")
    memory = await _memory(pool, plan)
    progress("one command at a time, and subprocess.run")
    await _latencies(pool, plan, samples)
    progress("lease, first command, reset")
    await _cycles(pool, plan, samples)
    progress("snapshot and fork")
    await _forks(pool, plan, samples)
    progress(f"{plan.slots} slots, and {plan.slots} threads")
    rates = await _throughput(pool, plan)
    progress("parallel sleeps")
    sleep_s = await _parallel_sleeps(pool, plan)
    progress(f"{plan.transfer_mb} MB up and down")
    transfer = await _transfer(pool, plan)
    summary = samples.summary()
    return {
        "isolation": info.isolation,
        "isolation_variant": info.variant,
        "isolation_reason": info.isolation_reason,
        "missing": list(info.missing),
        "provider": pool.config.provider,
        "slots": plan.slots,
        "rounds": plan.rounds,
        "python": sys.version.split()[0],
        **summary,
        **rates,
        **memory,
        "parallel_sleep_0_2_wall_s": sleep_s,
        **transfer,
        "ratios": _ratios(summary, rates),
    }


def _ratios(summary: dict[str, dict[str, float]], rates: dict[str, float]) -> dict[str, float]:
    """Sandbox over control: the promises of this project are stated as these ratios."""
    control = summary["control_exec_ms"]
    return {
        "exec_p50": round(summary["exec_ms"]["p50"] / control["p50"], 3),
        "exec_p99": round(summary["exec_ms"]["p99"] / control["p99"], 3),
        "reset_p50": round(summary["reset_ms"]["p50"] / control["p50"], 3),
        "cycle_p50": round(summary["cycle_ms"]["p50"] / control["p50"], 3),
        "throughput": round(rates["throughput_per_s"] / rates["control_throughput_per_s"], 3),
    }


def run_control() -> None:
    """One bare command, without any sandbox."""
    subprocess.run(CONTROL, capture_output=True, check=True)


async def _latencies(pool: SlotPool, plan: BenchPlan, samples: Samples) -> None:
    async with pool.lease("bench-exec") as box:
        for _ in range(WARM_UP):
            await box.exec(COMMAND)
            run_control()
        for _ in range(plan.rounds):
            began_s = time.perf_counter()
            run_control()  # on purpose in this thread: the control has nothing to wait for either
            samples.add("control_exec_ms", began_s)
            began_s = time.perf_counter()
            await box.exec(COMMAND)
            samples.add("exec_ms", began_s)


async def _cycles(pool: SlotPool, plan: BenchPlan, samples: Samples) -> None:
    for _ in range(plan.rounds):
        began_s = time.perf_counter()
        run_control()
        samples.add("control_exec_ms", began_s)
        began_s = cycle_s = time.perf_counter()
        lease = await pool.acquire("bench-cycle")
        samples.add("acquire_ms", began_s)
        began_s = time.perf_counter()
        await lease.exec(COMMAND)
        samples.add("first_exec_ms", began_s)
        began_s = time.perf_counter()
        await lease.release()
        samples.add("reset_ms", began_s)
        samples.add("cycle_ms", cycle_s)


async def _forks(pool: SlotPool, plan: BenchPlan, samples: Samples) -> None:
    async with pool.lease("bench-fork") as box:
        await box.exec("mkdir -p tree && for i in $(seq 200); do head -c 2000 /dev/zero > tree/$i; done", timeout_s=60)
        for _ in range(max(5, plan.rounds // 10)):
            began_s = time.perf_counter()
            snapshot = await box.snapshot()
            samples.add("snapshot_ms", began_s)
            began_s = time.perf_counter()
            fork = await pool.lease_from(snapshot, "bench-forked")
            samples.add("fork_ms", began_s)
            await fork.release()
            await pool.drop_snapshot(snapshot)


async def _throughput(pool: SlotPool, plan: BenchPlan) -> dict[str, float]:
    """Commands per second, all slots at once, then the same with as many threads of bare subprocesses, in turns."""
    boxes = await asyncio.gather(*(pool.acquire(f"bench-{n}") for n in range(plan.slots)))
    done = {"throughput_per_s": 0.0, "control_throughput_per_s": 0.0}
    try:
        for _ in range(plan.throughput_turns):
            done["throughput_per_s"] += await _rate_of_slots(boxes, plan.throughput_s)
            done["control_throughput_per_s"] += await asyncio.to_thread(_rate_of_threads, plan.slots, plan.throughput_s)
    finally:
        await asyncio.gather(*(box.release() for box in boxes))
    return {name: round(value / plan.throughput_turns, 1) for name, value in done.items()}


async def _rate_of_slots(boxes: list[Lease], duration_s: float) -> float:
    began_s = time.perf_counter()

    async def loop(box: Lease) -> int:
        count = 0
        while time.perf_counter() - began_s < duration_s:
            await box.exec(COMMAND)
            count += 1
        return count

    counts = await asyncio.gather(*(loop(box) for box in boxes))
    return sum(counts) / (time.perf_counter() - began_s)


def _rate_of_threads(threads: int, duration_s: float) -> float:
    began_s = time.perf_counter()

    def loop(_: int) -> int:
        count = 0
        while time.perf_counter() - began_s < duration_s:
            run_control()
            count += 1
        return count

    with ThreadPoolExecutor(threads) as executor:
        counts = list(executor.map(loop, range(threads)))
    return sum(counts) / (time.perf_counter() - began_s)


async def _parallel_sleeps(pool: SlotPool, plan: BenchPlan) -> float:
    boxes = await asyncio.gather(*(pool.acquire(f"bench-{n}") for n in range(plan.slots)))
    began_s = time.perf_counter()
    await asyncio.gather(*(box.exec("sleep 0.2") for box in boxes))
    took_s = time.perf_counter() - began_s
    await asyncio.gather(*(box.release() for box in boxes))
    return round(took_s, 3)


async def _transfer(pool: SlotPool, plan: BenchPlan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        source, back = Path(folder) / "up", Path(folder) / "down"
        await asyncio.to_thread(_write_random, source, plan.transfer_mb)
        async with pool.lease("bench-transfer") as box:
            up_s = await timed(box.upload, source, "data")
            down_s = await timed(box.download, "data", back)
        exact = await asyncio.to_thread(lambda: source.read_bytes() == back.read_bytes())
    return {
        "upload_mb_per_s": round(plan.transfer_mb / up_s, 1),
        "download_mb_per_s": round(plan.transfer_mb / down_s, 1),
        "transfer_exact": exact,
    }


async def run_many(config: PoolConfig, slots: int) -> dict[str, Any]:
    """Lease this many slots of one host at once and use every one of them."""
    async with SlotPool.from_config(config.model_copy(update={"slots_per_host": slots, "max_hosts": 1})) as pool:
        async with pool.lease("bench-first"):
            pass
        available_kb = available_memory_kb()
        began_s = time.perf_counter()
        boxes = await asyncio.gather(*(pool.acquire(f"bench-{n}") for n in range(slots)))
        leased_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        results = await asyncio.gather(*(box.exec(f"echo {n} > f; cat f") for n, box in enumerate(boxes)))
        used_s = time.perf_counter() - began_s
        taken_kb = available_kb - available_memory_kb()
        usable = sum(result.output == f"{n}\n" for n, result in enumerate(results))
        private_kb = await asyncio.to_thread(private_kb_below, boxes[0].host_info.pid)
        began_s = time.perf_counter()
        await asyncio.gather(*(box.release() for box in boxes))
        reset_s = time.perf_counter() - began_s
        quarantined = pool.metrics.counts["quarantines"]
    return {
        "slots": slots,
        "usable": usable,
        "quarantined": quarantined,
        "lease_all_s": round(leased_s, 2),
        "use_all_s": round(used_s, 2),
        "reset_all_s": round(reset_s, 2),
        "kb_per_slot": round(private_kb / slots, 1),
        "all_told_kb_per_slot": round(taken_kb / slots, 1),
    }


def _write_random(path: Path, size_mb: int) -> None:
    with path.open("wb") as file, Path("/dev/urandom").open("rb") as source:
        for _ in range(size_mb):
            file.write(source.read(2**20))


async def _memory(pool: SlotPool, plan: BenchPlan) -> dict[str, float | None]:
    """Private memory of everything below the server process, per leased slot: right after a command, when a shell waits
    for the next one, and when the slots were left alone for a while.

    None where the server runs on another machine. All slots are leased: a free one has a shell waiting for its lease.
    """
    slots = pool.config.slots_per_host
    boxes = await asyncio.gather(*(pool.acquire(f"bench-idle-{n}") for n in range(slots)))
    found: dict[str, float | None] = {"waiting_kb_per_slot": None, "idle_kb_per_slot": None}
    try:
        if boxes[0].endpoint.address.startswith("unix:"):
            await asyncio.gather(*(box.exec("true") for box in boxes))
            for name, after_s in (("waiting_kb_per_slot", 0.0), ("idle_kb_per_slot", plan.rest_s)):
                await asyncio.sleep(after_s)
                total_kb = await asyncio.to_thread(private_kb_below, boxes[0].host_info.pid)
                found[name] = round(total_kb / slots, 1)
    finally:
        await asyncio.gather(*(box.release() for box in boxes))
    return found
