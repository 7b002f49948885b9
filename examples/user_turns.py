"""Several turns with a user: a scripted user looks at the work and asks for more; the agent works in one leased slot.

python examples/user_turns.py
"""

from __future__ import annotations

import asyncio
import json
import shlex
from typing import Any

from hermes_rl import (
    AgentResult,
    HermesAgentLoop,
    PolicyRequest,
    PoolConfig,
    Sandbox,
    SandboxSpec,
    ServerConfig,
    SlotPool,
    open_model,
)

TERMINAL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a bash command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
WISHES = [
    ("Write the squares of 1 to 4 into squares.txt, one on each line.", "1\n4\n9\n16\n"),
    ("Thank you. Now the largest one first, please.", "16\n9\n4\n1\n"),
]
"""What the user says, and what squares.txt must hold before the user goes on."""


def command(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'terminal', 'arguments': {'command': text}})}\n</tool_call>"


SCRIPT = [
    command("printf '%s\\n' 1 4 9 16 > squares.txt"),
    "Done.",
    command("sort -nr squares.txt -o squares.txt"),
    "Reversed.",
]


def scripted(request: PolicyRequest) -> str:
    """The model that plays: its next turn follows from how many turns of it are in the prompt."""
    return SCRIPT[request.text.count("<|im_start|>assistant") - 1]


async def conversation(server: ServerConfig) -> tuple[list[AgentResult], float]:
    """Each answer to the user is a rollout with tokens of its own; `messages` grows through all of them."""
    messages: list[dict[str, Any]] = []
    results: list[AgentResult] = []
    happy = 0
    async with (
        open_model(server) as model,
        SlotPool.from_config(PoolConfig(slots_per_host=1)) as pool,
        pool.lease("user-turns", SandboxSpec(network="none")) as sandbox,
    ):
        loop = HermesAgentLoop(model, [TERMINAL], tool_handler=terminal(sandbox))
        for wish, wanted in WISHES:
            messages.append({"role": "user", "content": wish})
            results.append(await loop.run(messages))
            seen = await sandbox.exec(f"printf %s {shlex.quote(wanted)} | cmp -s - squares.txt", timeout_s=20)
            if seen.exit_code != 0:
                break
            happy += 1
    return results, happy / len(WISHES)


def terminal(sandbox: Sandbox) -> Any:
    async def handle(name: str, arguments: dict[str, Any], task_id: str) -> dict[str, Any]:
        done = await sandbox.exec(arguments["command"], timeout_s=60)
        return {"output": done.output, "exit_code": done.exit_code}

    return handle


def main() -> tuple[list[AgentResult], float]:
    results, score = asyncio.run(conversation(ServerConfig(server_type="standin", options={"policy": scripted})))
    for result in results:
        print(f"{result.outcome}: {result.turns_used} turns, {len(result.tool_calls)} tool calls")
    print(f"the user was content {score:.0%} of the time")
    return results, score


if __name__ == "__main__":
    main()
