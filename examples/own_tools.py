"""Own tools: an agent that works on your own functions, without any sandbox; exact tokens all the same.

python examples/own_tools.py                                          # a scripted model
python examples/own_tools.py http://127.0.0.1:9001 Qwen/Qwen3-8B      # vLLM, SGLang or llama.cpp
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from hermes_rl import AgentResult, HermesAgentLoop, Limits, PolicyRequest, ServerConfig, open_model

TASK = "A customer wants 3 kg of apples and has 10 euros. Look the price up, and sell them if the money is enough."


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """An OpenAI tool schema; each parameter is required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


PRICES = {"apples": 2.5, "cheese": 14.0}
TOOLS = [
    tool("price", "Price of one kilogram in euros.", goods="string"),
    tool("sell", "Sell goods to the customer.", goods="string", kilograms="number"),
]


class Shop:
    """What the tools work on: one for each rollout."""

    def __init__(self) -> None:
        self.sold: list[tuple[str, float]] = []

    async def handle(self, name: str, arguments: dict[str, Any], task_id: str) -> dict[str, Any]:
        """Called with arguments that fit the schema. An `error` in the answer is a failed call; the model reads it."""
        goods = arguments["goods"]
        if goods not in PRICES:
            return {"error": f"there are no {goods}"}
        if name == "price":
            return {"euros": PRICES[goods]}
        self.sold.append((goods, float(arguments["kilograms"])))
        return {"sold": True}

    def score(self) -> float:
        return float(self.sold == [("apples", 3.0)])


def scripted(request: PolicyRequest) -> str:
    """The model that plays when no server is given: one turn for each number of tool results so far."""
    turns: list[tuple[str, dict[str, Any]]] = [
        ("price", {"goods": "apples"}),
        ("sell", {"goods": "apples", "kilograms": 3}),
    ]
    if request.results == len(turns):
        return "Sold."
    name, arguments = turns[request.results]
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def rollout(server: ServerConfig, tokenizer_name: str = "") -> tuple[AgentResult, float]:
    shop = Shop()
    async with open_model(server, tokenizer_name=tokenizer_name) as model:
        loop = HermesAgentLoop(model, TOOLS, tool_handler=shop.handle, limits=Limits(max_turns=8))
        result = await loop.run([{"role": "user", "content": TASK}])
    return result, shop.score()


def main(*words: str) -> tuple[AgentResult, float]:
    if words:
        server = ServerConfig(base_url=words[0], model_name=words[1])
    else:
        server = ServerConfig(server_type="standin", options={"policy": scripted})
    result, score = asyncio.run(rollout(server, words[1] if words else ""))
    print(f"{result.outcome}: {result.turns_used} turns, {len(result.tool_calls)} tool calls, score {score}")
    print(f"{sum(len(segment.tokens) for segment in result.segments)} tokens for a trainer")
    return result, score


if __name__ == "__main__":
    main(*sys.argv[1:])
