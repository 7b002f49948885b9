"""verifiers 0.4 (prime-rl): any of our environments as a taskset and a harness, `hermes-rl-verifiers` by name.

With a train client the tokens are ours: the harness samples from the client's server and writes every call into the
trace with the ids and logprobs of the ledger. With an eval client calls go through verifiers' interception as chat.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, SecretStr
from transformers import PreTrainedTokenizerFast as _loaded_first  # noqa: F401  two threads at once cannot load it
from verifiers.v1.configs.client import resolve_api_key
from verifiers.v1.runtimes import ProgramResult

from agent_loop.model.contract import ModelServer
from environments.base import HermesAgentBaseEnv
from environments.config.settings import ServerConfig
from environments.launch import load_environment
from environments.models import ModelOpener
from environments.rollouts.planning import first_messages
from environments.rollouts.rollouts import Rollouts
from environments.rollouts.tool_session import NoModel
from environments.trainers.verifiers_trace import as_vf, commit


class HermesTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Which environment, and how many of its items."""

    config: str = "terminal_tasks"
    """YAML file or shipped config of hermes-rl."""
    settings: list[str] = Field(default_factory=list)
    """As on the command line: ["--env.levels", "[0]"]."""
    items: int = 64


class HermesData(vf.TaskData):  # type: ignore[misc]
    """One item as it travels."""

    item: Any = None
    config: str = ""
    settings: list[str] = Field(default_factory=list)


class HermesTask(vf.Task[HermesData]):  # type: ignore[misc]
    """The reward was given where the agent worked."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def scored_in_its_slot(self, trace: Any) -> float:
        return float(trace.info["hermes"]["score"])


class HermesTaskset(vf.Taskset[HermesTask, HermesTasksetConfig]):  # type: ignore[misc]
    """The first items of the environment."""

    def load(self) -> Iterable[HermesTask]:
        given = self.config
        env = load_environment(given.config, given.settings)

        async def take() -> list[Any]:
            await env.setup()
            items = [await env.get_next_item() for _ in range(given.items)]
            return [item for item in items if item is not None]

        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # verifiers calls this inside its event loop
            items = thread.submit(lambda: asyncio.run(take())).result()
        for item in items:
            data = HermesData(
                id=env.item_id(item),
                prompt=[as_vf(message) for message in first_messages(env.config, env.format_prompt(item))],
                item=env.item_to_json(item),
                config=given.config,
                settings=given.settings,
            )
            yield HermesTask(data, given.task)


class HermesHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Runs our loop in this process; slots are ours, so verifiers needs no container."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    def __init__(self, config: vf.HarnessConfig) -> None:
        super().__init__(config)
        self._opened: dict[tuple[Any, ...], asyncio.Future[Rollouts]] = {}
        self._keepers: set[asyncio.Task[None]] = set()

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: HermesData
    ) -> ProgramResult:
        """One rollout. An infrastructure loss is an error of the rollout, never a reward."""
        exact = ctx.client.type == "train"
        rollouts = await self._rollouts(ctx, data)
        async with AsyncExitStack() as stack:
            model = None if exact else await _intercepted(stack, rollouts.env, endpoint, secret, ctx.model)
            item = rollouts.env.item_from_json(data.item)
            record = (await rollouts.run_member(item, str(data.id), ctx.sampling.temperature, model)).record
        kept = ("score", "verifier_score", "reward_components", "outcome", "rollout_id")
        trace.info["hermes"] = {name: getattr(record, name) for name in kept}
        if exact:
            commit(trace, record, ctx.model)
        return ProgramResult(0, "", "")

    async def _rollouts(self, ctx: Any, data: HermesData) -> Rollouts:
        """One for each environment and server, opened once and closed with the event loop."""
        exact = ctx.client.type == "train"
        key = (data.config, *data.settings, ctx.client.base_url if exact else "", ctx.model if exact else "")
        opened = self._opened.get(key)
        if opened is None or (opened.done() and opened.exception()):  # what failed is tried again
            opened = self._opened[key] = asyncio.get_running_loop().create_future()
            self._keepers.add(asyncio.create_task(_keep_open(ctx if exact else None, data, opened)))
        return await asyncio.shield(opened)


async def _keep_open(ctx: Any | None, data: HermesData, opened: asyncio.Future[Rollouts]) -> None:
    """Open rollouts and hold them until the event loop cancels what is left: verifiers does not close a harness."""
    try:
        env = load_environment(data.config, data.settings)
        if ctx is not None:
            names = {"model_name": ctx.model, "tokenizer_name": ctx.client.renderer_model_name or ctx.model}
            secret = SecretStr(resolve_api_key(ctx.client))
            env.server_configs = [ServerConfig(base_url=ctx.client.base_url, api_key=secret, **names)]
        async with Rollouts(env, model=None if ctx is not None else NoModel()) as rollouts:
            opened.set_result(rollouts)
            await asyncio.Event().wait()
    except Exception as error:  # whoever waits for the rollouts is told
        if opened.done():
            raise
        opened.set_exception(error)


async def _intercepted(
    stack: AsyncExitStack, env: HermesAgentBaseEnv, endpoint: str, secret: str, model: str
) -> ModelServer:
    server = ServerConfig(base_url=endpoint, server_type="openai", model_name=model, api_key=SecretStr(secret))
    return await ModelOpener(stack, env.config.tool_call_parser, "").open([server])
