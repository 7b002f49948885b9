"""The same rollouts on a real vLLM: exact to its own prompt logprobs. Prepared by tests/live/vllm/prepare.sh."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from agent_loop.local_models.cpu_model.llama_server import free_port
from agent_loop.local_models.standin.chatml import chatml_template
from agent_loop.model.backends import VllmBackend, VllmScaleOutBackend, connect
from agent_loop.model.backends.http import Echo, JsonClient
from agent_loop.model.contract import ContextTooLong, ModelError, ModelRefused, Sampling
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.records.against import confirm
from agent_loop.records.verify import Report
from support.tokens_corrupt import CONSISTENT_FAULTS, corrupted, follows_itself
from support.tokens_rollouts import Rollout
from tool_parsers import get_parser

HOME = Path(__file__).resolve().parents[3] / ".tools" / "vllm"
START_TIMEOUT_S = 900
TOLERANCE = 0.001
"""Float32: reading and writing are computed alike."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no real vLLM here: run `make vllm`"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A real vLLM server, ended with the module."""
    port = free_port()
    command = [str(HOME / "venv/bin/vllm"), "serve", str(HOME / "smollm2"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--served-model-name", "smollm2"]
    command += ["--enable-scale-out"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (HOME / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_up(url, process)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_up(url: str, process: subprocess.Popen) -> None:
    async def up() -> bool:
        client = JsonClient(url, timeout_s=5)
        try:
            await client.get("/v1/models")
        except ModelError:
            return False
        finally:
            await client.close()
        return True

    deadline = time.monotonic() + START_TIMEOUT_S
    while not asyncio.run(up()):
        assert process.poll() is None, (HOME / "server.log").read_text("utf-8", "replace")[-2000:]
        assert time.monotonic() < deadline, "vLLM did not come up"
        time.sleep(1)


def tokenizer():
    from transformers import AutoTokenizer

    built = AutoTokenizer.from_pretrained(HOME / "smollm2")
    built.chat_template = chatml_template()
    return built


async def play(backend, count: int, temperature: float = 1.0) -> list:
    recorder = Recorder(backend, probe_template(tokenizer()), get_parser("hermes"))
    records = []
    for number in range(count):
        rollout = Rollout(recorder, Random(number), context_tokens=85, max_tokens=10, tools=(), stop_at_length=0.0)
        rollout.sampling = replace(rollout.sampling, temperature=temperature)
        rollout.output = lambda: "ok"
        await rollout.play(3)
        records.append((number + 1, rollout.record(f"vllm{number}")))
    await recorder.close()
    return records


@pytest.mark.parametrize("kind", [VllmBackend, VllmScaleOutBackend])
async def test_rollouts_are_exact_to_the_servers_own_prompt_logprobs(server, kind):
    records = await play(kind(server), 6)
    report = Report()
    for line, record in records:
        report.add(record, line)
    assert report.ok, report.violations[:1]
    assert report.segments > len(records)
    backend = await connect(server)
    assert isinstance(backend, VllmBackend)
    confirmation = await confirm(records, backend, tolerance=TOLERANCE)
    line, record = next((k, r) for k, r in records if follows_itself(r))
    for fault in CONSISTENT_FAULTS:
        broken = await confirm([(line, corrupted(record, fault))], backend, tolerance=TOLERANCE)
        assert broken.violation is not None, fault.__name__
    await backend.close()
    print(f"\n{kind.__name__}: {len(confirmation.differences)} positions, largest {confirmation.largest.size:.6f}")
    assert confirmation.violation is None


@pytest.mark.parametrize("kind", [VllmBackend, VllmScaleOutBackend])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_the_logprobs_are_the_models_own_at_every_temperature(server, kind, temperature):
    records = await play(kind(server), 3, temperature)
    backend = await connect(server)
    confirmation = await confirm(records, backend, tolerance=TOLERANCE)
    await backend.close()
    assert confirmation.violation is None


async def test_a_prompt_beyond_the_context_is_told_as_such(server):
    backend = VllmBackend(server)
    with pytest.raises(ContextTooLong):
        await backend.generate([5] * 3000, Sampling(max_tokens=4))
    await backend.close()


async def test_the_echo_of_the_prompt_is_found_and_compared(server):
    client = JsonClient(server)
    model = (await client.get("/v1/models"))["data"][0]["id"]
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2, "return_token_ids": True}
    answer = await client.post("/v1/completions", body, echo=Echo("prompt_token_ids", b"[5,6,7]"))
    assert answer["choices"][0]["prompt_token_ids"] is None
    with pytest.raises(ModelRefused, match="not the ids that were sent"):
        await client.post("/v1/completions", body, echo=Echo("prompt_token_ids", b"[5,6]"))
    await client.close()
