"""The server's own log against the segments: random rollouts with truncation, parallel calls and errors."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random

import pytest

from agent_loop.local_models.standin import PolicyRequest, StandIn
from agent_loop.local_models.standin.policies import failing, wild
from agent_loop.model.backends import BACKENDS
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import Report
from support.tokens_rollouts import Rollout
from tool_parsers import get_parser

CONCURRENT = 16


async def replay(count: int, kind: str, seed: int) -> tuple[int, Report, list[Rollout]]:
    """Play rollouts and compare; the number of differences, the report on the stored lines, and the rollouts."""
    async with StandIn(failing(wild, every=9), seed=seed) as server:
        recorder = Recorder(BACKENDS[kind](server.url), probe_template(server.tokenizer), get_parser("hermes"))
        gate = asyncio.Semaphore(CONCURRENT)

        async def one(number: int) -> Rollout:
            async with gate:
                rollout = Rollout(recorder, Random(f"{seed} {number}"), context_tokens=900)
                await rollout.play(rollout.rng.randint(1, 8))
                return rollout

        rollouts = await asyncio.gather(*(one(number) for number in range(count)))
        await recorder.close()
        answered = sorted((e.prompt_ids, e.sampled_ids, e.logprobs) for e in server.log if e.status == 200)
    report = Report()
    stored = []
    for number, rollout in enumerate(rollouts):
        record = RolloutRecord.from_json(rollout.record(f"r{number}").to_json())
        report.add(record, number + 1)
        stored += [(c.prompt_ids, c.sampled_ids, c.logprobs) for c in record.sampled_calls]
    stored.sort()
    differences = abs(len(stored) - len(answered)) + sum(a != b for a, b in zip(stored, answered, strict=False))
    return differences, report, rollouts


def check(differences: int, report: Report, rollouts: list[Rollout], count: int) -> None:
    assert differences == 0
    assert report.ok, report.violations[:1]
    assert report.rollouts == report.with_tokens == count
    assert report.segments > count, "no rollout was truncated"
    assert sum(r.failures for r in rollouts) > 0, "no request failed"


@pytest.mark.timeout(300)
async def test_300_random_rollouts_are_what_the_server_saw():
    check(*await replay(300, "vllm", 1), 300)


@pytest.mark.parametrize("kind", ["llamacpp", "vllm-scale-out", "vllm-generate", "sglang"])
async def test_random_rollouts_are_what_the_server_saw_in_every_dialect(kind):
    check(*await replay(40, kind, 2), 40)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_1000_random_rollouts_are_what_the_server_saw():
    check(*await replay(1000, "vllm", 3), 1000)


async def test_the_stand_in_plays_the_same_rollout_whatever_else_runs():
    _, _, alone = await replay(1, "vllm", 5)
    _, _, among_others = await replay(10, "vllm", 5)
    assert alone[0].messages == among_others[0].messages


async def test_sampled_text_is_not_always_written_with_the_tokenizers_own_tokens():
    """Otherwise the replay could not tell a recorder that tokenizes sampled text again."""
    async with StandIn(lambda _: "the current directory and the first lines " * 5, split_share=0.3) as server:
        sample = await server.sample("/", [1, 2], {}, max_tokens=500)
    assert server.tokenizer.encode(sample.text) != sample.ids[:-1]
    assert server.tokenizer.decode(sample.ids[:-1]) == sample.text


async def test_what_is_sent_grows_only_by_glue_and_samples():
    """Each prompt of a segment is the one before, its sample, and glue: nothing is sent that is not new or old."""

    def policy(request: PolicyRequest) -> str:
        return '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'

    async with StandIn(policy) as server:
        backend = BACKENDS["vllm"](server.url)
        recorder = Recorder(backend, probe_template(server.tokenizer), get_parser("hermes"))
        rollout = Rollout(recorder, Random(0), context_tokens=10**9)
        rollout.output = lambda: "ok"
        await rollout.play(30)
        await recorder.close()
    steps = pairwise(server.log)
    grown = [len(b.prompt_ids) - len(a.prompt_ids) - len(a.sampled_ids) for a, b in steps]
    assert len(set(grown)) == 1
