"""`hermes-rl bench loop`: what the agent loop itself costs, with a model of fixed latency and tools that take no time.

All rollouts run at once with the given latency (wall time over the ideal, CPU per turn, stalls of the event loop,
memory), a few times over: whatever else the machine does only adds, so the figures are those of the fastest time. On a
virtual machine `cpu_taken` says how much of the CPU its host gave to others meanwhile: beyond a few percent the figures
are the host's. Then a few rollouts of 10 and of 60 turns without latency or HTTP show whether a turn gets dearer with
its history.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from environments.cli.bench import Figure, Report
from environments.cli.errors import UsageError

if TYPE_CHECKING:
    from agent_loop.model import ModelServer
    from agent_loop.result import AgentResult

HELP = "cost of the agent loop: wall time over the ideal, CPU per turn, event-loop stalls, memory"

BEAT_S = 0.01
SHORT_TURNS, LONG_TURNS = 10, 60
GROWTH_PAIRS, GROWTH_ROLLOUTS = 15, 4
"""Measurements of growth, and rollouts at once in each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size of the run."""
    parser.add_argument("--rollouts", type=int, default=256, help="rollouts at once (256)")
    parser.add_argument("--turns", type=int, default=8, help="turns of each rollout (8)")
    parser.add_argument(
        "--latency", type=float, default=0.5, metavar="SECONDS", help="time the model takes per turn (0.5)"
    )
    parser.add_argument(
        "--server",
        choices=("stand-in", "in-process", "text"),
        default="stand-in",
        help="exact tokens from the stand-in over HTTP, from a backend in this process, or no tokens (stand-in)",
    )
    parser.add_argument("--repeat", type=int, default=5, metavar="TIMES", help="times; the fastest counts (5)")


def measure(args: argparse.Namespace) -> Report:
    """Run the bench."""
    if min(args.rollouts, args.turns, args.repeat) < 1 or args.latency < 0:
        raise UsageError("bench loop: --rollouts, --turns and --repeat must be at least 1 and --latency not negative")
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> Report:
    from environments.cli.bench_servers import bench_server
    from environments.launch import collect_seldom

    collect_seldom()
    async with bench_server(args.server, args.latency) as server:
        await _play(server, args.rollouts, 1)  # fills caches and opens the connections, which a run keeps
        times = [await _play(server, args.rollouts, args.turns) for _ in range(args.repeat)]
    main = min(times, key=lambda played: played.wall_s)
    slowest_s = max(played.wall_s for played in times)
    short, long, growth = await _growth()
    figures = [
        Figure("wall", main.wall_s, "s"),
        Figure("wall_slowest", slowest_s, "s"),
        Figure("cpu_per_turn", main.cpu_per_turn_ms, "ms", 2.0),
        Figure("stall_p99", main.stall_p99_ms, "ms", 20.0),
        Figure("memory_per_rollout", max(played.memory_kb for played in times), "KB"),
        Figure("cpu_taken", main.cpu_taken * 100, "%"),
        Figure("cpu_per_turn_10_turns", short, "ms"),
        Figure("cpu_per_turn_60_turns", long, "ms"),
        Figure("growth_60_over_10", growth, "x", 1.3),
    ]
    if args.latency:
        figures.insert(1, Figure("wall_over_ideal", main.wall_s / (args.turns * args.latency), "x", 1.15))
    settings: dict[str, float | int | str] = {
        "server": args.server,
        "rollouts": args.rollouts,
        "turns": args.turns,
        "latency_s": args.latency,
        "repeat": args.repeat,
    }
    return Report("loop", settings, tuple(figures))


async def _growth() -> tuple[float, float, float]:
    """CPU per turn (ms) of short and of long rollouts, and how much dearer the long ones are.

    Both play as many turns with as many rollouts at once, right after each other, and the growth is the median over the
    pairs: what else this machine does falls on both alike. Without HTTP, because sending the ids may cost what it does.
    """
    from environments.cli.bench_servers import bench_server

    costs: dict[int, list[float]] = {SHORT_TURNS: [], LONG_TURNS: []}
    async with bench_server("in-process", 0.0) as server:
        for pair in range(GROWTH_PAIRS + 1):
            for turns in sorted(costs, reverse=bool(pair % 2)):
                waves = [await _play(server, GROWTH_ROLLOUTS, turns) for _ in range(LONG_TURNS // turns)]
                if pair > 0:  # the first pair fills caches
                    costs[turns].append(fmean(wave.cpu_per_turn_ms for wave in waves))
    growth = median(long / short for short, long in zip(costs[SHORT_TURNS], costs[LONG_TURNS], strict=True))
    return median(costs[SHORT_TURNS]), median(costs[LONG_TURNS]), growth


@dataclass(frozen=True)
class _Played:
    wall_s: float
    cpu_per_turn_ms: float
    stall_p99_ms: float
    memory_kb: float
    cpu_taken: float
    """Share of this machine's CPU time that its host gave to others."""


async def _play(server: ModelServer, rollouts: int, turns: int) -> _Played:
    gc.collect()
    late: list[float] = []
    memory_before = _resident_kb()
    stolen_before, whole_before = _cpu_ticks()
    beat = asyncio.create_task(_heartbeat(late))
    wall, cpu = time.perf_counter(), time.process_time()
    results = await asyncio.gather(*(_rollout(server, turns) for _ in range(rollouts)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    memory = _resident_kb() - memory_before
    stolen, whole = _cpu_ticks()
    beat.cancel()
    if short := [result for result in results if len(result.turns) != turns]:
        raise RuntimeError(f"a rollout ended as {short[0].outcome}: {short[0].error}")
    late.sort()
    stall = late[int(len(late) * 0.99)] if late else 0.0
    taken = (stolen - stolen_before) / max(whole - whole_before, 1)
    return _Played(wall, cpu * 1000 / (rollouts * turns), stall * 1000, max(memory, 0) / rollouts, taken)


async def _rollout(server: ModelServer, turns: int) -> AgentResult:
    from agent_loop.loop import HermesAgentLoop

    loop = HermesAgentLoop(server, [_TOOL], tool_handler=_answer, max_turns=turns, max_context_tokens=10**6)
    return await loop.run([{"role": "user", "content": "Count the lines of every file."}])


async def _heartbeat(late: list[float]) -> None:
    """How much later than asked the event loop wakes us: that is how long something kept it busy."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(BEAT_S)
        late.append(time.perf_counter() - asked - BEAT_S)


def _cpu_ticks() -> tuple[int, int]:
    """Stolen and all CPU time of this machine so far; zeros where the kernel does not tell."""
    try:
        first = Path("/proc/stat").read_text("ascii").partition("\n")[0]
    except OSError:
        return 0, 0
    ticks = [int(word) for word in first.split()[1:9]]  # user nice system idle iowait irq softirq steal
    return ticks[7], sum(ticks)


def _resident_kb() -> int:
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_RESULT = json.dumps({"output": "line of output\n" * 40, "exit_code": 0, "error": None})


async def _answer(name: str, arguments: dict[str, Any], task_id: str) -> str:
    return _RESULT
