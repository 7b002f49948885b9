"""Items of an environment as rows of a dataset for verl."""

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
    """Rows of a dataset: `pandas.DataFrame(verl_rows("terminal_tasks", 512)).to_parquet("train.parquet")`."""
    env = load_environment(environment, settings)

    async def items() -> list[Any]:
        await env.setup()
        found = [await env.next_item() for _ in range(count)]
        return [item for item in found if item is not None]

    return [
        {
            "data_source": env.name,
            "agent_name": agent,
            "prompt": first_messages(env.config, env.format_prompt(item)),
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "item": json.dumps(env.item_to_json(item))},
        }
        for index, item in enumerate(asyncio.run(items()))
    ]
