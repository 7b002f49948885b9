"""TRL's `environment_factory`: our slots, tools and frozen verification where TRL samples by itself."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

from agent_loop.model.contract import ToolSchema
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.planning import first_messages
from environments.rollouts.rollouts import Rollouts
from environments.rollouts.tool_session import ToolSession

TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


def trl_rows(rollouts: BlockingRollouts, count: int) -> list[dict[str, Any]]:
    """Rows of a dataset for `trl_environment`: `Dataset.from_list(trl_rows(rollouts, 512))`."""
    env = rollouts.rollouts.env
    items = (item for item, _ in zip(rollouts.items(), range(count), strict=False))
    return [
        {
            "prompt": first_messages(env.config, env.format_prompt(item)),
            "item": json.dumps(env.item_to_json(item)),
        }
        for item in items
    ]


def trl_environment(rollouts: BlockingRollouts) -> type:
    """`GRPOTrainer(environment_factory=trl_environment(rollouts))`: its tools are methods, the reward is `get_reward`.

    Here TRL samples and writes the tokens; what it does to them on the way is TRL's own. A rollout that infrastructure
    ended raises RolloutLost: TRL would count a reward that is missing as 0.
    """
    env = rollouts.rollouts.env

    def init(self: Any) -> None:
        self._session = ToolSession(rollouts.rollouts)

    def reset(self: Any, item: str, **row: Any) -> None:
        rollouts.wait(self._session.open(env.item_from_json(json.loads(item))))  # gives back what is still open

    def get_reward(self: Any) -> float:
        session: ToolSession = self._session
        return rollouts.wait(session.reward())

    methods = {"__init__": init, "reset": reset, "get_reward": get_reward}
    for schema in rollouts.wait(_schemas(rollouts.rollouts)):
        methods[schema["function"]["name"]] = _method(rollouts, schema["function"])
    return type(type(env).__name__, (), methods)


async def _schemas(rollouts: Rollouts) -> list[ToolSchema]:
    """As a rollout has them: some say what the slot allows."""
    async with ToolSession(rollouts) as session:
        await session.open(await rollouts.env.next_item())
        return session.schemas()


def _method(rollouts: BlockingRollouts, schema: dict[str, Any]) -> Callable[..., Any]:
    """A tool as TRL reads tools: from its signature and its docstring."""
    name, needed = str(schema["name"]), schema["parameters"].get("required", ())

    async def tool(self: Any, **arguments: Any) -> str:
        given = {key: value for key, value in arguments.items() if value is not None}
        return await asyncio.wrap_future(rollouts.submit(self._session.call(name, given)))

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    lines = [" ".join(schema.get("description", name).split()), "", "Args:"]
    for key, of in schema["parameters"].get("properties", {}).items():
        kind = TYPES.get(of.get("type"), str)
        default = {} if key in needed else {"default": None}
        annotation = kind if key in needed else kind | None
        parameters.append(
            inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, **default)
        )
        lines.append(f"    {key}: {' '.join(of.get('description', key).split())}")
    tool.__name__, tool.__doc__ = name, "\n".join(lines)
    tool.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    tool.__annotations__ = {p.name: p.annotation for p in parameters[1:]} | {"return": str}
    return tool
