"""The real TRL judges tokens of a real SmolLM2. Prepared by tests/live/trl/prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).resolve().parents[3] / ".tools" / "trl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no TRL here: bash tests/live/trl/prepare.sh"),
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trl")
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "HF_HUB_OFFLINE": "1"}
    command = [str(HOME / "venv/bin/hermes-rl"), "train-check", "demo", "--trainer", "trl", "--groups", "1", "--json"]
    command += ["--model", str(HOME / "smollm2"), "--env.limits.rollout_timeout_s", "1200"]
    command += [word for control in ("swapped", "shifted", "wrong") for word in ("--control", control)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
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
    command = [str(HOME / "venv/bin/python"), "-c", program, str(HOME / "smollm2")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
