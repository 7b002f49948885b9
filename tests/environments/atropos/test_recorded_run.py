"""What goes to Atropos is, to the bit, what it was when this run was recorded, however rollouts are made.

Recorded at d93ea8f, before `Rollouts`. A change that is meant to alter these groups records them again:
`PYTHONPATH=tests .venv/bin/python tests/environments/atropos/test_recorded_run.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

from agent_loop.local_models.standin import PolicyRequest
from agent_loop.local_models.standin.policies import call
from environments.base import Score
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, standin_model

RECORDED = Path(__file__).with_name("recorded_run.json")


def by_seed(request: PolicyRequest) -> str:
    """Three turns with results long enough to be truncated; what is written follows from the seed of the request."""
    if request.results >= 3:
        return "Done."
    answer = int(request.body["seed"]) % 3
    return call("terminal", {"command": f"echo {answer} > answer.txt; seq {300 + answer}"})


class PointsPerTurn(NumberEnv):
    """Items with an odd number give points per turn as well."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
        answer = int((await ctx.terminal("cat answer.txt"))["output"])
        return Score(answer / 2, [0.5 * turn for turn in range(len(result.turns))] if item["number"] % 2 else ())


async def delivered() -> list[dict[str, Any]]:
    """The groups of three items as they go to run-api."""
    pool = DirectoryPool()
    sizes = {"max_token_length": 2000, "max_tokens_per_turn": 200, "max_agent_turns": 8, "group_size": 4}
    tools = {"enabled_toolsets": ["terminal"], "disabled_toolsets": ["process"], "tools_in_prompt": False}
    groups: list[dict[str, Any]] = []
    async with standin_model(by_seed, split_share=0.0) as (model, _):
        env = PointsPerTurn(pool, model, **sizes, **tools, seeded_sampling=True)
        for number in range(3):
            made, _ = await env.collect_trajectories({"id": f"n{number}", "number": number})
            groups += made or []
    pool.close()
    return groups


def digests(groups: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Every field of every group by a hash of its JSON; of messages what is said, since ids of calls are drawn."""
    kept = ("tokens", "masks", "inference_logprobs", "scores", "advantages", "said")
    said = [[[(m["role"], m["content"]) for m in row] for row in group["messages"]] for group in groups]
    return [
        {
            **{name: hashlib.sha256(json.dumps(group[name]).encode()).hexdigest()[:16] for name in kept},
            "sizes": str([len(row) for row in group["tokens"]]),
            "segments": str(group["generation_params"]["segments"]),
        }
        for group in ({**group, "said": rows} for group, rows in zip(groups, said, strict=True))
    ]


async def test_the_groups_of_a_recorded_run_are_the_same_to_the_bit() -> None:
    groups = await delivered()
    assert any(segment for group in groups for segment in group["generation_params"]["segments"]), "nothing truncated"
    assert {group["advantages"] is None for group in groups} == {False}
    assert digests(groups) == json.loads(RECORDED.read_text())


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(digests(asyncio.run(delivered())), indent=1) + "\n")
