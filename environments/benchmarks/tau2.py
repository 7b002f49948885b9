"""tau2-bench: a customer service agent, its tools and its policy, and a simulated customer (airline and retail).

`env.user` plays the customer. The score is tau2's: the database is as the right actions leave it, and what the customer
has to be told was said. The data and the tools are those of inspect-evals.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agent_loop.model.contract import Message
from agent_loop.tools.tool import ToolFailure
from environments.base import AgentResult, SandboxContext, Verdict
from environments.benchmarks.packages import folder_of, needed, prompts
from environments.benchmarks.worlds import WorldEnv
from environments.errors import ConfigError
from environments.listed_items import Item, ListedItemsConfig

INSTALL = "pip install 'hermes-rl[tau2]'"
ENDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What tau2's customer says when the conversation is over."""
UNCHANGING = ("calculate", "transfer_to_human_agents")
"""Actions that touch no database."""


class Tau2Config(ListedItemsConfig):
    """Which tasks of tau2."""

    domains: list[Literal["airline", "retail"]] = Field(
        default=["airline", "retail"], min_length=1, description="Domains to take tasks from."
    )
    split: Literal["base", "train", "test"] = Field(default="base", description="tau2's split; base: all tasks.")
    max_agent_turns: int = Field(default=100, ge=1)


class Tau2Env(WorldEnv):
    """tau2's airline and retail tasks."""

    name = "tau2"
    env_config_cls = Tau2Config
    config: Tau2Config

    def load_items(self, config: Tau2Config) -> list[Item]:
        if config.user is None:
            raise ConfigError("env.user is missing: the model that plays tau2's customer, such as env.user.base_url")
        data = folder_of("inspect_evals", INSTALL) / "tau2" / "data"
        self.guidelines = (data / "user_simulator" / "simulation_guidelines.txt").read_text("utf-8")
        self.domains = {name: _Domain(name, data / "domains" / name) for name in config.domains}
        self._right: dict[str, str] = {}
        return [item for domain in self.domains.values() for item in domain.items(config.split)]

    def format_prompt(self, item: Item) -> list[dict[str, Any]]:
        """The policy; the customer speaks first."""
        return [{"role": "system", "content": prompts()["tau2"].format(policy=self.domains[item["category"]].policy)}]

    def user_prompt(self, item: Item) -> str:
        return f"{self.guidelines}\n<scenario>\n{item['scenario']}\n</scenario>"

    async def user_reply(self, item: Item, messages: Sequence[Message], ctx: SandboxContext) -> str | None:
        said = await super().user_reply(item, messages, ctx)
        return None if said is None or any(end in said for end in ENDS) else said

    def schemas(self, item: Item) -> Sequence[Mapping[str, Any]]:
        return self.domains[item["category"]].schemas

    def world(self, item: Item) -> Any:
        return self.domains[item["category"]].new_tools()

    def act(self, world: Any, name: str, arguments: dict[str, Any]) -> Any:
        if name == "transfer_to_human_agents":
            return "Transfer successful"
        try:
            if name == "calculate":
                calculate = needed("inspect_evals.tau2.common.tools", INSTALL).calculate()
                return asyncio.run(calculate(**arguments))
            return getattr(world, name)(**arguments)
        except Exception as error:  # as in tau2: whatever goes wrong is for the agent to read
            raise ToolFailure(f"Error: {error}") from error

    def judge(self, item: Item, world: Any, result: AgentResult) -> Verdict:
        if item["id"] not in self._right:
            self._right[item["id"]] = self._after_right_actions(item)
        failures = [] if world.db.get_hash() == self._right[item["id"]] else ["the database is not as it should be"]
        spoken = (str(m.get("content") or "") for m in result.messages if m.get("role") == "assistant")
        said = "\n".join(spoken).lower().replace(",", "")
        failures += [f"the customer was not told {info!r}" for info in item["to_tell"] if info.lower() not in said]
        return Verdict.of(failures)

    def _after_right_actions(self, item: Item) -> str:
        """A hash of the database that tau2's right actions leave."""
        world = self.world(item)
        for action in item["actions"]:
            if action["name"] not in UNCHANGING:
                try:
                    self.act(world, action["name"], dict(action["arguments"]))
                except ToolFailure:
                    continue  # some of them fail, and then change nothing
        return str(world.db.get_hash())

    def solution(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """tau2's right actions, then what the customer has to be told."""
        calls = [{"name": one["name"], "arguments": one["arguments"]} for one in item["actions"]]
        return [*calls, {"content": f"Done. {' '.join(item['to_tell'])}".strip()}]


class _Domain:
    """A domain's tasks, policy and tools."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.policy = (folder / "policy.txt").read_text("utf-8")
        title = name.capitalize()
        kind = getattr(needed(f"inspect_evals.tau2.{name}.{title}AgentTools", INSTALL), f"{title}AgentTools")
        offered = needed(f"inspect_evals.tau2.{name}.tools", INSTALL)
        self.schemas = [_schema(make()) for make in getattr(offered, f"all_{name}_tools")]
        # Without inspect-ai's store, which reads and checks the whole database at every access.
        methods = {key: value for key, value in vars(kind).items() if inspect.isfunction(value)}
        self._tools = type(f"{title}Tools", (), methods)
        self._database = pickle.dumps(kind.model_fields["db"].annotation.load(str(folder / "db.json.gz")))

    def new_tools(self) -> Any:
        """The tools over a database of their own."""
        tools = self._tools()
        tools.db = pickle.loads(self._database)  # ten times faster than copying it
        return tools

    def items(self, split: str) -> list[Item]:
        chosen = set(json.loads((self.folder / "split_tasks.json").read_text("utf-8"))[split])
        kind = needed("inspect_evals.tau2.data_model.tasks", INSTALL).Task
        tasks = json.loads((self.folder / "tasks.json").read_text("utf-8"))
        return [self._item(kind.model_validate(task)) for task in tasks if str(task["id"]) in chosen]

    def _item(self, task: Any) -> Item:
        criteria = task.evaluation_criteria
        actions = [{"name": one.name, "arguments": one.arguments} for one in (criteria.actions or [])]
        return {
            "id": f"{self.name}/{task.id}",
            "category": self.name,
            "scenario": str(task.user_scenario),
            "actions": actions,
            "to_tell": list(criteria.communicate_info or []),
        }


def _schema(tool: Any) -> dict[str, Any]:
    told = needed("inspect_ai.tool", INSTALL).ToolDef(tool)
    parameters = told.parameters.model_dump(mode="json", exclude_none=True)
    return {"name": told.name, "description": told.description, "parameters": parameters}


if __name__ == "__main__":
    Tau2Env.cli()
