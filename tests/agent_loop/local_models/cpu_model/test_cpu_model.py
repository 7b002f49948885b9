"""A real model on a real llama.cpp server: the model itself confirms what was recorded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from agent_loop.local_models.cpu_model import CpuModel, CpuModelError, CpuModelMissing, weights
from agent_loop.model.backends import connect
from agent_loop.model.backends.http import JsonClient
from agent_loop.model.contract import ContextTooLong, ModelUnavailable, Sampling
from agent_loop.records.against import confirm
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import Report
from support.tokens_corrupt import CONSISTENT_FAULTS, corrupted, follows_itself
from support.tokens_cpu import chatty_rollouts, loop_rollouts, one_slot, require_cpu_model, several_slots

TIGHT = 0.02


@pytest.fixture(autouse=True)
def _model() -> None:
    require_cpu_model()


def assert_sound(records: list[tuple[int, RolloutRecord]]) -> Report:
    report = Report()
    for line, record in records:
        report.add(record, line)
    assert report.ok, report.violations[:1]
    return report


async def confirm_on(model: CpuModel, records, positions: int, tolerance: float | None = TIGHT):
    backend = await connect(model.url)
    try:
        return await confirm(records, backend, positions=positions, tolerance=tolerance)
    finally:
        await backend.close()


async def check_exact(model: CpuModel, records, positions: int) -> None:
    """Every record is sound, and the model gives each stored token the stored logprob."""
    report = assert_sound(records)
    assert report.segments > len(records), "no rollout was truncated"
    assert report.calls >= 2 * len(records), "the rollouts have too few turns"
    confirmation = await confirm_on(model, records, positions)
    assert len(confirmation.differences) == positions
    assert confirmation.violation is None
    print(
        f"\n{len(records)} rollouts, {report.calls} turns, {report.segments} segments, {positions} positions: ", end=""
    )
    print(f"mean {confirmation.mean:.4f}, largest {confirmation.largest.size:.4f}")


async def check_faults(model: CpuModel, records, rollouts: int = 3) -> None:
    """The model contradicts each fault that is consistent in itself, put into a few rollouts."""
    chosen = [(line, record) for line, record in records if follows_itself(record)][:rollouts]
    for fault in CONSISTENT_FAULTS:
        broken = [(line, corrupted(record, fault)) for line, record in chosen]
        confirmation = await confirm_on(model, broken, 15 * rollouts)
        assert confirmation.violation is not None, fault.__name__


@pytest.mark.ci
@pytest.mark.timeout(600)
async def test_the_model_confirms_its_rollouts_and_contradicts_faults():
    async with one_slot(f16=True) as model:
        records = await chatty_rollouts(model, 5)
        await check_exact(model, records, 25)
        await check_faults(model, records)


@pytest.mark.ci
@pytest.mark.timeout(600)
async def test_the_logprobs_are_the_models_own_at_every_temperature():
    async with one_slot(f16=True) as model:
        for temperature in (0.5, 2.0):
            records = await chatty_rollouts(model, 2, temperature=temperature)
            assert_sound(records)
            assert {call.temperature for _, record in records for call in record.sampled_calls} == {temperature}
            assert (await confirm_on(model, records, 8)).violation is None
            scaled = [(line, corrupted(record, scale_logprobs)) for line, record in records]
            assert (await confirm_on(model, scaled, 8)).violation is not None


def scale_logprobs(record: RolloutRecord) -> None:
    """As if they were another temperature's."""
    for segment in record.segments:
        segment.logprobs = [p if p == 1.0 else p * 0.7 for p in segment.logprobs]


@pytest.mark.timeout(300)
async def test_entropies_are_at_most_those_of_the_whole_vocabulary_and_near_them():
    async with one_slot() as model:
        backend = await connect(model.url)
        try:
            prompt = model.tokenizer.encode("The capital of France is", add_special_tokens=False)
            asked = Sampling(max_tokens=6, temperature=1.0, seed=4, extra_body={"n_probs": 20})
            told = await backend.generate(prompt, asked)
            plain = await backend.generate(prompt, replace(asked, extra_body={}))
            # Last: after an answer of this size the server closes the connection.
            whole = await backend.generate(prompt, replace(asked, extra_body={"n_probs": 49_152}))
        finally:
            await backend.close()
    assert told.token_ids == whole.token_ids == plain.token_ids
    assert len(told.entropies) == len(told.token_ids) == 6
    assert max(whole.entropies) > 1.0
    for lower, true in zip(told.entropies, whole.entropies, strict=True):
        assert 0.5 * true <= lower <= true + 1e-3
    assert plain.entropies == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_the_model_confirms_50_rollouts_of_the_loop_at_300_positions_within_two_hundredths():
    async with several_slots(f16=True) as model:
        records = await loop_rollouts(model, 50)
        assert sum(len(record.truncations) for _, record in records) >= 25
        assert sum(len(record.tool_calls) for _, record in records) >= 50
        await check_exact(model, records, 300)
        await check_faults(model, records, rollouts=6)


