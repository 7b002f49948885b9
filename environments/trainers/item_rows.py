"""Items of an environment as rows of a dataset, for trainers that read files: verl, SkyRL, slime, NeMo Gym.

pandas.DataFrame(verl_rows("terminal_tasks", 512)).to_parquet("train.parquet")
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from environments.launch import load_environment
from environments.rollouts.planning import first_messages


def verl_rows(
    environment: str, count: int, settings: Sequence[str] = (), agent: str = "hermes"
) -> list[dict[str, Any]]:
    """For verl, whose agent loop has the name `agent`."""
    return [
        {
            "data_source": environment,
            "agent_name": agent,
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "item": item},
        }
        for index, (prompt, item) in enumerate(taken_items(environment, count, settings))
    ]


def skyrl_rows(environment: str, count: int, settings: Sequence[str] = ()) -> list[dict[str, Any]]:
    """For SkyRL and `SkyrlGenerator`."""
    found = taken_items(environment, count, settings)
    return [{"prompt": prompt, "env_class": "hermes", "item": item} for prompt, item in found]


def slime_rows(environment: str, count: int, settings: Sequence[str] = ()) -> list[dict[str, Any]]:
    """For slime and miles: lines of JSON, with `--input-key prompt --metadata-key metadata`."""
    found = taken_items(environment, count, settings)
    return [{"prompt": prompt, "metadata": {"item": item}} for prompt, item in found]


def nemo_gym_rows(
    environment: str, count: int, settings: Sequence[str] = (), agent: str = "hermes"
) -> list[dict[str, Any]]:
    """For NeMo Gym: lines of JSON for the agent server of this name, which is `offer --to nemo-gym`."""
    reference = {"type": "responses_api_agents", "name": agent}
    return [
        {"responses_create_params": {"input": prompt}, "item": item, "agent_ref": reference}
        for prompt, item in taken_items(environment, count, settings)
    ]


def taken_items(environment: str, count: int, settings: Sequence[str]) -> list[tuple[list[dict[str, Any]], str]]:
    """(first messages, the item as text) of the next items. Blocking."""
    env = load_environment(environment, settings)

    async def take() -> list[Any]:
        await env.setup()
        found = [await env.next_item() for _ in range(count)]
        return [item for item in found if item is not None]

    return [
        (first_messages(env.config, env.format_prompt(item)), json.dumps(env.item_to_json(item)))
        for item in asyncio.run(take())
    ]
