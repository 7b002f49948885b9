"""Benchmarks whose tools act on a simulated world: an object of this process, one for each rollout.

The reward plays the recorded calls again on a new world and judges that one. So it follows from the record alone:
`rescore` and `validate` work as everywhere, and nothing that an agent prints or leaves in its slot counts.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.tools.own_tools import OWN, script_parameters
from agent_loop.tools.tool import CallContext, Tool, ToolFailure
from agent_loop.turn.runtime import in_thread
from agent_loop.turn.tool_call import ToolCallRecord, ToolStatus
from environments.base import AgentResult, ToolContext, Verdict
from environments.listed_items import Item, ListedItemsEnv

RAN = (ToolStatus.OK, ToolStatus.ERROR)
CALL_TIMEOUT_S = 60.0


class WorldEnv(ListedItemsEnv):
    """An environment whose tools act on a world."""

    @abstractmethod
    def schemas(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """The tools of an item: `name`, `description` and `parameters` (JSON Schema) of each."""

    def unlisted(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """Tools that the prompt does not show: the user tells of them later."""
        return ()

    @abstractmethod
    def world(self, item: Item) -> Any:
        """The world as the item finds it. Called in a thread."""

    @abstractmethod
    def act(self, world: Any, name: str, arguments: dict[str, Any]) -> Any:
        """Run one call, in a thread; ToolFailure tells the model what it did wrong."""

    @abstractmethod
    def judge(self, item: Item, world: Any, result: AgentResult) -> float | Verdict:
        """Score the world after the rollout's calls, and what was said. Called in a thread."""

    def tools(self, item: Item) -> Sequence[Tool]:
        shown = [self._tool(dict(schema), True) for schema in self.schemas(item)]
        return shown + [self._tool(dict(schema), False) for schema in self.unlisted(item)]

    def _tool(self, schema: dict[str, Any], listed: bool) -> Tool:
        name = str(schema["name"])

        async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
            rollout = ctx.own_context

            def call() -> Any:
                if "world" not in rollout.state:
                    rollout.state["world"] = self.world(rollout.item)
                return self.act(rollout.state["world"], name, copy.deepcopy(arguments))

            answer = await in_thread(call)
            return answer if isinstance(answer, dict) else {"result": answer}

        return Tool(
            schema=schema,
            toolset=OWN,
            run=run,
            script_parameters=script_parameters(name, schema["parameters"]),
            timeout_s=CALL_TIMEOUT_S,
            listed=listed,
        )

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float | Verdict:
        def played_again() -> float | Verdict:
            world = self.world(item)
            for call in ran(result):
                try:
                    self.act(world, call.name, copy.deepcopy(call.arguments or {}))
                except ToolFailure:
                    continue  # as it failed for the agent
            return self.judge(item, world, result)

        score: float | Verdict = await in_thread(played_again)
        return score


def ran(result: AgentResult) -> list[ToolCallRecord]:
    """The calls that reached a tool, in order."""
    return [call for call in result.tool_calls if call.status in RAN]