@pytest.mark.ci
@pytest.mark.timeout(600)
async def test_rollouts_of_the_real_model_through_the_loop_are_exact():
    async with several_slots(f16=True) as model:
        records = await loop_rollouts(model, 2)
        assert_sound(records)
        assert (await confirm_on(model, records, 12)).violation is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_on_quantized_weights_the_tolerance_is_the_measured_noise_floor():
    async with one_slot() as model:
        records = await chatty_rollouts(model, 10)
        confirmation = await confirm_on(model, records, 60, tolerance=None)
    assert confirmation.violation is None
    assert "noise floor of this server" in confirmation.tolerance.said
    assert confirmation.tolerance.largest >= TIGHT


@pytest.mark.timeout(300)
async def test_the_tokenizer_gives_the_servers_own_ids():
    pieces = [
        "abc",
        " the",
        "'s",
        "0123",
        "\n\n",
        "\t ",
        "é",
        "日本",
        "🙂",
        "{}",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "\r\n",
    ]
    rng = Random(0)
    async with one_slot() as model:
        client = JsonClient(model.url)
        for _ in range(60):
            text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 40)))
            answer = await client.post("/tokenize", {"content": text, "parse_special": True, "add_special": False})
            ids = model.tokenizer.encode(text, add_special_tokens=False)
            assert ids == answer["tokens"]
            assert model.tokenizer.decode(ids) == text
        await client.close()


@pytest.mark.timeout(300)
async def test_a_prompt_beyond_the_servers_context_is_told_as_such():
    async with one_slot() as model:
        backend = model.backend()
        assert await backend.context_tokens() == 1024
        with pytest.raises(ContextTooLong):
            await backend.generate([5] * 1100, Sampling(max_tokens=4))
        await backend.close()


@pytest.mark.timeout(300)
async def test_a_generation_that_ends_inside_a_character_gives_no_logprob_a_wrong_place():
    """Emoji are several tokens here: cutting after each count of tokens hits the inside of some character."""
    async with one_slot() as model:
        backend = model.backend()
        prompt = model.tokenizer.encode("🙂 日本 🙂 日本 🙂 日本 🙂 日本 🙂 日本")
        for count in range(1, 8):
            generation = await backend.generate(prompt, Sampling(temperature=0.0, max_tokens=count))
            assert len(generation.token_ids) == len(generation.logprobs)
            known = [k for k, p in enumerate(generation.logprobs) if p is not None]
            places = [len(prompt) + k for k in known]
            again = await backend.score([*prompt, *generation.token_ids], places)
            assert [generation.logprobs[k] for k in known] == pytest.approx(again, abs=0.6)
        await backend.close()


# -- life of the server process --------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int) -> None:
    """A process that is not our child tells nobody when it ends, so it is looked for."""
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.mark.timeout(300)
async def test_the_server_ends_with_its_block():
    async with one_slot() as model:
        pid = model.pid
        assert pid is not None
        assert alive(pid)
    wait_gone(pid)


@pytest.mark.timeout(300)
async def test_a_server_that_dies_is_started_again_at_its_address():
    async with one_slot() as model:
        keeping = asyncio.create_task(model.keep_alive())
        backend = model.backend()
        try:
            pid, url = model.pid, model.url
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while model.pid in (pid, None) or await backend_says_no(backend):  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(0.05)
            assert model.url == url
            assert alive(model.pid)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await backend.close()


async def backend_says_no(backend) -> bool:
    try:
        return not (await backend.generate([1, 2, 3], Sampling(max_tokens=1))).token_ids
    except ModelUnavailable:
        return True


@pytest.mark.timeout(300)
def test_the_server_dies_with_an_owner_that_is_killed():
    program = (
        "import asyncio\nfrom agent_loop.local_models.cpu_model import CpuModel\n"
        "async def main():\n async with CpuModel(parallel=1, threads=1) as m:\n"
        "  print(m.pid, flush=True)\n  await asyncio.sleep(600)\nasyncio.run(main())"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(owner.stdout.readline())
        assert alive(pid)
        os.kill(owner.pid, signal.SIGKILL)
        wait_gone(pid)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


async def test_a_server_that_cannot_start_says_why(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF nothing else")
    with pytest.raises(CpuModelError, match="did not start"):
        async with CpuModel(model=broken, parallel=1):
            pass


def test_missing_weights_name_the_command_that_gets_them(monkeypatch):
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package_here")
    with pytest.raises(CpuModelMissing, match="hermes-rl model get"):
        weights.smollm2_gguf()


def test_a_half_written_copy_is_never_used(tmp_path, monkeypatch):
    def fail(source, target, type_name):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(weights, "write_as", fail)
    with pytest.raises(OSError, match="disk full"):
        weights.f16_copy(weights.smollm2_gguf(), tmp_path)
    assert list(tmp_path.iterdir()) == []
