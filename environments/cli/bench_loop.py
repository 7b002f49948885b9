"""`hermes-rl bench loop`: what the agent loop itself costs, with a model of fixed latency and tools that take no time.

All rollouts run at once with the given latency (wall time over the ideal, CPU per turn, stalls of the event loop,
memory); then a few rollouts of 10 and of 60 turns without latency show whether a turn gets dearer with its history.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from environments.cli.bench import Figure, Report
from environments.cli.errors import UsageError

if TYPE_CHECKING:
    from agent_loop.model import Conversation, Message, ModelTurn, Sampling, Segment, ToolSchema

HELP = "cost of the agent loop: wall time over the ideal, CPU per turn, event-loop stalls, memory"

BEAT_S = 0.005
SHORT_TURNS, LONG_TURNS, GROWTH_ROLLOUTS = 10, 60, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size of the run."""
    parser.add_argument("--rollouts", type=int, default=256, help="rollouts at once (256)")
    parser.add_argument("--turns", type=int, default=8, help="turns of each rollout (8)")
    parser.add_argument(
        "--latency", type=float, default=0.5, metavar="SECONDS", help="time the model takes per turn (0.5)"
    )


def measure(args: argparse.Namespace) -> Report:
    """Run the bench."""
    if args.rollouts < 1 or args.turns < 1 or args.latency < 0:
        raise UsageError("bench loop: --rollouts and --turns must be at least 1 and --latency not negative")
    asyncio.run(_play(4, 2, 0.0))  # imports and caches
    main = asyncio.run(_play(args.rollouts, args.turns, args.latency))
    short, long = _growth()
    ideal_s = args.turns * args.latency
    figures = [
        Figure("wall", main.wall_s, "s"),
        Figure("cpu_per_turn", main.cpu_per_turn_ms, "ms", 2.0),
        Figure("stall_p99", main.stall_p99_ms, "ms", 20.0),
        Figure("memory_per_rollout", main.memory_kb, "KB"),
        Figure("cpu_per_turn_10_turns", short, "ms"),
        Figure("cpu_per_turn_60_turns", long, "ms"),
        Figure("growth_60_over_10", long / short, "x", 1.3),
    ]
    if ideal_s > 0:
        figures.insert(1, Figure("wall_over_ideal", main.wall_s / ideal_s, "x", 1.15))
    settings = {"rollouts": args.rollouts, "turns": args.turns, "latency_s": args.latency}
    return Report("loop", settings, tuple(figures))


def _growth() -> tuple[float, float]:
    """CPU per turn (ms) of short and of long rollouts; the best of five each, taken in turns."""
    best = {SHORT_TURNS: float("inf"), LONG_TURNS: float("inf")}
    for _ in range(5):
        for turns in best:
            played = asyncio.run(_play(GROWTH_ROLLOUTS, turns, 0.0))
            best[turns] = min(best[turns], played.cpu_per_turn_ms)
    return best[SHORT_TURNS], best[LONG_TURNS]


@dataclass(frozen=True)
class _Played:
    wall_s: float
    cpu_per_turn_ms: float
    stall_p99_ms: float
    memory_kb: float


async def _play(rollouts: int, turns: int, latency_s: float) -> _Played:
    from agent_loop.loop import HermesAgentLoop

    server = _FixedLatency(turns, latency_s)
    gc.collect()
    late: list[float] = []
    memory_before = _resident_kb()
    beat = asyncio.create_task(_heartbeat(late))
    wall, cpu = time.perf_counter(), time.process_time()
    loops = [
        HermesAgentLoop(
            server,
            [_TOOL],
            tool_handler=_answer,
            parallel_tools={"terminal"},
            max_turns=turns,
            max_context_tokens=10**6,
        )
        for _ in range(rollouts)
    ]
    results = await asyncio.gather(*(loop.run([{"role": "user", "content": "count"}]) for loop in loops))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    memory = _resident_kb() - memory_before
    beat.cancel()
    if any(not result.finished_naturally for result in results):
        raise RuntimeError(f"a rollout ended as {next(r.outcome for r in results if not r.finished_naturally)}")
    late.sort()
    stall = late[int(len(late) * 0.99)] if late else 0.0
    return _Played(wall, cpu * 1000 / (rollouts * turns), stall * 1000, max(memory, 0) / rollouts)


async def _heartbeat(late: list[float]) -> None:
    """How much later than asked the event loop wakes us: that is how long something kept it busy."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(BEAT_S)
        late.append(time.perf_counter() - asked - BEAT_S)


def _resident_kb() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - not a path of ours
            return int(statm.read().split()[1]) * resource.getpagesize() // 1024
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


class _FixedLatency:
    """A model server that thinks for a fixed time, calls the terminal on every turn but the last, and then ends."""

    def __init__(self, turns: int, latency_s: float) -> None:
        self.turns = turns
        self.latency_s = latency_s

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Conversation:
        """A conversation of its own for each rollout."""
        return _FixedConversation(self)

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int | None:
        """No tokenizer."""
        return None


class _FixedConversation:
    def __init__(self, server: _FixedLatency) -> None:
        self._server = server
        self._taken = 0

    def append(self, messages: Sequence[Message]) -> None:
        """Nothing to keep."""

    def restart(self, messages: Sequence[Message]) -> None:
        """Nothing to keep."""

    async def sample(self, sampling: Sampling) -> ModelTurn:
        """The next scripted turn."""
        from agent_loop.model import ModelCall, ModelTurn

        await asyncio.sleep(self._server.latency_s)
        self._taken += 1
        if self._taken >= self._server.turns:
            return ModelTurn("All done.", sampled_tokens=3)
        made = (ModelCall("terminal", json.dumps({"command": f"echo {self._taken}"})),)
        return ModelTurn("I look at the next part. " * 8, made, finish_reason="tool_calls", sampled_tokens=60)

    def prompt_tokens(self) -> int | None:
        """Unknown."""
        return None

    def segments(self) -> list[Segment]:
        """None."""
        return []

    def state(self) -> dict[str, Any] | None:
        """None."""
        return None
