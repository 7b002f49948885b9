"""A small environment for tests: write the number of the item into answer.txt. Policies that do it well or badly."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from agent_loop.local_models.standin import Policy, PolicyRequest, StandIn, chatml_tokenizer
from agent_loop.local_models.standin.policies import call
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from environments.base import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, ServerConfig, ToolContext
from support.env_pool import DirectoryPool
from tool_parsers import get_parser


class NumberEnv(HermesAgentBaseEnv):
    """Items 0, 1, 2, ...; reward 1.0 when answer.txt holds the number."""

    name = "numbers"

    def __init__(
        self, pool: Any = None, model: Any = None, servers: list[ServerConfig] | None = None, **config: Any
    ) -> None:
        settings = {"group_size": 4, "total_steps": 3, "max_token_length": 4096, "max_agent_turns": 4} | config
        super().__init__(HermesAgentEnvConfig(**settings), servers, pool=pool, model=model)
        self.count = 0

    async def setup(self) -> None:
        self.count = 0

    async def get_next_item(self) -> dict[str, Any]:
        self.count += 1
        return {"id": f"n{self.count - 1}", "number": self.count - 1, "category": "even" if self.count % 2 else "odd"}

    async def evaluation_items(self) -> list[dict[str, Any]]:
        return [{"id": f"e{n}", "number": n} for n in range(self.config.eval_items)]

    def format_prompt(self, item: dict[str, Any]) -> str:
        return f"Write {item['number']} into answer.txt"

    async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
        answer = await ctx.terminal("cat answer.txt")
        return float(answer["output"].strip() == str(item["number"]))


class NumbersFromConfig(NumberEnv):
    """The same as a config makes it (`environment: support.env_tasks:NumbersFromConfig`), on plain directories."""

    pools: ClassVar[list[DirectoryPool]] = []
    """Of all that were made; whoever made them closes them."""

    def __init__(self, config: HermesAgentEnvConfig, servers: Any = None, **more: Any) -> None:
        self.pools.append(DirectoryPool())
        HermesAgentBaseEnv.__init__(self, config, servers, pool=self.pools[-1])
        self.count = 0


def wanted(request: PolicyRequest) -> str:
    found = re.search(r"Write (\d+) into", request.text)
    return found[1] if found else ""


def right(request: PolicyRequest) -> str:
    if request.results:
        return "Done."
    return call("terminal", {"command": f"echo {wanted(request)} > answer.txt"})


def sometimes_right(request: PolicyRequest) -> str:
    """Right or wrong by the seed of the request, or by its number where no seed is sent."""
    if request.results:
        return "Done."
    lucky = int(request.body.get("seed") or request.number) % 2
    return call("terminal", {"command": f"echo {wanted(request) if lucky else 'wrong'} > answer.txt"})


@asynccontextmanager
async def standin_model(policy: Policy, **options: Any):  # type: ignore[no-untyped-def]
    """(model server, stand-in) over a policy."""
    async with StandIn(policy, **options) as standin:
        backend = VllmBackend(standin.url, model="standin")
        try:
            yield Recorder(backend, probe_template(chatml_tokenizer()), get_parser("hermes")), standin
        finally:
            await backend.close()
