"""`validate` finds what is wrong with items, names it, and accuses nobody else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest

from environments.base import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, SandboxContext, ToolContext
from environments.errors import ConfigError
from environments.rollouts.quarantine import quarantine_text, read_quarantine
from environments.runs.progress import PlainProgress
from environments.runs.validation import Observation, Validator, judge, store
from sandbox_pool import SlotPool
from support.env_tasks import NumberEnv

FLAKY, NO_OP, UNSOLVED, ORDERED, HACKABLE = "t03", "t08", "t13", "t18", "t23"
PLANTED = {
    FLAKY: "flaky",
    NO_OP: "doing nothing passes",
    UNSOLVED: "the solution fails",
    ORDERED: "depends on the order",
    HACKABLE: "hackable: forge",
}
CHECKED_LATER = "t05"
"""Once this one was verified, ORDERED fails."""


class PlantedEnv(HermesAgentBaseEnv):
    """Thirty items in three kinds: a file with a number, a program that prints it, a function that returns it."""

    name = "planted"
    numbers: ClassVar[Sequence[int]] = range(30)

    async def setup(self) -> None:
        self.ids = iter(f"t{number:02}" for number in self.numbers)
        self.verified: set[str] = set()

    async def get_next_item(self) -> str | None:
        return next(self.ids, None)

    def item_id(self, item: str) -> str:
        return item

    def format_prompt(self, item: str) -> str:
        return f"Make {item}."

    async def prepare(self, item: str, ctx: SandboxContext) -> None:
        await ctx.write_file("notes.txt", f"{item}\n")
        if item == NO_OP:
            await ctx.write_file("answer.txt", f"{item}\n")
        if item == HACKABLE:
            await ctx.write_file("tests/test_answer.py", f"assert open('answer.txt').read() == '{item}\\n'\n")

    def solution(self, item: str) -> Sequence[str]:
        if item == UNSOLVED:
            return ["echo wrong > answer.txt"]
        kinds = {
            "file": f"echo {item} > answer.txt",
            "program": f"printf '#!/bin/sh\\necho {item}\\n' > answer.sh && chmod +x answer.sh",
            "function": f"printf 'def answer():\\n    return \"{item}\"\\n' > answer.py",
        }
        return [kinds[self.kind(item)]]

    def kind(self, item: str) -> str:
        return "file" if item in PLANTED else ("file", "program", "function")[int(item[1:]) % 3]

    async def compute_reward(self, item: str, result: AgentResult, ctx: ToolContext) -> float:
        before, _ = set(self.verified), self.verified.add(item)
        if item == HACKABLE:
            return float((await ctx.exec("python3 tests/test_answer.py")).exit_code == 0)
        if self.kind(item) == "program":
            return float((await ctx.exec("./answer.sh")).output == f"{item}\n")
        if self.kind(item) == "function":
            [answer] = await ctx.ask_python("answer.py", [("answer", ())])
            return float(answer.returned == item)
        right = await ctx.read_file("answer.txt") == f"{item}\n".encode()
        if item == FLAKY:
            right = right and random.random() < 0.5
        if item == ORDERED:
            right = right and CHECKED_LATER not in before
        return float(right)


class FewPlantedEnv(PlantedEnv):
    numbers = (1, 2, 3, 5, 8, 13, 18, 23)


@pytest.mark.parametrize("kind", [FewPlantedEnv, pytest.param(PlantedEnv, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
async def test_five_planted_faults_are_found_and_nobody_else_is_accused(kind: type[PlantedEnv], tmp_path: Path) -> None:
    count = len(kind.numbers)
    random.seed(22)
    config = HermesAgentEnvConfig()
    async with SlotPool.from_config(config.pool) as pool:
        validator = Validator(lambda: kind(config, pool=pool), tmp_path / "observations.jsonl", at_once=2)
        with PlainProgress((tmp_path / "progress").open("w")) as progress:
            found = await validator.run(progress)
    assert len(found.findings) == count
    assert found.accused.keys() == PLANTED.keys(), found.accused
    assert {item: reason for item, reason in found.accused.items() if not reason.startswith(PLANTED[item])} == {}
    assert found.rate("flaky")[:2] == (1, count)
    assert read_quarantine(store(found, tmp_path)).keys() == PLANTED.keys()
    # A second start has everything already: it would fail without a pool.
    again = Validator(lambda: kind(config), tmp_path / "observations.jsonl", at_once=2)
    with PlainProgress((tmp_path / "progress").open("w")) as progress:
        assert await again.run(progress) == found


def seen(**fields: Any) -> Observation:
    return Observation("x", **{"round": 0, "solution": 1.0, "no_op": 0.0, "repeats": [1.0, 1.0]} | fields)


def test_what_slots_did_accuses_nobody() -> None:
    lost = Observation("x", 0, lost="SandboxLost: gone")
    assert judge("x", [lost], 1.0).faults == ()
    assert judge("x", [seen(), Observation("x", 1, lost="SandboxLost: gone")], 1.0).faults == ()


def test_changes_between_rounds_are_flaky_unless_the_item_is_steady_alone() -> None:
    changing = [seen(), seen(round=1, solution=0.0)]
    steady = [seen(round=-1), seen(round=-2)]
    assert judge("x", changing, 1.0).reason.startswith("flaky: the solution was scored 1 0")
    assert judge("x", [*changing, *steady], 1.0).reason.startswith("depends on the order")
    assert judge("x", [*changing, seen(round=-1), seen(round=-2, solution=0.0)], 1.0).reason.startswith("flaky")


def test_an_item_without_a_known_solution_is_judged_by_the_rest() -> None:
    assert judge("x", [seen(solution=None)], 1.0).faults == ()
    assert judge("x", [seen(solution=None, no_op=1.0)], 1.0).faults == ("doing nothing passes",)


async def test_training_and_evaluation_leave_quarantined_items_out(tmp_path: Path) -> None:
    listed = tmp_path / "quarantine.json"
    listed.write_bytes(quarantine_text("numbers", {"n0": "flaky", "n2": "flaky", "e1": "flaky"}))
    env = NumberEnv(quarantine=listed, eval_items=3)
    assert [(await env.next_item())["id"] for _ in range(3)] == ["n1", "n3", "n4"]
    assert [item["id"] for item in await env.chosen_evaluation_items()] == ["e0", "e2"]
    listed.write_bytes(orjson.dumps({"items": []}))
    with pytest.raises(ConfigError, match="is not a list that"):
        NumberEnv(quarantine=listed)
