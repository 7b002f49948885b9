"""The real verifiers 0.4 with our taskset and harness. Prepared by tests/live/verifiers/prepare.sh."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_loop.local_models.standin import StandIn
from agent_loop.local_models.standin.solver import solver
from agent_loop.model.tokens.ledger import MASKED
from agent_loop.records.record import RolloutRecord
from environments.launch import load_environment

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[2] / ".tools" / "verifiers"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="run tests/live/verifiers/prepare.sh first"),
]


LEVELS = ["--env.levels", "[0,1]"]
NAME = "hermes-rl-verifiers"
TASKS, TIMES = 2, 2


def surroundings(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "HF_HUB_OFFLINE": "1"}


async def vf_eval(folder: Path, client: list[str]) -> list[tuple[dict[str, Any], RolloutRecord]]:
    """Each trace that the real `vf-eval` wrote, with our record of the same rollout."""
    stored = folder / "rollouts.jsonl"
    await play(folder, [*LEVELS, "--env.data_path_to_save_groups", str(stored)], client)
    return await asyncio.to_thread(paired, folder, stored)


async def play(folder: Path, settings: list[str], client: list[str]) -> None:
    env = load_environment("terminal_tasks", LEVELS)
    await env.setup()
    items = [await env.get_next_item() for _ in range(TASKS)]
    async with StandIn(solver({item.prompt: item.solution for item in items})) as standin:
        command = [str(HOME / "venv/bin/vf-eval"), NAME, "-m", "standin", "-n", str(TASKS), "-r", str(TIMES)]
        command += ["--env.agent.harness.id", NAME, "--env.agent.runtime.type", "subprocess", "--no-push"]
        command += ["--env.taskset.settings", json.dumps(settings), "--client.base-url", f"{standin.url}/v1", *client]
        with (folder / "said").open("wb") as said:
            done = await asyncio.create_subprocess_exec(
                *command, "-o", "out", cwd=folder, env=surroundings(folder), stdout=said, stderr=said
            )
            assert await done.wait() == 0, (folder / "said").read_text()[-3000:]


def paired(folder: Path, stored: Path) -> list[tuple[dict[str, Any], RolloutRecord]]:
    records = {r.rollout_id: r for r in map(RolloutRecord.from_json, stored.read_bytes().splitlines())}
    [file] = folder.glob("out/*/traces.jsonl")
    traces = [trace for line in file.read_text().splitlines() for trace in json.loads(line)["traces"]]
    assert len(traces) == len(records) == TASKS * TIMES
    assert max(record.score or 0.0 for record in records.values()) == 1.0
    return [(trace, records[trace["info"]["hermes"]["rollout_id"]]) for trace in traces]


async def test_vf_eval_with_our_tokens_has_every_node_as_our_ledger_has_it(tmp_path: Path) -> None:
    found = await vf_eval(tmp_path, ["--client.type", "train", "--client.renderer-model-name", "standin"])
    for trace, record in found:
        [segment] = record.segments
        ids, mask, logprobs = (
            [x for node in trace["nodes"] for x in node[key]] for key in ("token_ids", "mask", "logprobs")
        )
        assert ids == segment.tokens
        assert mask == [value != MASKED for value in segment.masks]
        kept = [value for value, place in zip(segment.logprobs, segment.masks, strict=True) if place != MASKED]
        assert [value for value in logprobs if value] == kept
        assert kept
        assert trace["rewards"]["scored_in_its_slot"]["score"] == record.score


async def test_vf_eval_by_interception_sees_every_turn_of_our_loop(tmp_path: Path) -> None:
    found = await vf_eval(tmp_path, ["--client.type", "eval"])
    for trace, record in found:
        theirs = [node["message"] for node in trace["nodes"]]
        assert [message["role"] for message in theirs] == [message["role"] for message in record.messages]
        for message, ours in zip(theirs, record.messages, strict=True):
            assert (message.get("content") or "") == (ours.get("content") or "")
            calls = [call["function"]["name"] for call in ours.get("tool_calls") or ()]
            assert [call["name"] for call in message.get("tool_calls") or ()] == calls
        assert sum(node["sampled"] for node in trace["nodes"]) == len(record.turns)
        assert trace["rewards"]["scored_in_its_slot"]["score"] == record.score


def run(program: str, folder: Path) -> dict[str, Any]:
    command = [str(HOME / "venv/bin/python"), str(HERE / program)]
    done = subprocess.run(command, cwd=folder, env=surroundings(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_over_zmq_every_branch_holds_the_ids_masks_and_logprobs_that_the_server_sampled(tmp_path: Path) -> None:
    found = run("env_server.py", tmp_path)
    assert found["errors"] == []
    assert found["ok"] == found["episodes"] == found["branches"] == found["equal"] == 8
    assert found["sampled_tokens"] > 0
    assert max(found["rewards"]) == 1.0
