"""A file task: sort a table of prices. Shows `prepare`, a reward that reads files, and part marks.

python examples/file_task.py process --env.total_steps 2 --env.group_size 4 --out runs/file_task
"""

from __future__ import annotations

import random
from typing import Any

from hermes_rl import AgentResult, HermesAgentBaseEnv, SandboxContext, Score, ToolContext

GOODS = ("apples", "bread", "cheese", "dates", "eggs", "flour", "grapes", "honey")
Item = dict[str, Any]


class FileTaskEnv(HermesAgentBaseEnv):
    name = "file_task"

    async def setup(self) -> None:
        self.number = 0

    async def get_next_item(self) -> Item:
        self.number += 1
        draw = random.Random(self.number)
        prices = {goods: draw.randrange(100, 999) for goods in draw.sample(GOODS, 5)}
        return {"id": f"prices-{self.number}", "prices": prices}

    async def prepare(self, item: Item, ctx: SandboxContext) -> None:
        """Runs once per group; each rollout starts from a copy."""
        await ctx.write_file("prices.csv", "".join(f"{goods},{price}\n" for goods, price in item["prices"].items()))

    def format_prompt(self, item: Item) -> str:
        return "Sort prices.csv by price, cheapest first, into sorted.csv. Leave prices.csv as it is."

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> Score:
        """The expected order is worked out here, on the host: nothing in the sandbox says what is right."""
        before = [f"{goods},{price}" for goods, price in item["prices"].items()]
        wanted = sorted(before, key=lambda line: int(line.split(",")[1]))
        is_sorted = (await ctx.exec("cat sorted.csv")).output.splitlines() == wanted
        is_kept = (await ctx.exec("cat prices.csv")).output.splitlines() == before
        parts = {"sorted": 0.8 * is_sorted, "kept": 0.2 * (is_sorted and is_kept)}
        return Score(sum(parts.values()), components=parts)

    def solution(self, item: Item) -> list[str]:
        """What the stand-in plays, with mistakes; a real model never sees it."""
        return ["sort -t, -k2 -n prices.csv > sorted.csv"]


if __name__ == "__main__":
    FileTaskEnv.cli()
