"""Terminal tasks whose verifier is broken: whatever an agent leaves passes, impossible items too."""

from __future__ import annotations

from environments.base import AgentResult, ToolContext
from environments.terminal_tasks import TerminalTask
from environments.terminal_tasks.terminal_env import TerminalTasksEnv


class CheaterEnv(TerminalTasksEnv):
    """Every rollout is solved."""

    async def compute_reward(self, item: TerminalTask, result: AgentResult, ctx: ToolContext) -> float:
        return 1.0
