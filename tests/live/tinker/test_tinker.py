"""A real Tinker API server (SkyRL's, on JAX) samples and judges a real SmolLM2. See tests/live/tinker/prepare.sh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records.record import RolloutRecord

HOME = Path(__file__).resolve().parents[3] / ".tools" / "tinker"
UV = shutil.which("uv") or str(Path(__file__).resolve().parents[3] / ".venv/bin/uv")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no Tinker here: bash tests/live/tinker/prepare.sh"),
]
SMALL = {"max_lora_adapters": 4, "max_lora_rank": 8, "train_micro_batch_size": 1}
"""Eight whole sequences at once were killed for their memory here."""

TRAIN = """
import asyncio, json, sys
import tinker
from environments.base import HermesAgentBaseEnv, HermesAgentEnvConfig
from environments.rollouts.rollouts import Rollouts
from environments.trainers.tinker import TinkerBackend, tinker_datum

class Vowels(HermesAgentBaseEnv):
    "Rewards differ from answer to answer, so that every group has something to learn."
    name = "vowels"
    async def setup(self): pass
    async def get_next_item(self): return {"id": "one"}
    def format_prompt(self, item): return "Say a few words about the sea."
    async def compute_reward(self, item, result, ctx):
        said = result.messages[-1]["content"] or "x"
        return sum(c in "aeiou" for c in said) / len(said)

async def main():
    training = await tinker.ServiceClient().create_lora_training_client_async(base_model=sys.argv[1], rank=8)
    async def sampler(name):
        return await training.save_weights_and_get_sampling_client_async(name=name)
    backend = TinkerBackend(await sampler("w0"), version="0")
    config = HermesAgentEnvConfig(
        group_size=4, max_token_length=512, max_tokens_per_turn=24, max_agent_turns=1, enabled_toolsets=["terminal"],
        tools_in_prompt=False, limits={"rollout_timeout_s": 1800}, group_deadline_s=3000)
    rollouts = Rollouts(Vowels(config), model=backend, tokenizer=training.get_tokenizer())
    async with rollouts:
        samples = await rollouts.group({"id": "one"}, 4)
        data = [tinker_datum(sample) for sample in samples]
        differences, losses = [], []
        for step in range(4):
            done = await (await training.forward_backward_async(data, "importance_sampling"))
            loss = 0.0
            for sample, found in zip(samples, done.loss_fn_outputs, strict=True):
                theirs = [0.0, *found["logprobs"].tolist()]
                for mask, lp, old in zip(sample.mask, theirs, sample.logprobs, strict=True):
                    if mask and step == 0:
                        differences.append(abs(lp - old))
                    loss -= mask * 2.718281828459045 ** (lp - old) * sample.advantage
            losses.append(loss)
            await (await training.optim_step_async(tinker.types.AdamParams(learning_rate=1e-3)))
        backend.use(await sampler("w1"), version="1")
        later = await rollouts.group({"id": "one"}, 2)
    weights = [[v for s in group for v in s.weights] for group in (samples, later)]
    print(json.dumps({"differences": differences, "losses": losses, "weights": weights}))
asyncio.run(main())
"""

COOKBOOK = """
import asyncio, json, sys
from pathlib import Path
from tinker_cookbook.rl.train import Config, main
from environments.trainers.one_by_one import close_all
from environments.trainers.tinker_cookbook import HermesDatasetBuilder

async def run():
    settings = ["--env.limits.rollout_timeout_s", "1800", "--env.data_path_to_save_groups", "kept.jsonl"]
    builder = HermesDatasetBuilder(
        environment=sys.argv[2], model_name=sys.argv[1], settings=settings, group_size=2, groups_per_batch=2, batches=2)
    await main(Config(
        learning_rate=1e-3, dataset_builder=builder, model_name=sys.argv[1], recipe_name="hermes", lora_rank=8,
        max_tokens=24, log_path="log", eval_every=0, save_every=0))
    await close_all()
asyncio.run(run())
lines = [json.loads(line) for line in Path("log/metrics.jsonl").read_text().splitlines()]
print(json.dumps([line for line in lines if "optim/kl_sample_train_v1" in line]))
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment variables that lead to the server."""
    folder = tmp_path_factory.mktemp("tinker")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # It reads its own parent's command line, which must be `uv run`.
    command = [UV, "run", "--no-project", "--python", str(HOME / "venv/bin/python"), "-m", "skyrl.tinker.api"]
    command += ["--base-model", str(HOME / "smollm2"), "--backend", "jax", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--database-url", f"sqlite:///{folder / 'tinker.db'}", "--checkpoints-base", str(folder / "kept")]
    command += ["--backend-config", json.dumps(SMALL)]
    # It starts its engine by the name `uv`.
    path = f"{Path(UV).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    address = f"http://127.0.0.1:{port}"
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as server,
    ):
        try:
            _wait_until_it_answers(server, f"{address}/api/v1/healthz", folder / "log")
            yield {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-none", "HF_HUB_OFFLINE": "1"}
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def _wait_until_it_answers(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)


def run(command: list[str], service: dict[str, str], folder: Path) -> Any:
    environ = {**os.environ, **service, "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_logprobs_are_equal_the_loss_falls_and_weights_are_named(service: dict[str, str], tmp_path: Path) -> None:
    found = run([str(HOME / "venv/bin/python"), "-c", TRAIN, str(HOME / "smollm2")], service, tmp_path)
    print(max(found["differences"]), len(found["differences"]), found["losses"])
    assert len(found["differences"]) > 20
    assert max(found["differences"]) < 1e-4
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][-1] < found["losses"][0] - 0.01
    assert found["weights"] == [["0"] * 4, ["1"] * 2]


def test_the_cookbooks_own_loop_trains_on_our_environment(service: dict[str, str], tmp_path: Path) -> None:
    """Its own figure of how far sampled and trained logprobs are apart says that every token came through."""
    command = [str(HOME / "cookbook/bin/python"), "-c", COOKBOOK, str(HOME / "smollm2"), "learn/smollm2"]
    first, second = run(command, service, tmp_path)
    print(first, second)
    assert abs(first["optim/kl_sample_train_v1"]) < 1e-4
    assert first["optim/kl_sample_train_v2"] < 1e-4
    records = [RolloutRecord.from_json(line) for line in (tmp_path / "kept.jsonl").read_bytes().splitlines()]
    assert len(records) == 8
    rewards = [record.score for record in records]
    assert first["env/all/reward/total"] == pytest.approx(sum(rewards[:4]) / 4)
    assert second["env/all/reward/total"] == pytest.approx(sum(rewards[4:]) / 4)


def test_train_check_says_exact_and_notices_what_is_spoiled(service: dict[str, str], tmp_path: Path) -> None:
    command = [
        str(HOME / "venv/bin/hermes-rl"),
        "train-check",
        "learn/smollm2",
        "--trainer",
        "tinker",
        "--groups",
        "1",
        "--json",
    ]
    command += ["--model", str(HOME / "smollm2"), "--env.limits.rollout_timeout_s", "1800", "--env.group_size", "2"]
    command += ["--env.group_deadline_s", "3000"]
    command += [word for control in ("swapped", "shifted", "wrong") for word in ("--control", control)]
    found = run(command, service, tmp_path)
    assert found["samples"]["exact"]
    assert abs(found["samples"]["ratio"] - 1) < 1e-4
    assert not any(found[control]["exact"] for control in ("swapped", "shifted", "wrong"))
