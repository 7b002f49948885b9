"""Rollouts of the real CPU model through the real loop: few-shot turns, short tasks, a small context."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from agent_loop.context import ContextPolicy
from agent_loop.cpu_model import CpuModel, CpuModelMissing, smollm2_gguf
from agent_loop.limits import Limits
from agent_loop.loop import HermesAgentLoop
from agent_loop.model import Message, Sampling
from agent_loop.recorder import Recorder
from agent_loop.records import RolloutRecord
from agent_loop.tokens.probe import probe_template
from support.tokens_rollouts import TERMINAL, Rollout
from tool_parsers import get_parser

SYSTEM = "You are a shell agent. Answer every request with one tool call."
SHOTS = (("create a folder named logs", "mkdir logs"), ("show the file tmp.txt", "cat tmp.txt"))
TASKS = ("list the files", "remove notes.txt", "show the file data.csv", "make a folder named out", "print hello")


def require_cpu_model() -> None:
    """Skip the calling test where the model's packages are missing."""
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed (extra cpu-model)")
    pytest.importorskip("gguf", reason="gguf is not installed (extra cpu-model)")
    try:
        smollm2_gguf()
    except CpuModelMissing as missing:
        pytest.skip(str(missing))


def prompt(task: str) -> list[Message]:
    """Examples as turns, then the task."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    for number, (ask, command) in enumerate(SHOTS):
        function = {"name": "terminal", "arguments": json.dumps({"command": command})}
        call = {"id": f"shot_{number}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"shot_{number}", "content": "ok"},
        ]
    return [*messages, {"role": "user", "content": task}]


async def handler(name: str, arguments: dict, task_id: str) -> str:
    """What the commands print: enough to fill the context in a few turns."""
    rng = Random(json.dumps(arguments, sort_keys=True, default=str))
    return json.dumps({"output": "file.txt notes.md café\n" * rng.randint(2, 12), "exit_code": 0})


def one_slot(**options: object) -> CpuModel:
    """One slot, so that the shared prompt is read once; one thread, which is quickest where cores are contended."""
    return CpuModel(parallel=1, threads=1, context_tokens=1024, **options)


def recorder_for(model: CpuModel) -> Recorder:
    """A recorder on the model's own tokenizer."""
    return Recorder(model.backend(), probe_template(model.tokenizer), get_parser("hermes"))


async def loop_rollouts(model: CpuModel, count: int) -> list[tuple[int, RolloutRecord]]:
    """Rollouts through the loop: few-shot turns, real calls when the model writes them, a small context."""
    recorder = recorder_for(model)
    records = []
    for number in range(count):
        loop = HermesAgentLoop(
            recorder,
            [TERMINAL],
            tool_handler=handler,
            sampling=Sampling(temperature=0.7, max_tokens=48, seed=number),
            limits=Limits(max_turns=3),
            context=ContextPolicy(max_tokens=460, low_water=0.9),
        )
        result = await loop.run(prompt(TASKS[number % len(TASKS)]))
        record = RolloutRecord(f"cpu{number}", "g", "cpu", "i", tools=[TERMINAL], **result.record_fields())
        records.append((number + 1, record))
    await recorder.close()
    return records


async def chatty_rollouts(model: CpuModel, count: int, turns: int = 3) -> list[tuple[int, RolloutRecord]]:
    """Short rollouts of several turns each, truncated now and then, whatever the model says."""
    recorder = recorder_for(model)
    records = []
    for number in range(count):
        rollout = Rollout(recorder, Random(number), context_tokens=85, max_tokens=10, tools=(), stop_at_length=0.0)
        rollout.sampling = replace(rollout.sampling, seed=number + 1)
        rollout.output = lambda: "ok"
        await rollout.play(turns)
        records.append((number + 1, rollout.record(f"chat{number}")))
    await recorder.close()
    return records
