"""Environments without a model: their tokens are numbers that name group and row, so that each can be traced."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from environments.atropos.atropos_env import AtroposEnv, AtroposEnvConfig

GROUP_IDS = itertools.count(1)


def numbered_group(number: int, size: int = 4, length: int = 6, **more: Any) -> dict[str, Any]:
    """Row r of group n is [n, r, 2, 3, ...]: the first two tokens are prompt, the rest is trained."""
    rows = [[number, row, *range(2, length)] for row in range(size)]
    return {
        "tokens": rows,
        "masks": [[-100, -100, *row[2:]] for row in rows],
        "inference_logprobs": [[1.0, 1.0, *([-0.5] * (length - 2))] for _ in rows],
        "scores": [float(row) for row in range(size)],
        "generation_params": {"group_id": f"g{number}"},
        **more,
    }


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that other tasks bring about."""
    while not condition():  # noqa: ASYNC110 - the tests look from outside at what has no event
        await asyncio.sleep(0.01)


class NumberedEnv(AtroposEnv):
    """Each item is one number; a group takes `seconds`."""

    name = "numbered"

    def __init__(self, seconds: float = 0.0, items: int | None = None, length: int = 6, **config: Any) -> None:
        settings = {"wandb_name": self.name, "group_size": 4, "total_steps": -1, "status_poll_s": 0.02} | config
        super().__init__(AtroposEnvConfig(**settings), [])
        self.seconds = seconds
        self.left = items
        self.length = length
        self.started: list[int] = []
        self.finished: list[int] = []
        self.cancelled: list[int] = []
        self.evaluations = 0
        self.shut = 0

    async def setup(self) -> None:
        self.max_num_workers = 8

    async def shut_down(self) -> None:
        self.shut += 1

    async def get_next_item(self) -> int | None:
        if self.left is not None:
            if self.left == 0:
                return None
            self.left -= 1
        return next(GROUP_IDS)

    async def collect_trajectories(self, item: int) -> tuple[dict[str, Any] | None, list[Any]]:
        self.started.append(item)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        self.finished.append(item)
        return numbered_group(item, self.config.group_size, self.length), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.evaluations += 1
        await asyncio.sleep(0.2)
