"""Two tools of your own and a judge: a stand-in here, a server of yours with `--env.judge.base_url`.

python examples/judge.py process --env.total_steps 3 --env.group_size 4 --out runs/judge
"""

from typing import Any

import hermes_rl as rl

PRICES = {"apples": 2.5, "cheese": 14.0, "bread": 3.2}


@rl.tool
async def price(goods: str) -> float:
    """Price of one kilogram in euros."""
    if goods not in PRICES:
        raise rl.ToolFailure(f"there are no {goods}")
    return PRICES[goods]


@rl.tool
def sell(ctx: rl.SandboxContext, goods: str, kilograms: float) -> str:
    """Sell goods to the customer."""
    ctx.state["sold"] = (goods, kilograms)
    return "sold"


class ShopConfig(rl.HermesAgentEnvConfig):
    judge: rl.JudgeConfig | None = rl.JudgeConfig(server_type="standin")


class ShopEnv(rl.HermesAgentBaseEnv):
    name, env_config_cls = "judge", ShopConfig

    async def setup(self) -> None:
        self.goods = iter(list(PRICES) * 1000)

    async def get_next_item(self) -> Any:
        return {"id": (goods := next(self.goods)), "goods": goods}

    def tools(self, item: Any) -> list[rl.Tool]:
        return [price, sell]

    def format_prompt(self, item: Any) -> str:
        return f"Sell the customer 2 kg of {item['goods']}, and tell them what it costs."

    async def compute_reward(self, item: Any, result: rl.AgentResult, ctx: rl.ToolContext) -> float | rl.Verdict:
        if ctx.state.get("sold") != (item["goods"], 2.0):
            return 0.0
        return await ctx.judge(f"Friendly, and names {2 * PRICES[item['goods']]:g} euros.", answer=result.final_answer)

    def solution(self, item: Any) -> list[dict[str, Any]]:
        goods, euros = item["goods"], 2 * PRICES[item["goods"]]
        sale = {"name": "sell", "arguments": {"goods": goods, "kilograms": 2}}
        return [{"name": "price", "arguments": {"goods": goods}}, sale, {"content": f"That is {euros:g} euros."}]


if __name__ == "__main__":
    ShopEnv.cli()
