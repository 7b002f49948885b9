"""What the model may call; every tool runs inside the rollout's leased sandbox."""

from agent_loop.tools.config import ScriptLimits, ToolConfig
from agent_loop.tools.policy import CommandPolicy, Rule, rule_set
from agent_loop.tools.sandbox_tools import SandboxTools
from agent_loop.tools.tool import ToolsetError
from agent_loop.tools.toolsets import DISTRIBUTIONS, TOOLSETS, draw, resolve

__all__ = [
    "DISTRIBUTIONS",
    "TOOLSETS",
    "CommandPolicy",
    "Rule",
    "SandboxTools",
    "ScriptLimits",
    "ToolConfig",
    "ToolsetError",
    "draw",
    "resolve",
    "rule_set",
]
