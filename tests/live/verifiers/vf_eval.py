"""Runs in verifiers' own environment: the real vf-eval, by interception (eval client), against the stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from agent_loop.local_models.standin import StandIn
from agent_loop.local_models.standin.solver import solver
from environments.launch import load_environment

NAME = "hermes-rl-verifiers"


async def main() -> dict:
    env = load_environment("terminal_tasks")
    await env.setup()
    items = [await env.get_next_item() for _ in range(2)]
    async with StandIn(solver({item.prompt: item.solution for item in items})) as standin:
        command = [str(Path(sys.executable).with_name("vf-eval")), NAME, "--env.taskset.items", "2"]
        command += ["--env.agent.harness.id", NAME, "--env.agent.runtime.type", "subprocess", "--no-push", "--no-rich"]
        command += ["--model", "standin", "--client.base-url", f"{standin.url}/v1", "--num-rollouts", "2"]
        environ = {**os.environ, "OPENAI_API_KEY": "x"}
        process = await asyncio.create_subprocess_exec(*command, *sys.argv[1:], env=environ, stdout=2)
        code = await process.wait()
        return {"code": code, "requests": len(standin.log)}


print(json.dumps(asyncio.run(main())))
