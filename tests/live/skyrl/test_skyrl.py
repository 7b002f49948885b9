"""SkyRL's own types and its own check of batches, with our rollouts. Prepared by tests/live/skyrl/prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.page_commands import blocks, python_calls

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / ".tools" / "skyrl"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no SkyRL here: bash tests/live/skyrl/prepare.sh"),
]

PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from skyrl.train.generators.base import GeneratorInterface, TrajectoryID
from skyrl.train.utils.trainer_utils import validate_generator_output
from agent_loop.local_models.standin import StandIn, chatml_tokenizer
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.contract import Sampling
from environments.trainers.one_by_one import close_all
from environments.trainers.item_rows import skyrl_rows
from environments.trainers.skyrl import SkyrlGenerator
from support.env_tasks import sometimes_right

class Client:
    "Stands where SkyRL has its inference client, which needs a GPU: the same call, the same answer."
    def __init__(self, backend): self.backend = backend
    async def generate(self, batch, model=None):
        params = batch["sampling_params"]
        [prompt], sampling = batch["prompt_token_ids"], Sampling(max_tokens=params["max_tokens"])
        made = await self.backend.generate(prompt, sampling, stop_ids=params["stop_token_ids"])
        ids, logprobs = [made.token_ids], [made.logprobs]
        return {"response_ids": ids, "stop_reasons": [made.finish_reason], "response_logprobs": logprobs}

async def main(config, rows):
    async with StandIn(sometimes_right) as standin:
        client = Client(VllmBackend(standin.url, model="standin"))
        for step_wise in (False, True):
            settings = [] if step_wise else ["--env.segments", "last"]
            generator = SkyrlGenerator(config, chatml_tokenizer(), client, settings, step_wise=step_wise)
            assert isinstance(generator, GeneratorInterface)
            ids = [TrajectoryID(str(n // 4), n % 4) for n in range(8)]
            batch = {"prompts": [rows[n // 4]["prompt"] for n in range(8)], "env_classes": ["hermes"] * 8,
                     "env_extras": [{"item": rows[n // 4]["item"]} for n in range(8)], "trajectory_ids": ids,
                     "sampling_params": {"temperature": 1.0, "max_generate_length": 99}, "batch_metadata": None}
            made = await generator.generate(batch)
            validate_generator_output(8, made, step_wise=step_wise)
        await close_all()
        await client.backend.close()
    print(json.dumps([made["rewards"], made["is_last_step"], sum(map(sum, made["loss_masks"]))]))
config = sys.argv[1]
asyncio.run(main(config, skyrl_rows(config, 2)))
"""


def test_skyrls_own_check_takes_our_batches(tmp_path: Path) -> None:
    config = tmp_path / "numbers.yaml"
    config.write_text("environment: support.env_tasks:NumbersFromConfig\nopenai: {server_type: standin}\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [str(HOME / "venv/bin/python"), "-c", PROGRAM, str(config)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rewards, last, trained = json.loads(done.stdout.splitlines()[-1])
    assert set(rewards) == {0.0, 1.0}
    assert last == [True] * 8
    assert trained > 0


COMMANDS = """
import json, runpy, sys
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import validate_cfg
own = runpy.run_path(sys.argv[1])
assert own["Experiment"].get_generator.__module__ == "<run_path>", "the entry point of the page"
found = []
for words in json.loads(sys.argv[2]):
    cfg = SkyRLTrainConfig.from_cli_overrides(words)
    validate_cfg(cfg)
    found.append([cfg.trainer.placement.policy_num_gpus_per_node, cfg.generator.inference_engine.num_engines])
print(json.dumps(found))
"""


def test_skyrls_own_parser_takes_the_commands_of_the_page(tmp_path: Path) -> None:
    [entry] = [block for block in blocks("skyrl.md", "python") if "class Experiment" in block]
    (tmp_path / "main.py").write_text(entry)
    calls = python_calls("skyrl.md")
    assert {words[0] for words in calls} == {"main.py"}
    words = ["-c", COMMANDS, "main.py", json.dumps([own[1:] for own in calls])]
    done = subprocess.run(
        [str(HOME / "venv/bin/python"), *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, 1], [8, 8], [4, 4]]
