"""The agent loop: messages -> model -> tool calls -> results -> messages, with tokens and metrics recorded.

The names users need are here, and imported only when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_loop.limits import Limits
    from agent_loop.loop import HermesAgentLoop
    from agent_loop.outcome import Outcome
    from agent_loop.records.record import AgentResult, ToolError

__all__ = ["AgentResult", "HermesAgentLoop", "Limits", "Outcome", "ToolError"]

_HOMES = {
    "AgentResult": "records.record",
    "HermesAgentLoop": "loop",
    "Limits": "limits",
    "Outcome": "outcome",
    "ToolError": "records.record",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agent_loop' has no attribute {name!r}")
    return getattr(importlib.import_module(f"agent_loop.{_HOMES[name]}"), name)
