"""The public API of hermes-rl: what is named in `__all__` is public, everything in the other packages is private.

    from hermes_rl import HermesAgentBaseEnv, SandboxContext, ToolContext

Names are imported when they are first used, so `import hermes_rl` itself takes no time.

Exceptions:

    UsageError                   bad input; the message says what is wrong and what would be right
      ConfigError                a setting is wrong
    ToolsetError                 an unknown tool, or a function that cannot be one
    ToolFailure                  raise it in a tool: the model reads why its call failed
    RoleAway                     the judge or the user could not be asked; the rollout is lost, never scored
    SandboxError                 infrastructure failed; never an exit code and never a score
      AcquireTimeout             no slot became free in time
      HostStartFailed            a slot server could not be started
      IsolationUnavailable       the place isolates less than `min_isolation` demands
      PoolClosed                 the pool is shutting down
      ProtocolError              client and slot server do not understand each other
      SandboxFileError           a file call was refused by the slot (also an OSError)
      SandboxLost                the slot or its host went away
        StaleLease               the lease was taken back
      ScratchFull                no disk space left for slots
    RolloutLost                  rollouts that were asked for could not be made or judged
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # type checkers take a variable of this name for true; importing typing would be most of our time
if TYPE_CHECKING:
    from typing import Any

    from agent_loop import AgentResult, HermesAgentLoop, Limits, Outcome, ToolError
    from agent_loop.context.result_budget import ResultBudget
    from agent_loop.context.window import ContextPolicy
    from agent_loop.local_models.standin import PolicyRequest
    from agent_loop.model.backends.backend import Generation, TokenBackend
    from agent_loop.model.contract import Sampling
    from agent_loop.model.errors import RetryPolicy
    from agent_loop.records.record import RolloutRecord
    from agent_loop.records.verify import verify
    from agent_loop.tools.config import McpServerConfig
    from agent_loop.tools.own_tools import tool
    from agent_loop.tools.tool import Tool, ToolFailure, ToolsetError
    from environments.base import HermesAgentBaseEnv, Score
    from environments.config.settings import HermesAgentEnvConfig, JudgeConfig, RunConfig, ServerConfig, UserConfig
    from environments.errors import ConfigError, RolloutLost, UsageError
    from environments.launch import load_environment
    from environments.models import open_model
    from environments.roles import RoleAway
    from environments.rollouts.blocking import BlockingRollouts
    from environments.rollouts.rollouts import Rollouts
    from environments.rollouts.samples import Sample
    from environments.rollouts.tool_session import ToolSession
    from environments.runs.batch import evaluate_run, process_run
    from environments.scoring.contexts import SandboxContext, ToolContext
    from environments.scoring.verification import CheckTimeout, Verdict
    from environments.trainers.cpu_weights import CpuServerWeights
    from environments.trainers.item_rows import nemo_gym_rows, skyrl_rows, slime_rows, verl_rows
    from environments.trainers.tinker import TinkerBackend, tinker_datum
    from environments.trainers.trl import TrlRolloutWorker
    from environments.trainers.trl_environment import trl_environment, trl_rows
    from sandbox_pool import (
        AcquireTimeout,
        ExecResult,
        HostStartFailed,
        IsolationUnavailable,
        Mount,
        NetworkRules,
        PoolClosed,
        PoolConfig,
        ProtocolError,
        Sandbox,
        SandboxError,
        SandboxFileError,
        SandboxLost,
        SandboxSpec,
        ScratchFull,
        SlotPool,
        StaleLease,
    )
    from tool_parsers import get_parser

__version__ = "0.1.0"

__all__ = [
    "AcquireTimeout",
    "AgentResult",
    "BlockingRollouts",
    "CheckTimeout",
    "ConfigError",
    "ContextPolicy",
    "CpuServerWeights",
    "ExecResult",
    "Generation",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "HermesAgentLoop",
    "HostStartFailed",
    "IsolationUnavailable",
    "JudgeConfig",
    "Limits",
    "McpServerConfig",
    "Mount",
    "NetworkRules",
    "Outcome",
    "PolicyRequest",
    "PoolClosed",
    "PoolConfig",
    "ProtocolError",
    "ResultBudget",
    "RetryPolicy",
    "RoleAway",
    "RolloutLost",
    "RolloutRecord",
    "Rollouts",
    "RunConfig",
    "Sample",
    "Sampling",
    "Sandbox",
    "SandboxContext",
    "SandboxError",
    "SandboxFileError",
    "SandboxLost",
    "SandboxSpec",
    "Score",
    "ScratchFull",
    "ServerConfig",
    "SlotPool",
    "StaleLease",
    "TinkerBackend",
    "TokenBackend",
    "Tool",
    "ToolContext",
    "ToolError",
    "ToolFailure",
    "ToolSession",
    "ToolsetError",
    "TrlRolloutWorker",
    "UsageError",
    "UserConfig",
    "Verdict",
    "__version__",
    "evaluate_run",
    "get_parser",
    "load_environment",
    "nemo_gym_rows",
    "open_model",
    "process_run",
    "skyrl_rows",
    "slime_rows",
    "tinker_datum",
    "tool",
    "trl_environment",
    "trl_rows",
    "verify",
    "verl_rows",
]

_HOMES = {
    "agent_loop": "AgentResult HermesAgentLoop Limits Outcome ToolError",
    "agent_loop.context.result_budget": "ResultBudget",
    "agent_loop.context.window": "ContextPolicy",
    "agent_loop.local_models.standin": "PolicyRequest",
    "agent_loop.model.backends.backend": "Generation TokenBackend",
    "agent_loop.model.contract": "Sampling",
    "agent_loop.model.errors": "RetryPolicy",
    "agent_loop.records.record": "RolloutRecord",
    "agent_loop.records.verify": "verify",
    "agent_loop.tools.config": "McpServerConfig",
    "agent_loop.tools.own_tools": "tool",
    "agent_loop.tools.tool": "Tool ToolFailure ToolsetError",
    "environments.base": "HermesAgentBaseEnv Score",
    "environments.config.settings": "HermesAgentEnvConfig JudgeConfig RunConfig ServerConfig UserConfig",
    "environments.errors": "ConfigError RolloutLost UsageError",
    "environments.launch": "load_environment",
    "environments.models": "open_model",
    "environments.roles": "RoleAway",
    "environments.rollouts.blocking": "BlockingRollouts",
    "environments.rollouts.rollouts": "Rollouts",
    "environments.rollouts.samples": "Sample",
    "environments.rollouts.tool_session": "ToolSession",
    "environments.runs.batch": "evaluate_run process_run",
    "environments.scoring.contexts": "SandboxContext ToolContext",
    "environments.scoring.verification": "CheckTimeout Verdict",
    "environments.trainers.cpu_weights": "CpuServerWeights",
    "environments.trainers.item_rows": "nemo_gym_rows skyrl_rows slime_rows verl_rows",
    "environments.trainers.tinker": "TinkerBackend tinker_datum",
    "environments.trainers.trl": "TrlRolloutWorker",
    "environments.trainers.trl_environment": "trl_environment trl_rows",
    "sandbox_pool": "AcquireTimeout ExecResult HostStartFailed IsolationUnavailable Mount NetworkRules PoolClosed "
    "PoolConfig ProtocolError Sandbox SandboxError SandboxFileError SandboxLost SandboxSpec ScratchFull SlotPool "
    "StaleLease",
    "tool_parsers": "get_parser",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_NEEDS = {
    "environments": ("environments", "agent_loop", "tool_parsers", "sandbox_pool"),
    "agent_loop": ("agent_loop", "tool_parsers", "sandbox_pool"),
    "tool_parsers": ("tool_parsers",),
    "sandbox_pool": ("sandbox_pool",),
}
"""Our package -> those of ours that it imports."""


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'hermes_rl' has no attribute {name!r}")
    value = globals()[name] = _imported(home, name)
    return value


def _imported(home: str, name: str) -> Any:
    from importlib import import_module

    for package in _NEEDS[home.partition(".")[0]]:
        _check_ours(package)
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _check_ours(package: str) -> None:
    """Our packages have common names: say so when another package of that name comes first on the path."""
    from importlib.util import find_spec

    ours = os.path.realpath(f"{os.path.dirname(__file__)}/../{package}")  # noqa: PTH120 - pathlib takes too long here
    loaded = sys.modules.get(package)
    spec = find_spec(package) if loaded is None else loaded.__spec__
    found = [] if spec is None else list(spec.submodule_search_locations or [str(spec.origin)])
    if ours not in map(os.path.realpath, found):
        raise ImportError(
            f"hermes-rl needs its own package {package!r} at {ours}, but Python finds {' '.join(found) or 'none'}: "
            "rename that one, or start Python with -P, so that the folder of your program does not come first"
        )
