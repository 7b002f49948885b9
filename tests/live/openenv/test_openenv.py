"""OpenEnv's own clients against our server, and TRL's reconciliation of our traces. See prepare.sh."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_loop.local_models.standin import StandIn
from agent_loop.local_models.standin.policies import failing, wild
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.records.record import RolloutRecord
from environments.apps.cli import main as cli
from environments.launch import load_environment
from support.records import write_run
from support.tokens_rollouts import Rollout
from tool_parsers import get_parser

HOME = Path(__file__).resolve().parents[3] / ".tools" / "openenv"
ITEMS = 6
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no OpenEnv: bash tests/live/openenv/prepare.sh"),
]

PLAY = """
import asyncio, json, sys
from openenv.core.generic_client import GenericEnvClient
url, solutions = sys.argv[1], json.loads(sys.argv[2])
async def play(index, commands):
    async with GenericEnvClient(base_url=url) as env:
        first = (await env.reset(seed=index)).observation
        for command in commands:
            await env.step({"type": "call_tool", "tool_name": "terminal", "arguments": {"command": command}})
        steps = (await env.state())["step_count"]
        end = await env.step({"type": "call_tool", "tool_name": "submit"})
        return [first["item_id"], steps, end.done, end.reward]
async def main():
    solved = await asyncio.gather(*(play(index, commands) for index, commands in enumerate(solutions)))
    idle = await asyncio.gather(*(play(index, []) for index in range(len(solutions))))
    print(json.dumps([solved, idle]))
asyncio.run(main())
"""
TOOLS = """
import asyncio, json, sys
from openenv.core.mcp_client import MCPToolClient
async def main():
    async with MCPToolClient(base_url=sys.argv[1]) as env:
        before = [tool.name for tool in await env.list_tools()]
        first = await env.reset(split="test", index=1)
        said = await env.call_tool("terminal", command="pwd")
        for wrong in ({"split": "test", "index": 99}, {"split": "nosuch", "index": 0}):
            try:
                await env.reset(**wrong)
            except Exception as error:
                said.setdefault("errors", []).append(str(error))
        print(json.dumps([before, first.observation.item_id, said]))
asyncio.run(main())
"""
VANISH = """
import asyncio, os, sys
from openenv.core.generic_client import GenericEnvClient
async def main():
    env = await GenericEnvClient(base_url=sys.argv[1]).connect()
    await env.reset(seed=0)
    await env.step({"type": "call_tool", "tool_name": "terminal", "arguments": {"command": "echo here"}})
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
RECONCILE = """
import json, sys
from pathlib import Path
from openenv.core.harness.training import TrainingTrace
from trl.experimental.async_grpo.async_rollout_worker import _chain_to_sequences
from trl.experimental.async_grpo.openenv_harness import _turns_from_training_trace
found = {}
for line in (Path(sys.argv[1]) / "train.jsonl").read_text().splitlines():
    trace = TrainingTrace.model_validate_json(line)
    rows, _ = _chain_to_sequences(_turns_from_training_trace(trace), "r", 0)
    name = trace.turns[0].metadata["rollout_id"]
    found[name] = [[row.input_ids, row.completion_mask, row.old_log_probs] for row in rows]
print(json.dumps(found))
"""


def python(program: str, *words: str, returncode: int = 0) -> Any:
    command = [str(HOME / "venv/bin/python"), "-c", program, *words]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environ)
    assert done.returncode == returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str], Path]]:
    """(address, process, state folder) of an offered environment with as many slots as sessions."""
    state = tmp_path / "state"
    command = [str(HOME / "venv/bin/hermes-rl"), "offer", "terminal_tasks", "--to", "openenv", "--items", str(ITEMS)]
    command += ["--env.group_size", "1", "--env.groups_at_once", str(ITEMS), "--env.eval_items", "2"]
    environ = {**os.environ, "XDG_STATE_HOME": str(state)}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process, state
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def solutions() -> dict[str, list[str]]:
    async def take() -> dict[str, list[str]]:
        env = load_environment("terminal_tasks")
        await env.setup()
        items = [await env.get_next_item() for _ in range(ITEMS)]
        return {env.item_id(item): [str(step) for step in env.solution(item)] for item in items}

    return asyncio.run(take())


def test_solved_episodes_score_1_and_idle_ones_0(server: tuple[str, Any, Path]) -> None:
    known = solutions()
    solved, idle = python(PLAY, server[0], json.dumps(list(known.values())))
    assert solved == [[name, len(steps), True, 1.0] for name, steps in known.items()]
    assert idle == [[name, 0, True, 0.0] for name in known]


def test_the_client_for_tools_needs_nothing_of_ours(server: tuple[str, Any, Path]) -> None:
    tools, item, said = python(TOOLS, server[0])
    assert tools[0] == "terminal"
    assert tools[-1] == "submit"
    assert item.startswith("terminal:eval:")
    assert json.loads(said["result"])["output"] == "/workspace\n"
    assert "there is no task 99 in split 'test' (train: 6, test: 2)" in said["errors"][0]
    assert "in split 'nosuch'" in said["errors"][1]


def test_slots_of_killed_clients_are_leased_again(server: tuple[str, Any, Path]) -> None:
    for _ in range(ITEMS):  # as many as there are sessions: one that stayed would be in the way of the next
        python(VANISH, server[0], returncode=-signal.SIGKILL)
    solved, _ = python(PLAY, server[0], json.dumps(list(solutions().values())))
    assert [row[-1] for row in solved] == [1.0] * ITEMS


def test_nothing_is_left_when_the_server_is_told_to_end(server: tuple[str, Any, Path]) -> None:
    address, process, state = server
    python(PLAY, address, json.dumps([["true"]]))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    command = [str(HOME / "venv/bin/hermes-rl"), "pool", "status"]
    environ = {**os.environ, "XDG_STATE_HOME": str(state)}
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert "no hosts" in told.lower(), told


async def random_rollouts(count: int) -> list[RolloutRecord]:
    async with StandIn(failing(wild, every=9), seed=5) as standin:
        backend = VllmBackend(standin.url, model="standin")
        recorder = Recorder(backend, probe_template(standin.tokenizer), get_parser("hermes"))
        gate = asyncio.Semaphore(8)

        async def one(number: int) -> RolloutRecord:
            async with gate:
                rollout = Rollout(recorder, Random(f"openenv {number}"), context_tokens=450)
                await rollout.play(rollout.rng.randint(1, 10))
                return replace(rollout.record(f"r{number}"), verifier_score=1.0)

        try:
            return await asyncio.gather(*(one(number) for number in range(count)))
        finally:
            await backend.close()


def test_trls_reconciliation_of_500_random_rollouts_gives_our_segments(tmp_path: Path) -> None:
    records = asyncio.run(random_rollouts(500))
    assert sum(len(record.segments) > 1 for record in records) > 50, "hardly any rollout was truncated"
    write_run(tmp_path / "rollouts.jsonl", records)
    assert cli.main(["export", str(tmp_path), "--to", "openenv"]) == 0
    found = python(RECONCILE, str(tmp_path / "openenv"))
    assert len(found) == 500
    for record in records:
        ours = []
        for segment in record.segments:
            mask = [int(value != -100) for value in segment.masks]
            logprobs = [value if kept else 0.0 for value, kept in zip(segment.logprobs, mask, strict=True)]
            ours.append([segment.tokens, mask, logprobs])
        assert found[record.rollout_id] == ours, record.rollout_id
