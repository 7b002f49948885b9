"""Runs in verifiers' own environment: prime-rl's way in (EnvServer over ZMQ), judged by the log of the model server."""

from __future__ import annotations

import asyncio
import json
import sys

import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.server import EnvServer

from agent_loop.local_models.standin import StandIn
from agent_loop.local_models.standin.solver import solver
from environments.launch import load_environment

NAME = "hermes-rl-verifiers"


def as_the_server_saw_it(branch, log):
    """(ids, mask, logprobs) of the longest request that a branch holds, with every request before it."""
    held = [e for e in log if branch[: len(e.prompt_ids) + len(e.sampled_ids)] == [*e.prompt_ids, *e.sampled_ids]]
    last = max(held, key=lambda e: len(e.prompt_ids))
    ids = [*last.prompt_ids, *last.sampled_ids]
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    for entry in held:
        for place, logprob in enumerate(entry.logprobs, len(entry.prompt_ids)):
            mask[place], logprobs[place] = 1, logprob
    return ids, mask, logprobs


async def main(rows: int, times: int) -> dict:
    solutions = {}
    async with StandIn(solver(solutions)) as standin:
        taskset = {"id": NAME, "config": "terminal_tasks", "settings": sys.argv[1:], "items": rows}
        agent = {"harness": {"id": NAME}, "runtime": {"type": "subprocess"}}
        config = SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": agent})
        server = EnvServer(config, address="tcp://127.0.0.1:0")
        serving = asyncio.create_task(server.run())
        client = EnvClient(server.address)
        tasks = [task.data.model_dump() for task in server.env.taskset]
        env = load_environment("terminal_tasks")
        for task in tasks:
            item = env.item_from_json(task["item"])
            solutions[item.prompt] = item.solution
        model = vf.TrainClientConfig(base_url=standin.url, renderer_model_name="standin")
        sampling = vf.SamplingConfig(temperature=1.0)
        runs = [client.run(model, "standin", sampling, task) for task in tasks for _ in range(times)]
        episodes = await asyncio.gather(*runs)
        equal = sampled = 0
        for episode in episodes:
            for branch in episode.traces[0].branches:
                ids, mask, logprobs = as_the_server_saw_it(list(branch.token_ids), standin.log)
                same = [list(branch.token_ids), [int(m) for m in branch.sampled_mask]] == [ids, mask]
                equal += same and [float(p) for p in branch.logprobs] == logprobs
                sampled += sum(mask)
        await client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return {
        "episodes": len(episodes),
        "ok": sum(bool(episode.ok) for episode in episodes),
        "branches": sum(len(episode.traces[0].branches) for episode in episodes),
        "equal": equal,
        "sampled_tokens": sampled,
        "rewards": [episode.traces[0].reward for episode in episodes],
        "errors": [str(episode.traces[0].errors) for episode in episodes if not episode.ok][:3],
    }


print(json.dumps(asyncio.run(main(2, 4))))
