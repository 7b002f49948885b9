"""AgentDojo: 97 user tasks in four simulated offices (workspace, travel, banking, slack), judged by its own checks.

The tasks run without injected attacks: the score is AgentDojo's utility.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import Field
from pydantic_core import to_jsonable_python

from agent_loop.tools.tool import ToolFailure
from environments.base import AgentResult
from environments.benchmarks.packages import needed
from environments.benchmarks.worlds import WorldEnv, ran
from environments.errors import ConfigError
from environments.listed_items import Item, ListedItemsConfig
from sandbox_pool.errors import did_you_mean

INSTALL = "pip install 'hermes-rl[agentdojo]'"


class AgentDojoConfig(ListedItemsConfig):
    """Which tasks of AgentDojo."""

    version: str = Field(default="v1.2.2", description="AgentDojo's version of the tasks.")
    suites: list[str] = Field(
        default=["workspace", "travel", "banking", "slack"], min_length=1, description="Suites to take tasks from."
    )
    max_agent_turns: int = Field(default=30, ge=1)


class AgentDojoEnv(WorldEnv):
    """AgentDojo's user tasks."""

    name = "agentdojo"
    env_config_cls = AgentDojoConfig
    config: AgentDojoConfig

    def load_items(self, config: AgentDojoConfig) -> list[Item]:
        loaded = needed("agentdojo.task_suite.load_suites", INSTALL)
        suites = dict(loaded.get_suites(config.version))
        if not suites:
            raise ConfigError(f"env.version {config.version!r} is none of AgentDojo's, such as v1.2.2")
        if unknown := [name for name in config.suites if name not in suites]:
            raise ConfigError(f"env.suites: unknown suite {unknown[0]!r}; {did_you_mean(unknown[0], suites)}")
        self.suites = suites
        return [
            {"id": f"{name}/{task}", "category": name, "suite": name, "task": task}
            for name in config.suites
            for task in suites[name].user_tasks
        ]

    def task(self, item: Item) -> Any:
        return self.suites[item["suite"]].user_tasks[item["task"]]

    def format_prompt(self, item: Item) -> list[dict[str, Any]]:
        from agentdojo.agent_pipeline.agent_pipeline import load_system_message

        return [
            {"role": "system", "content": load_system_message(None)},
            {"role": "user", "content": self.task(item).PROMPT},
        ]

    def schemas(self, item: Item) -> Sequence[Mapping[str, Any]]:
        return [
            {"name": one.name, "description": one.description, "parameters": one.parameters.model_json_schema()}
            for one in self.suites[item["suite"]].tools
        ]

    def world(self, item: Item) -> Any:
        return self.task(item).init_environment(_untouched(self.suites[item["suite"]]).model_copy(deep=True))

    def act(self, world: Any, name: str, arguments: dict[str, Any]) -> str:
        from agentdojo.agent_pipeline.tool_execution import tool_result_to_str
        from agentdojo.functions_runtime import FunctionsRuntime

        tools = next(suite.tools for suite in self.suites.values() if isinstance(world, suite.environment_type))
        answer, error = FunctionsRuntime(tools).run_function(world, name, arguments)
        if error is not None:
            raise ToolFailure(error)
        return str(tool_result_to_str(answer))

    def judge(self, item: Item, world: Any, result: AgentResult) -> float:
        from agentdojo.functions_runtime import FunctionCall

        task, before = self.task(item), self.world(item)
        calls = [FunctionCall(function=call.name, args=call.arguments or {}) for call in ran(result)]
        useful = task.utility_from_traces(result.final_answer, before, world, calls)
        if useful is None:
            useful = task.utility(result.final_answer, before, world)
        return float(bool(useful))

    def solution(self, item: Item) -> list[Mapping[str, Any]]:
        """AgentDojo's ground truth."""
        task = self.task(item)
        calls = [
            {"name": one.function, "arguments": to_jsonable_python(one.args)}
            for one in task.ground_truth(self.world(item))
        ]
        return [*calls, {"content": task.GROUND_TRUTH_OUTPUT or "Done."}]


@cache
def _untouched(suite: Any) -> Any:
    """A suite's world, which takes a second to read."""
    return suite.load_and_inject_default_environment({})


if __name__ == "__main__":
    AgentDojoEnv.cli()
