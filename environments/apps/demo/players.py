"""Who plays in the demo: each policy with its model opened, on one shared pool."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass

from agent_loop.local_models.standin import StandIn, chatml_tokenizer
from agent_loop.local_models.standin.solver import WRITERS, solver
from agent_loop.model.backends.llamacpp import LlamaCppBackend
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.contract import ModelServer
from environments.config.settings import ServerConfig
from environments.models import ModelOpener
from environments.sandboxes import Pool
from environments.terminal_tasks import TerminalTask, TerminalTasks
from environments.terminal_tasks.terminal_env import TerminalTasksConfig, TerminalTasksEnv

log = logging.getLogger(__name__)


@dataclass
class Player:
    """One policy, ready to play."""

    name: str
    env: TerminalTasksEnv
    scorer: LlamaCppBackend | None = None
    """The real model's own server, to ask it again about what it sampled."""


def demo_tasks(config: TerminalTasksConfig, count: int) -> list[TerminalTask]:
    """The tasks that every policy gets."""
    stream = TerminalTasks("train", levels=config.levels, seed=config.seed)
    return [stream[index] for index in range(count)]


async def scripted_players(
    stack: AsyncExitStack, config: TerminalTasksConfig, pool: Pool, tasks: list[TerminalTask]
) -> list[Player]:
    """The scripted policies on stand-in servers; they see tool schemas and no examples, and may try longer."""
    sizes = {"max_agent_turns": 4, "max_token_length": 8192, "max_tokens_per_turn": 256}
    settings = config.model_copy(update={"examples": [], "tools_in_prompt": True, **sizes})
    opener = ModelOpener(stack, settings.tool_call_parser, settings.tokenizer_name)
    solutions = {task.prompt: task.solution for task in tasks}
    players = []
    for name, writer in WRITERS.items():
        server = await stack.enter_async_context(StandIn(solver(solutions, writer), keep_log=False))
        model = await opener.record(VllmBackend(server.url, model=name), chatml_tokenizer())
        players.append(Player(name, _env(f"{name} (scripted)", settings, pool, model)))
    return players


async def real_player(
    stack: AsyncExitStack, config: TerminalTasksConfig, server: ServerConfig, pool: Pool
) -> Player | str:
    """The real model, or one line that says why it cannot play."""
    from agent_loop.local_models.cpu_model import CpuModel, CpuModelError, CpuModelMissing

    try:
        model = await stack.enter_async_context(CpuModel(**server.options))
    except (CpuModelMissing, CpuModelError, ImportError) as error:
        return str(error)
    opener = ModelOpener(stack, config.tool_call_parser, config.tokenizer_name, tools_in_prompt=config.tools_in_prompt)
    recorder = await opener.record(model.backend(), model.tokenizer)
    scorer = model.backend()
    stack.push_async_callback(scorer.close)
    return Player(server.model_name, _env(server.model_name, config, pool, recorder), scorer)


def _env(name: str, config: TerminalTasksConfig, pool: Pool, model: ModelServer) -> TerminalTasksEnv:
    env = TerminalTasksEnv(config, [ServerConfig(server_type="standin", model_name=name)], pool=pool, model=model)
    env.mode = "process"
    return env
