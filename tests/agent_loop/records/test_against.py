"""`verify --against`: the model itself says whether the stored tokens are what it saw."""

from __future__ import annotations

import argparse
import asyncio
import json
from random import Random

import pytest

from agent_loop.local_models.standin import StandIn
from agent_loop.local_models.standin.policies import wild
from agent_loop.model.backends import SGLangBackend, VllmBackend, VllmGenerateBackend
from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import ModelRefused
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.records.against import choose_places, confirm
from agent_loop.records.record import RolloutRecord
from environments.apps.cli import verify as verb
from environments.errors import UsageError
from support.tokens_corrupt import CONSISTENT_FAULTS, corrupted, follows_itself
from support.tokens_rollouts import Rollout
from tool_parsers import get_parser


async def rollouts(server: StandIn, count: int = 4) -> list[tuple[int, RolloutRecord]]:
    recorder = Recorder(VllmBackend(server.url), probe_template(server.tokenizer), get_parser("hermes"))
    stored = []
    for number in range(count):
        rollout = Rollout(recorder, Random(number), context_tokens=700)
        await rollout.play(6)
        stored.append((number + 1, rollout.record(f"r{number}")))
    await recorder.close()
    return stored


@pytest.mark.parametrize("kind", [VllmBackend, SGLangBackend])
async def test_the_model_confirms_what_it_sampled(kind):
    async with StandIn(wild) as server:
        records = await rollouts(server)
        backend = kind(server.url)
        confirmation = await confirm(records, backend, positions=200)
        await backend.close()
    assert confirmation.violation is None
    assert len(confirmation.differences) == 200
    assert confirmation.largest.size == pytest.approx(0.0, abs=1e-9)
    assert "noise floor" in confirmation.tolerance.said


@pytest.mark.parametrize("fault", CONSISTENT_FAULTS, ids=lambda f: f.__name__)
async def test_the_model_contradicts_a_fault_that_is_consistent_in_itself(fault):
    async with StandIn(wild) as server:
        records = await rollouts(server, 8)
        line, record = next((k, r) for k, r in records if follows_itself(r))
        backend = VllmBackend(server.url)
        confirmation = await confirm([(line, corrupted(record, fault))], backend)
        await backend.close()
    assert confirmation.violation is not None
    assert f"line {line} (rollout {record.rollout_id})" in confirmation.violation


async def test_a_server_that_cannot_score_is_refused():
    async with StandIn() as server:
        backend = VllmGenerateBackend(server.url)
        with pytest.raises(ModelRefused, match="cannot give logprobs"):
            await confirm([], backend)
        await backend.close()


def test_positions_are_sampled_tokens_chosen_by_the_seed():
    record = RolloutRecord("r", "g", "e", "i", "finished", True, [])
    from agent_loop.model.contract import Segment

    record.segments = [Segment([5, 6, 7, 8], [-100, 6, -100, 8], [1.0, -0.1, 1.0, -0.2])]
    places = choose_places([(1, record)], 10, seed=0)
    assert [(p.position, p.logprob) for p in places] == [(1, -0.1), (3, -0.2)]
    record.segments *= 50
    assert choose_places([(1, record)], 7, seed=1) == choose_places([(1, record)], 7, seed=1)
    assert choose_places([(1, record)], 7, seed=1) != choose_places([(1, record)], 7, seed=2)


class NoisyBackend:
    """Reading differs from writing by a fixed amount, as on quantized weights."""

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self.temperatures: list[float] = []

    async def generate(self, prompt_ids, sampling, *, stop_ids=()) -> Generation:
        self.temperatures.append(sampling.temperature)
        return Generation([7] * 8, [-1.0] * 8, "length")

    async def score(self, ids, positions) -> list[float]:
        return [-1.0 + self.noise for _ in positions]

    async def close(self) -> None:
        pass


def noisy_record(logprob: float) -> list[tuple[int, RolloutRecord]]:
    from agent_loop.model.contract import Segment
    from agent_loop.records.record import SampledCall

    record = RolloutRecord("r", "g", "e", "i", "finished", True, [], has_tokens=True)
    record.segments = [Segment([5, 6], [-100, 6], [1.0, logprob])]
    record.sampled_calls = [SampledCall(0, [5], [6], [logprob], "stop")]
    return [(1, record)]


async def test_on_noisy_weights_the_noise_floor_is_the_tolerance_and_said():
    confirmation = await confirm(noisy_record(-1.0), NoisyBackend(0.2))
    assert confirmation.violation is None
    assert "mean 0.2000, largest 0.2000" in confirmation.tolerance.said


async def test_the_noise_floor_is_measured_at_the_temperature_of_the_file():
    records = noisy_record(-1.0)
    records[0][1].sampled_calls[0].temperature = 2.0
    backend = NoisyBackend(0.0)
    await confirm(records, backend)
    assert backend.temperatures == [2.0]


async def test_beyond_the_noise_floor_is_a_violation():
    confirmation = await confirm(noisy_record(-2.0), NoisyBackend(0.2))
    assert "position 1" in confirmation.violation


async def test_a_given_tolerance_is_used_as_it_is():
    confirmation = await confirm(noisy_record(-1.0), NoisyBackend(0.2), tolerance=0.1)
    assert confirmation.violation is not None
    assert confirmation.tolerance.said == "given"


async def test_a_drift_below_the_largest_difference_is_seen_in_the_mean():
    confirmation = await confirm(noisy_record(-1.015), NoisyBackend(0.0))
    assert "mean difference" in confirmation.violation


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(words))


async def test_the_command_asks_the_server_and_fails_on_a_fault(tmp_path, capsys):
    async with StandIn(wild) as server:
        records = await rollouts(server, 8)
        path = tmp_path / "rollouts.jsonl"
        path.write_bytes(b"\n".join(r.to_json() for _, r in records))
        assert await asyncio.to_thread(run, str(path), "--against", server.url, "--json") == 0
        assert json.loads(capsys.readouterr().out)["against"]["positions"] == 300
        broken = [corrupted(r, CONSISTENT_FAULTS[1]) for _, r in records if follows_itself(r)]
        path.write_bytes(b"\n".join(r.to_json() for r in broken))
        assert await asyncio.to_thread(run, str(path), "--against", server.url) == 1
        printed = capsys.readouterr().out
    assert "asked the model again at" in printed
    assert "the model says" in printed


async def test_an_address_where_nobody_answers_is_bad_input(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    async with StandIn(wild) as server:
        path.write_bytes((await rollouts(server, 1))[0][1].to_json())
    with pytest.raises(UsageError, match="--against"):
        await asyncio.to_thread(run, str(path), "--against", "http://127.0.0.1:9")


async def test_a_file_without_tokens_has_nothing_to_ask_about(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    turn = {"turn": 1, "model_s": 0.0}
    path.write_bytes(RolloutRecord("r", "g", "e", "i", "finished", True, [], turns=[turn]).to_json())
    with pytest.raises(UsageError, match="nothing to ask"):
        await asyncio.to_thread(run, str(path), "--against", "http://127.0.0.1:9")
