"""reasoning-gym: more than a hundred generators of puzzles with their own verifiers, a source of unlimited items.

Training items never end: each is drawn by its number and `env.seed`. Evaluation draws from another seed, so that it
never sees a training item of the same number. The agent answers between <answer> and </answer>, without tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from agent_loop.turn.runtime import in_thread
from environments.base import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext
from environments.benchmarks.packages import needed
from environments.errors import ConfigError
from environments.listed_items import Item
from sandbox_pool.errors import did_you_mean

INSTALL = "pip install 'hermes-rl[reasoning-gym]'"
AT_ONCE = 50
"""Items that a generator is told to have: some make all of theirs at once. The next ones come from the next seed."""
EVALUATION = 1 << 30
"""Added to the seed of evaluation items."""


class ReasoningGymConfig(HermesAgentEnvConfig):
    """Which puzzles, and how many of each in an evaluation."""

    datasets: list[str] = Field(default=[], description="Generators by name; empty: all of them.")
    options: dict[str, dict[str, Any]] = Field(
        default={}, description="Settings of generators by name, such as their difficulty."
    )
    eval_per_dataset: int = Field(default=1, ge=1, description="Evaluation items of each generator.")
    eval_items: int = Field(default=1_000_000, ge=0, description="Items of one evaluation, from the first one on.")
    enabled_toolsets: list[str] | None = Field(default=[], description="No tools, unless you name some.")


class ReasoningGymEnv(HermesAgentBaseEnv):
    """Puzzles without end."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymConfig
    config: ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig, *args: Any, **kwargs: Any) -> None:
        self.gym = needed("reasoning_gym", INSTALL)
        known = sorted(name for name in needed("reasoning_gym.factory", INSTALL).DATASETS if name != "composite")
        for name in (*config.datasets, *config.options):
            if name not in known:
                raise ConfigError(f"env.datasets: unknown generator {name!r}; {did_you_mean(name, known)}")
        self.names = config.datasets or known
        self.handed_out = 0
        self._made: dict[str, tuple[int, Any]] = {}
        super().__init__(config, *args, **kwargs)

    async def setup(self) -> None:
        """Generators are made when they are first needed."""

    async def get_next_item(self) -> Item:
        number, self.handed_out = self.handed_out, self.handed_out + 1
        return await self._item(number, self.config.seed)

    async def evaluation_items(self) -> Sequence[Item]:
        wanted = min(self.config.eval_items, len(self.names) * self.config.eval_per_dataset)
        return [await self._item(number, self.config.seed + EVALUATION) for number in range(wanted)]

    async def _item(self, number: int, seed: int) -> Item:
        """One item: the generators take turns."""
        place, which = divmod(number, len(self.names))
        name = self.names[which]
        entry = await in_thread(lambda: self._drawn(name, seed, place)[1])
        return {
            "id": f"{name}-{seed}-{place}",
            "category": name,
            "seed": seed,
            "place": place,
            "question": str(entry["question"]),
            "answer": None if entry["answer"] is None else str(entry["answer"]),
        }

    def _drawn(self, name: str, seed: int, place: int) -> tuple[Any, Any]:
        """The generator that made an item, which also judges it, and the item."""
        block, within = divmod(place, AT_ONCE)
        drawn_by = (seed + block * AT_ONCE) % 2**32
        known = self._made.get(name)
        if known is None or known[0] != drawn_by:
            options = {**self.config.options.get(name, {}), "seed": drawn_by, "size": AT_ONCE}
            try:
                known = (drawn_by, self.gym.create_dataset(name, **options))
            except (TypeError, AssertionError, ValueError) as error:
                raise ConfigError(f"env.options.{name}: {error}") from error
            self._made[name] = known  # the last one of each name: training goes on from there
        return known[1], known[1][within]

    def format_prompt(self, item: Item) -> list[dict[str, Any]]:
        prompts = needed("reasoning_gym.utils", INSTALL).SYSTEM_PROMPTS
        return [{"role": "system", "content": prompts["default"]}, {"role": "user", "content": item["question"]}]

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        """The generator's own verifier, which knows more than one right answer."""
        answer = needed("reasoning_gym.utils", INSTALL).extract_answer(result.final_answer)
        if answer is None:
            return 0.0

        def score() -> float:
            generator, entry = self._drawn(item["category"], item["seed"], item["place"])
            return float(generator.score_answer(answer, entry))

        return float(await in_thread(score))

    def solution(self, item: Item) -> Sequence[Mapping[str, Any]]:
        return [] if item["answer"] is None else [{"content": f"<answer>{item['answer']}</answer>"}]

    def checkpoint_state(self) -> dict[str, Any]:
        """How many items were handed out."""
        return {"handed_out": self.handed_out}

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        self.handed_out = int(state["handed_out"])


if __name__ == "__main__":
    ReasoningGymEnv.cli()
