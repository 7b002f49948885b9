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
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from agent_loop import own_process
from agent_loop.local_models.standin import chatml_tokenizer
from agent_loop.model.backends import Generation, TokenBackend, VllmBackend
from agent_loop.model.contract import (
    Conversation,
    Message,
    ModelServer,
    ModelTurn,
    Sampling,
    Segment,
    ToolSchema,
)
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.turn.tool_call import ToolCallRecord
from environments.apps.cli.bench import Figure, Report
from environments.errors import at_least
from tool_parsers import get_parser

if TYPE_CHECKING:
    from agent_loop.records.record import AgentResult

KINDS = ("stand-in", "in-process", "text")

_ARGUMENTS = {"command": "ls -la src && wc -l src/*.py"}
_WORDS = "I look at the next part of the project. " * 4
_CALL = json.dumps({"name": "terminal", "arguments": _ARGUMENTS})
_TURN = f"<think>\n{_WORDS}\n</think>\n\n<tool_call>\n{_CALL}\n</tool_call>"


@asynccontextmanager
async def bench_server(kind: str, latency_s: float) -> AsyncIterator[ModelServer]:
    """A model server of one of `KINDS`."""
    if kind == "text":
        yield _TextServer(latency_s)
    elif kind == "in-process":
        yield _recorder(_FixedBackend(latency_s))
    else:
        async with _standin_process(latency_s) as url:
            server = _recorder(VllmBackend(url))
            try:
                yield server
            finally:
                await server.close()


def _recorder(backend: TokenBackend) -> Recorder:
    return Recorder(backend, probe_template(chatml_tokenizer()), get_parser("hermes"))


@asynccontextmanager
async def _standin_process(latency_s: float) -> AsyncIterator[str]:
    command = ["-P", "-m", "agent_loop.local_models.standin", "--say", _TURN, "--latency-s", str(latency_s)]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=quiet, stdout=asyncio.subprocess.PIPE, stderr=quiet
    )
    try:
        if process.stdout is None or not (line := await process.stdout.readline()):
            raise RuntimeError("the stand-in did not start")
        yield line.decode().strip()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class _FixedBackend:
    """Samples the same turn every time, after a fixed time."""

    def __init__(self, latency_s: float) -> None:
        tokenizer = chatml_tokenizer()
        self._ids = tokenizer.encode(_TURN, add_special_tokens=False)
        if tokenizer.eos_token_id is not None:
            self._ids.append(tokenizer.eos_token_id)
        self._latency_s = latency_s

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        await asyncio.sleep(self._latency_s)
        return Generation(list(self._ids), [-0.5] * len(self._ids), "stop")

    async def context_tokens(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


class _TextServer:
    """Chat without tokens, inside this process."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Conversation:
        return _TextConversation(self.latency_s)

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int | None:
        return None


class _TextConversation:
    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s

    def append(self, messages: Sequence[Message]) -> None:
        pass

    def restart(self, messages: Sequence[Message]) -> None:
        pass

    async def sample(self, sampling: Sampling) -> ModelTurn:
        await asyncio.sleep(self._latency_s)
        made = (ToolCallRecord("terminal", json.dumps(_ARGUMENTS)),)
        return ModelTurn(_WORDS, made, finish_reason="tool_calls", sampled_tokens=60)

    def prompt_tokens(self) -> int | None:
        return None

    def segments(self) -> list[Segment]:
        return []

    def state(self) -> dict[str, Any] | None:
        return None


HELP = "cost of the agent loop: wall time over the ideal, CPU per turn, event-loop stalls, memory"

BEAT_S = 0.01
SHORT_TURNS, LONG_TURNS = 10, 60
GROWTH_PAIRS, GROWTH_ROLLOUTS = 15, 4
"""Measurements of growth, and rollouts at once in each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size of the run."""
    parser.add_argument("--rollouts", type=at_least(1), default=256, help="rollouts at once (256)")
    parser.add_argument("--turns", type=at_least(1), default=8, help="turns of each rollout (8)")
    parser.add_argument(
        "--latency", type=at_least(0, float), default=0.5, metavar="SECONDS", help="time the model takes per turn (0.5)"
    )
    parser.add_argument(
        "--server",
        choices=KINDS,
        default="stand-in",
        help="exact tokens from the stand-in over HTTP, from a backend in this process, or no tokens (stand-in)",
    )
    parser.add_argument("--repeat", type=at_least(1), default=5, metavar="TIMES", help="times; the fastest counts (5)")


def measure(args: argparse.Namespace) -> Report:
    """Run the bench."""
    return own_process.run(_measure(args))


async def _measure(args: argparse.Namespace) -> Report:
    async with bench_server(args.server, args.latency) as server:
        await play_all(server, args.rollouts, 1)  # fills caches and opens the connections, which a run keeps
        times = [await play_all(server, args.rollouts, args.turns) for _ in range(args.repeat)]
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

    costs: dict[int, list[float]] = {SHORT_TURNS: [], LONG_TURNS: []}
    async with bench_server("in-process", 0.0) as server:
        for pair in range(GROWTH_PAIRS + 1):
            for turns in sorted(costs, reverse=bool(pair % 2)):
                waves = [await play_all(server, GROWTH_ROLLOUTS, turns) for _ in range(LONG_TURNS // turns)]
                if pair > 0:  # the first pair fills caches
                    costs[turns].append(fmean(wave.cpu_per_turn_ms for wave in waves))
    growth = median(long / short for short, long in zip(costs[SHORT_TURNS], costs[LONG_TURNS], strict=True))
    return median(costs[SHORT_TURNS]), median(costs[LONG_TURNS]), growth


@dataclass(frozen=True)
class Played:
    """What a time took."""

    wall_s: float
    cpu_per_turn_ms: float
    stall_p99_ms: float
    memory_kb: float
    cpu_taken: float
    """Share of this machine's CPU time that its host gave to others."""


async def play_all(server: ModelServer, rollouts: int, turns: int) -> Played:
    """So many rollouts at once, and what they cost."""
    gc.collect()
    late: list[float] = []
    memory_before = _resident_kb()
    stolen_before, whole_before = _cpu_ticks()
    beat = asyncio.create_task(_heartbeat(late))
    wall, cpu = time.perf_counter(), time.process_time()
    results = await asyncio.gather(*(play_rollout(server, turns) for _ in range(rollouts)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    memory = _resident_kb() - memory_before
    stolen, whole = _cpu_ticks()
    beat.cancel()
    if short := [result for result in results if len(result.turns) != turns]:
        raise RuntimeError(f"a rollout ended as {short[0].outcome}: {short[0].error}")
    late.sort()
    stall = late[int(len(late) * 0.99)] if late else 0.0
    taken = (stolen - stolen_before) / max(whole - whole_before, 1)
    return Played(wall, cpu * 1000 / (rollouts * turns), stall * 1000, max(memory, 0) / rollouts, taken)


async def play_rollout(server: ModelServer, turns: int) -> AgentResult:
    """One of them."""
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
