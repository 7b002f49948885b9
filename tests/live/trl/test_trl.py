"""The real TRL with a real SmolLM2. Prepared by tests/live/trl/prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records.record import RolloutRecord
from environments.apps.learn.run_folder import read_entries
from support.learn_rise import rise_in_standard_errors

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[2] / ".tools" / "trl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no TRL here: bash tests/live/trl/prepare.sh"),
]


def run(folder: Path, *command: str) -> str:
    """What a command of TRL's own environment printed."""
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "HF_HUB_OFFLINE": "1"}
    words = [str(HOME / "venv/bin" / command[0]), *command[1:]]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = ["hermes-rl", "train-check", "learn/smollm2", "--trainer", "trl", "--groups", "1", "--json"]
    command += ["--model", str(HOME / "smollm2"), "--openai.options.weights", "F16"]
    command += [word for control in ("swapped", "shifted", "wrong") for word in ("--control", control)]
    found: dict[str, Any] = json.loads(run(tmp_path_factory.mktemp("trl"), *command).splitlines()[-1])
    return found


def test_trls_own_ratio_is_one(judged: dict[str, Any]) -> None:
    found = judged["samples"]
    assert found["tokens"] > 0
    assert abs(found["ratio"] - 1) < 1e-3
    assert found["kl"] < 1e-3


@pytest.mark.parametrize("control", ["swapped", "shifted", "wrong"])
def test_what_is_spoiled_does_not_pass(judged: dict[str, Any], control: str) -> None:
    found = judged[control]
    assert abs(found["ratio"] - 1) > 1e-3 or found["kl"] > 1e-3
    assert "position" in found["off"]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps: AsyncGRPOTrainer with our rollouts, weights and all."""
    folder = tmp_path_factory.mktemp("learned")
    sizes = ["--steps", "2", "--trainer.groups_per_step", "2", "--learn.eval_items", "2", "--learn.eval_samples", "4"]
    run(folder, "hermes-rl", "learn", "--trainer", "trl", "--out", "run", *sizes)
    return folder / "run"


def test_inside_asyncgrpotrainer_the_first_step_finds_the_logprobs_that_were_sampled(learned: Path) -> None:
    first, second = [entry for entry in read_entries(learned) if entry["event"] == "step"]
    assert abs(first["ratio_mean"] - 1) < 1e-3
    assert first["kl"] < 1e-3
    assert (first["step"], second["step"]) == (1, 2)


def test_what_was_trained_is_what_the_server_samples_from(learned: Path) -> None:
    """Logprobs of the last evaluation are those of the adapter that TRL saved, and not those of the first weights."""
    records = [
        RolloutRecord.from_json(line) for line in (learned / "evaluations/step-2.jsonl").read_bytes().splitlines()
    ]
    assert {call.weights_version for record in records for call in record.sampled_calls} == {"2"}
    program = str(HERE / "adapter_logprobs.py")
    adapter, evaluation = str(learned / "adapter"), str(learned / "evaluations/step-2.jsonl")
    found = json.loads(run(learned, "python", program, str(HOME / "smollm2"), adapter, evaluation).splitlines()[-1])
    assert found["tokens"] > 0
    assert found["with_adapter"] < 0.01 < found["without"]


def test_held_out_success_rises_within_twenty_minutes(tmp_path: Path) -> None:
    """The two cores must be free: beside other work the same steps take longer, and fewer of them are made."""
    flags = ["--minutes", "20", "--learn.eval_every", "0", "--learn.eval_samples", "4"]
    run(tmp_path, "hermes-rl", "learn", "--trainer", "trl", "--out", "run", *flags)
    entries = read_entries(tmp_path / "run")
    assert rise_in_standard_errors(entries, rollouts=132) > 3.0
    for step in (entry for entry in entries if entry["event"] == "step"):
        assert abs(step["ratio_mean"] - 1) < 0.02  # a part of each batch is one step old


def test_environment_factory_in_a_real_grpotrainer(tmp_path: Path) -> None:
    """The oracle gets 1.0, who gives up 0.0, and tool output is not trained."""
    program = str(HERE / "environment_factory.py")
    found = json.loads(run(tmp_path, "python", program, str(HOME / "smollm2")).splitlines()[-1])
    assert found["rewards"] == [1.0, 0.0, 1.0, 0.0]
    assert found["mean"] == 0.5
    for all_tokens, trained in found["masks"]:
        assert 0 < trained < all_tokens


def test_weights_travel_to_vllm_as_trl_sends_them_while_our_rollouts_wait(tmp_path: Path) -> None:
    found = json.loads(run(tmp_path, "python", str(HERE / "vllm_protocol.py")).splitlines()[-1])
    [tensors] = set(found["sent"])
    once = ["pause keep", "start_weight_update", f"update_weights {tensors}", "finish_weight_update", "resume"]
    assert found["calls"] == ["init_weight_transfer_engine", *once * (found["steps"] + 1)]
    assert (found["steps"], found["version"], found["lost"]) == (2, 3, 0)


def test_whole_weights_reach_the_cpu_server(tmp_path: Path) -> None:
    """TRL's own names and order of a Llama's weights, back into the GGUF they came from: nothing changes."""
    program = """
import sys
from pathlib import Path
import gguf, numpy as np
from transformers import AutoModelForCausalLM
from agent_loop.local_models.cpu_model.weights import gguf_tensors, smollm2_gguf
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
found = gguf_tensors(smollm2_gguf(), ((name, p.detach().float().numpy()) for name, p in model.named_parameters()))
for tensor in gguf.GGUFReader(smollm2_gguf()).tensors:
    stored = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(found[tensor.name].shape)
    assert np.allclose(stored, found[tensor.name], atol=1e-6), tensor.name
"""
    run(tmp_path, "python", "-c", program, str(HOME / "smollm2"))
