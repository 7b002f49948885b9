"""Environments whose items are a list that is known before anything is started: files, folders, benchmarks.

Training takes the items in order, and from the second time on in another order each time; `process` takes each once;
evaluation takes all of them unless `eval_items` says less.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from environments.base import HermesAgentBaseEnv, HermesAgentEnvConfig
from environments.dataset_rows import in_epochs

Item = dict[str, Any]


class ListedItemsConfig(HermesAgentEnvConfig):
    """Settings of an environment with a list of items."""

    eval_items: int = Field(default=1_000_000, ge=0, description="Items of one evaluation, from the first one on.")


class ListedItemsEnv(HermesAgentBaseEnv):
    """An environment with a list of items."""

    env_config_cls = ListedItemsConfig
    config: ListedItemsConfig

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.items = self.load_items(config)
        super().__init__(config, *args, **kwargs)
        if "total_steps" not in config.model_fields_set:  # process: each item once
            left_out = () if self._quarantine is None else self._quarantine.reasons
            count = sum(self.item_id(item) not in left_out for item in self.items)
            self.config = config.model_copy(update={"total_steps": count})
        self.handed_out = 0

    @abstractmethod
    def load_items(self, config: Any) -> list[Item]:
        """All items, each with an `id` of its own; ConfigError when they cannot be had. Called before anything else."""

    async def setup(self) -> None:
        """The items are there already: what is wrong with them is said before anything is started."""

    async def get_next_item(self) -> Item:
        self.handed_out += 1
        return in_epochs(self.items, self.handed_out - 1, self.config.seed)

    async def evaluation_items(self) -> Sequence[Item]:
        return self.items[: self.config.eval_items]

    def checkpoint_state(self) -> dict[str, Any]:
        """How many items were handed out."""
        return {"handed_out": self.handed_out}

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        self.handed_out = int(state["handed_out"])
