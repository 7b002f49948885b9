"""Rollouts of the real CPU model: through the real loop, and played by hand where a test wants them quick."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from random import Random

import pytest

from agent_loop.context.window import ContextPolicy
from agent_loop.limits import Limits
from agent_loop.local_models.cpu_model import CpuModel, CpuModelMissing, smollm2_gguf
from agent_loop.loop import HermesAgentLoop
from agent_loop.model.contract import Message, Sampling
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.records.record import RolloutRecord
from support.loop_servers import record_of
from support.tokens_rollouts import TERMINAL, Rollout
from tool_parsers import get_parser

SYSTEM = "You run shell commands."
DONE_BEFORE = ("ls", "cat a.txt", "cat b.txt")
"""Commands that stand before every rollout: so small a model goes on calling when it sees calls."""
FOUND = ("pear", "plum\npeach", "remove c.txt", "see data.csv", "make a folder named out")
"""What the last of them printed: rollouts differ here and not before, so that what they share is read once."""
OUTPUTS = ("done", "a.txt b.txt c.txt", "apple\npear\ncafé")
AT_ONCE = 4


def require_cpu_model() -> None:
    """Skip the calling test where the model's packages are missing."""
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed (extra cpu-model)")
    pytest.importorskip("gguf", reason="gguf is not installed (extra cpu-model)")
    try:
        smollm2_gguf()
    except CpuModelMissing as missing:
        pytest.skip(str(missing))


def prompt(found: str) -> list[Message]:
    """A task with a few steps done."""
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "tidy up, step by step"},
    ]
    for number, (command, output) in enumerate(zip(DONE_BEFORE, ("a.txt b.txt", "apple", found), strict=True)):
        function = {"name": "terminal", "arguments": json.dumps({"command": command})}
        call = {"id": f"done_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"done_{number}", "content": output})
    return messages


async def handler(name: str, arguments: dict, task_id: str) -> str:
    """What the commands print."""
    return Random(json.dumps(arguments, sort_keys=True, default=str)).choice(OUTPUTS)


def one_slot(**options: object) -> CpuModel:
    """One slot, so that the shared prompt is read once; one thread, which is quickest where cores are contended."""
    return CpuModel(parallel=1, threads=1, context_tokens=1024, **options)


def several_slots(**options: object) -> CpuModel:
    """As many slots as rollouts play at once, so that each finds what it has read before."""
    return CpuModel(parallel=AT_ONCE, threads=1, context_tokens=512, **options)


def recorder_for(model: CpuModel, **options: bool) -> Recorder:
    """A recorder on the model's own tokenizer."""
    return Recorder(model.backend(), probe_template(model.tokenizer), get_parser("hermes"), **options)


async def loop_rollouts(model: CpuModel, count: int, first_seed: int = 0) -> list[tuple[int, RolloutRecord]]:
    """Rollouts through the loop, several at once: real calls, and a context that holds two turns and no more."""
    recorder = recorder_for(model, write_tools=False)
    gate = asyncio.Semaphore(AT_ONCE)

    async def play(number: int) -> tuple[int, RolloutRecord]:
        """One rollout, as it is stored."""
        loop = HermesAgentLoop(
            recorder,
            [TERMINAL],
            tool_handler=handler,
            sampling=Sampling(temperature=0.7, max_tokens=40, seed=first_seed + number),
            limits=Limits(max_turns=3),
            context=ContextPolicy(max_tokens=280, low_water=0.7, keep_recent=4),
        )
        async with gate:
            result = await loop.run(prompt(FOUND[number % len(FOUND)]))
        return number + 1, record_of(result, f"cpu{number}", tools=[TERMINAL])

    records = await asyncio.gather(*(play(number) for number in range(count)))
    await recorder.close()
    return records


async def chatty_rollouts(
    model: CpuModel, count: int, turns: int = 3, temperature: float = 1.0
) -> list[tuple[int, RolloutRecord]]:
    """Short rollouts of several turns each, truncated now and then, whatever the model says."""
    recorder = recorder_for(model)
    records = []
    for number in range(count):
        rollout = Rollout(recorder, Random(number), context_tokens=85, max_tokens=10, tools=(), stop_at_length=0.0)
        rollout.sampling = replace(rollout.sampling, seed=number + 1, temperature=temperature)
        rollout.output = lambda: "ok"
        await rollout.play(turns)
        records.append((number + 1, rollout.record(f"chat{number}")))
    await recorder.close()
    return records
