"""Partial credit: a training task that is not solved earns by how like the oracle's its commands are."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.records.record import AgentResult
from agent_loop.turn.tool_call import ToolCallRecord
from environments.launch import load_environment
from environments.terminal_tasks import make_task
from environments.terminal_tasks.terminal_env import likeness
from support.local_context import LocalContext


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        (["sort a.txt > b.txt"], 1.0),
        ([], 0.0),
        (["echo hello"], 0.0),
        (["sort a.txt > c.txt"], 0.75),
        (["sort a.txt > b.txt and four words more"], 8 / 12),
    ],
)
def test_likeness_counts_the_words_that_both_have(tried: list[str], expected: float) -> None:
    assert likeness(["sort a.txt > b.txt"], tried) == pytest.approx(expected)


@pytest.mark.parametrize(("split", "most"), [("train", 0.3), ("eval", 0.0)])
async def test_only_training_gives_it_and_less_than_a_solution_earns(tmp_path: Path, split: str, most: float) -> None:
    env = load_environment("terminal_tasks", ["--env.partial_credit", "0.3"])
    task = make_task("sort_lines", split, 1)
    ctx = LocalContext.create(tmp_path)
    await task.prepare(ctx)
    wrong = task.solution[0].replace("sort", "cat", 1)
    result = AgentResult([], tool_calls=[ToolCallRecord("terminal", arguments={"command": wrong})])
    await ctx.exec(wrong)
    verdict = await env.compute_reward(task, result, ctx)
    assert verdict.failures
    assert verdict.score == pytest.approx(most * 0.75)
    await ctx.exec(task.solution[0])
    assert (await env.compute_reward(task, result, ctx)).score == 1.0
