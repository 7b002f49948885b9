"""Tinker's cookbook: its own loops (`tinker_cookbook.rl.train`) on any of our environments.

The cookbook samples and trains. Each of its episodes is one rollout of ours: what our loop would ask a model is the
observation, token for token, and what the cookbook samples is the answer. It keeps the logprobs to itself, so in our
records they are 0.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import chz
import tinker
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer

from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import Sampling
from environments.rollouts.samples import Sample
from environments.trainers.item_rows import taken_items
from environments.trainers.one_by_one import opened

Asked = tuple[Any, list[int]]
"""What the cookbook calls an observation, and the tokens that end an answer to it."""


class _Bridge:
    """Stands where a rollout has its model: passes on what it is asked, and waits for what the cookbook samples."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.sampled: asyncio.Queue[Generation] = asyncio.Queue()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        self.asked.put_nowait((tinker.ModelInput.from_ints(list(prompt_ids)), list(stop_ids)))
        return await self.sampled.get()

    async def context_tokens(self) -> int | None:
        """The cookbook does not tell."""
        return None

    async def close(self) -> None:
        """Nothing is held."""


class HermesEnv(Env):  # type: ignore[misc]
    """One episode, which is one rollout. What infrastructure ends is an error of the episode, never a reward."""

    def __init__(self, item: str, environment: str, settings: Sequence[str], model: str) -> None:
        self._item, self._environment, self._model = item, environment, model
        # A second try would be an episode of its own, and the cookbook has to start that.
        self._settings = [*settings, "--env.rollout_tries", "1"]
        self._bridge = _Bridge()
        self._rollout: asyncio.Task[list[Sample]] | None = None

    async def initial_observation(self) -> Asked:
        tokenizer = get_tokenizer(self._model)
        own = await opened(self._environment, self._settings, tokenizer, one_sequence=False)
        self._rollout = asyncio.create_task(own.roll_out(self._item, self._bridge))
        asked = await self._next()
        if asked is None:
            raise RuntimeError("the rollout ended before the model was asked anything")
        return asked

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        ended = str((extra or {}).get("stop_reason", "stop"))
        self._bridge.sampled.put_nowait(Generation(list(action), [0.0] * len(action), ended, None))
        if asked := await self._next():
            return StepResult(0.0, False, *asked)
        assert self._rollout is not None
        [last] = [sample for sample in self._rollout.result() if sample.last]
        parts = {f"reward/{name}": value for name, value in last.record.reward_components.items()}
        return StepResult(last.reward, True, tinker.ModelInput.empty(), [], metrics=parts)

    async def _next(self) -> Asked | None:
        """What the rollout asks next; None when it has ended, RolloutLost when infrastructure ended it."""
        assert self._rollout is not None
        asking = asyncio.create_task(self._bridge.asked.get())
        await asyncio.wait({asking, self._rollout}, return_when="FIRST_COMPLETED")
        if asking.done():
            return asking.result()
        asking.cancel()
        self._rollout.result()
        return None

    async def stop(self) -> None:
        """End a rollout that nobody answers any more; its slot is given back."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)


@dataclass
class HermesGroup(EnvGroupBuilder):  # type: ignore[misc]
    """The episodes of one item. They share what `prepare` made."""

    item: str
    environment: str
    settings: list[str]
    model: str
    size: int
    envs: list[HermesEnv] = field(default_factory=list, repr=False)

    async def make_envs(self) -> Sequence[HermesEnv]:
        self.envs = [HermesEnv(self.item, self.environment, self.settings, self.model) for _ in range(self.size)]
        return self.envs

    async def cleanup(self) -> None:
        for env in self.envs:
            await env.stop()

    def logging_tags(self) -> list[str]:
        return [self.environment.replace("/", "_")]


class HermesDataset(RLDataset):  # type: ignore[misc]
    def __init__(self, groups: Sequence[HermesGroup], groups_per_batch: int) -> None:
        self._groups, self._size = groups, groups_per_batch

    def get_batch(self, index: int) -> Sequence[HermesGroup]:
        return self._groups[index * self._size : (index + 1) * self._size]

    def __len__(self) -> int:
        return len(self._groups) // self._size


@chz.chz
class HermesDatasetBuilder(RLDatasetBuilder):  # type: ignore[misc]
    """`dataset_builder=HermesDatasetBuilder(environment="terminal_tasks", model_name=...)` of the loop's Config."""

    environment: str
    """YAML file or shipped config of hermes-rl."""
    model_name: str
    settings: list[str] = chz.field(default_factory=list)
    """As on the command line: ["--env.levels", "[0]"]."""
    group_size: int = 8
    groups_per_batch: int = 16
    batches: int = 100

    async def __call__(self) -> tuple[HermesDataset, None]:
        count = self.groups_per_batch * self.batches
        found = await asyncio.to_thread(taken_items, self.environment, count, self.settings)
        groups = [
            HermesGroup(item, self.environment, self.settings, self.model_name, self.group_size) for _, item in found
        ]
        return HermesDataset(groups, self.groups_per_batch), None
