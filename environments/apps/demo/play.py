"""The demo itself: play, store, show, verify."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agent_loop.records.against import Confirmation, confirm
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import Report, verify
from environments.apps.demo.players import Player, demo_tasks, real_player, scripted_players
from environments.apps.demo.table import Board, final_table, pool_line, verdict_lines
from environments.config.settings import ServerConfig
from environments.runs.report.html_page import build_report
from environments.terminal_tasks import TerminalTask
from environments.terminal_tasks.terminal_env import TerminalTasksConfig
from sandbox_pool import SlotPool

CONFIRMED_POSITIONS = 40


@dataclass(frozen=True)
class DemoPlan:
    """What the demo is asked to do."""

    config: TerminalTasksConfig
    server: ServerConfig
    out: Path
    tasks: int
    with_model: bool = True
    model_s: float = 30.0
    """The real model starts no new group after so long: a slow machine sees fewer rollouts, not a longer demo."""


async def run_demo(plan: DemoPlan, console: Console) -> int:
    """Everything; exit code 1 when a stored rollout is not exact."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(SlotPool.from_config(plan.config.pool))
        tasks = demo_tasks(plan.config, plan.tasks)
        players = await scripted_players(stack, plan.config, pool, tasks)
        if plan.with_model:
            real = await real_player(stack, plan.config, plan.server, pool)
            if isinstance(real, str):
                console.print(f"real model: {real}; going on with the scripted policies", markup=False)
            else:
                players.insert(0, real)
        with Board(console, players, plan.tasks, plan.config.group_size) as board:
            records = await _play(players, tasks, board, plan.model_s)
        rollouts, page = await asyncio.to_thread(_store, plan.out, records)
        console.print(final_table(records))
        console.print(pool_line(pool.metrics.summary(), records))
        report = verify(rollouts.read_bytes().splitlines())
        confirmation = await _ask_again(players, records)
        for line in verdict_lines(report, confirmation, rollouts, page):
            console.print(line, markup=False)
        return 0 if _all_good(report, confirmation, records) else 1


async def _play(players: list[Player], tasks: list[TerminalTask], board: Board, model_s: float) -> list[RolloutRecord]:
    """All policies at the same time; each plays its groups a few at a time."""
    began = time.monotonic()

    async def play(player: Player) -> list[RolloutRecord]:
        at_once = asyncio.Semaphore(player.env.config.groups_at_once)

        async def group(index: int, task: TerminalTask) -> list[RolloutRecord]:
            async with at_once:
                if player.scorer is not None and time.monotonic() - began > model_s:
                    return []
                result = await player.env.run_group(task, index, player.env.config.group_size, tag=player.name)
            board.group_done(player, list(result.records()))
            return list(result.records())

        return [r for part in await asyncio.gather(*(group(i, t) for i, t in enumerate(tasks))) for r in part]

    return [record for part in await asyncio.gather(*(play(player) for player in players)) for record in part]


def _store(out: Path, records: list[RolloutRecord]) -> tuple[Path, Path]:
    out.mkdir(parents=True, exist_ok=True)
    rollouts, page = out / "rollouts.jsonl", out / "report.html"
    lines = [record.to_json() + b"\n" for record in records]
    rollouts.write_bytes(b"".join(lines))
    # The page takes its records apart, so it gets copies.
    page.write_text(build_report((RolloutRecord.from_json(line) for line in lines), title="hermes-rl demo"), "utf-8")
    return rollouts, page


async def _ask_again(players: list[Player], records: list[RolloutRecord]) -> Confirmation | None:
    """The real model's own word on what it sampled."""
    for player in players:
        if player.scorer is not None:
            policy = player.env.policy_name
            own = [(line, r) for line, r in enumerate(records, 1) if r.policy == policy and r.segments]
            if own:
                return await confirm(own, player.scorer, positions=CONFIRMED_POSITIONS)
    return None


def _all_good(report: Report, confirmation: Confirmation | None, records: list[RolloutRecord]) -> bool:
    confirmed = confirmation is None or confirmation.violation is None
    return report.ok and confirmed and any(record.trainable for record in records)
