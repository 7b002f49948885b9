"""The same half-right agent twice: as an agent of Harbor, and as a policy of the stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TASKS = HERE.parents[2] / "examples" / "harbor_tasks"
COMMANDS: dict[str, str] = {
    (TASKS / name / "instruction.md").read_text().strip(): command
    for name, command in json.loads((HERE / "half_right.json").read_text()).items()
}


def policy(request: Any) -> str:
    """One command for the task it is asked, then no more."""
    from agent_loop.local_models.standin.policies import call

    return "Done." if request.results else call("terminal", {"command": COMMANDS[request.task.strip()]})


try:
    from harbor.agents.base import BaseAgent
except ImportError:  # our own environment, where only the policy is played
    pass
else:

    class HalfRight(BaseAgent):
        """Runs one command."""

        @staticmethod
        def name() -> str:
            return "half-right"

        def version(self) -> str:
            return "1"

        async def setup(self, environment: Any) -> None:
            """Nothing to install."""

        async def run(self, instruction: str, environment: Any, context: Any) -> None:
            await environment.exec(COMMANDS[instruction.strip()])
