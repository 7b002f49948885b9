"""Every local problem: the reference solution passes, the starting point does not, and no cheat does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from environments.code_tasks import CodeTask, load_tasks
from environments.code_tasks.datasets import Problem, local_problems, problem_task
from environments.code_tasks.hidden_tests import CaseTests
from environments.scoring.verification import Verdict
from support.code_cheats import CHEATS, cheat
from support.local_context import LocalContext

TASKS = load_tasks("local")
EASY = [task for task in TASKS if not task.files or task.kind == "fix"][:2]


async def solved(task: CodeTask, root: Path) -> LocalContext:
    ctx = LocalContext.create(root)
    await task.prepare(ctx)
    for command in task.solution:
        result = await ctx.exec(command)
        assert result.exit_code == 0
    return ctx


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
async def test_the_reference_passes_and_the_starting_point_does_not(task: CodeTask, tmp_path: Path) -> None:
    ctx = LocalContext.create(tmp_path / "start")
    await task.prepare(ctx)
    start = await dataclasses.replace(task, timeout_s=3.0).verify(ctx)
    assert start.score == 0.0
    assert start.failures
    assert await task.verify(await solved(task, tmp_path / "solved")) == Verdict(1.0)


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("task", EASY, ids=lambda task: task.id)
async def test_no_cheat_passes(task: CodeTask, name: str, tmp_path: Path) -> None:
    assert isinstance(task.tests, CaseTests)
    entry_point = task.tests.cases[0][0].target
    ctx = LocalContext.create(tmp_path)
    await ctx.write_file(task.module, cheat(name, entry_point))
    assert (await task.verify(ctx)).score == 0.0


async def test_an_answer_that_returns_and_raises_at_once_is_no_answer(tmp_path: Path) -> None:
    """A solution without the checks that the task asks for, and claims of both kinds for every question."""
    task = next(task for task in TASKS if task.id == "code:local:parse_duration")
    ctx = LocalContext.create(tmp_path)
    forged = """
import re, sys

def parse(text):
    return sum(int(n) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[u] for n, u in re.findall(r"(\\d+)([dhms])", text))

def answer(module, objects, step):
    returned = {"returns": parse(step["args"][0]), "args_after": step["args"]}
    return {**returned, "raises": ["ValueError"], "message": ""}

sys.modules["__main__"].play = answer
"""
    await ctx.write_file(task.module, forged.encode())
    verdict = await task.verify(ctx)
    assert verdict.score == 0.0
    assert "answers to other questions" in verdict.failures[0]


async def test_a_solution_that_never_ends_is_stopped_by_the_cpu_time_it_uses(tmp_path: Path) -> None:
    task = next(task for task in TASKS if task.id == "code:local:parse_duration")
    ctx = LocalContext.create(tmp_path)
    await ctx.write_file(task.module, b"def parse(text):\n    while True: pass\n")
    verdict = await dataclasses.replace(task, timeout_s=600.0).verify(ctx)
    assert "ends without answers" in verdict.failures[0]


async def test_what_lies_around_in_the_workspace_does_not_disturb_the_solution(tmp_path: Path) -> None:
    task = TASKS[0]
    ctx = await solved(task, tmp_path)
    for name in ("json.py", "sitecustomize.py", "importlib.py", ".verify-x/solver.py"):
        await ctx.write_file(name, b"raise SystemExit('shadowed')\n")
    assert (await task.verify(ctx)).score == 1.0


async def test_bytecode_left_in_the_workspace_is_not_believed(tmp_path: Path) -> None:
    """A cache of the right solution beside a wrong source of the same size and time, as Python would accept it."""
    task = next(task for task in TASKS if task.id == "code:local:fix_leap_year")
    ctx = await solved(task, tmp_path)
    swap = (
        f"python3 -m compileall -q . && touch -r {task.module} .time && "
        f"sed -i 's/400 == 0/400 == 7/' {task.module} && touch -r .time {task.module}"
    )
    assert (await ctx.exec(swap)).exit_code == 0
    assert (await task.verify(ctx)).score == 0.0


async def test_a_solution_that_never_ends_is_named_as_such(tmp_path: Path) -> None:
    task = dataclasses.replace(TASKS[0], timeout_s=0.7)
    ctx = LocalContext.create(tmp_path)
    await ctx.write_file(task.module, b"while True: pass\n")
    verdict = await task.verify(ctx)
    assert "takes longer than 0.7 s" in verdict.failures[0]


async def test_nothing_the_sandbox_sees_holds_an_expected_value(tmp_path: Path) -> None:
    """A solution that dumps all it is given shows arguments, and none of the answers."""
    task = next(task for task in TASKS if task.id == "code:local:roman_numerals")
    ctx = LocalContext.create(tmp_path)
    spy = """
import sys
main = sys.modules["__main__"]
real = main.play
def play(module, objects, step):
    open("seen", "a").write(repr(step))
    return real(module, objects, step)
main.play = play
open("seen", "w").write(repr(sys.argv) + open("/proc/self/cmdline").read())
"""
    await ctx.write_file(task.module, spy.encode())
    await task.verify(ctx)
    seen = (await ctx.read_file("seen")).decode()
    assert "1994" in seen
    assert "MMMCMXCIX" not in seen


def test_the_set_is_large_varied_and_split() -> None:
    problems = local_problems()
    assert len(problems) >= 30
    assert {problem.kind for problem in problems} == {"write", "fix"}
    assert {problem.split for problem in problems} == {"train", "eval"}
    assert len({problem.category for problem in problems}) >= 6
    assert len({problem.name for problem in problems}) == len(problems)
    assert len(load_tasks("local", "train")) + len(load_tasks("local", "eval")) == len(problems)


def test_a_problem_to_fix_needs_its_broken_version() -> None:
    problem = Problem.model_validate({**local_problems()[0].model_dump(), "kind": "fix", "starter": None})
    with pytest.raises(ValueError, match="no starter"):
        problem_task(problem)
