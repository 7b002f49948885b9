"""verl's real classes with our rollouts, and its own arithmetic as the judge. See tests/live/verl/prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from support.page_commands import python_calls

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / ".tools" / "verl"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no verl here: bash tests/live/verl/prepare.sh"),
]


def run(command: list[str], folder: Path) -> str:
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "HF_HUB_OFFLINE": "1"}
    environ["PYTHONPATH"] = str(ROOT / "tests")
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("verl")
    out = folder / "made.json"
    run([str(HOME / "venv/bin/python"), str(Path(__file__).parent / "worker.py"), str(folder), str(out)], folder)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_verls_batch_holds_exactly_what_its_server_gave(made: dict[str, Any]) -> None:
    """Every row is one of the conversations that the server saw; only what it sampled is trained."""
    turns = defaultdict(list)
    for request, prompt, sampled, logprobs in made["log"]:
        turns[request].append((prompt, sampled, logprobs))
    seen = defaultdict(list)
    for own in turns.values():
        whole = own[-1][0] + own[-1][1]
        trained = {
            len(prompt) + place: logprob
            for prompt, sampled, logprobs in own
            for place, logprob in zip(range(len(sampled)), logprobs, strict=True)
        }
        seen[tuple(whole)].append(trained)
    assert len(made["input_ids"]) == 8
    for ids, attention, response, mask, logprobs in zip(
        *(made[key] for key in ("input_ids", "attention_mask", "responses", "response_mask", "rollout_log_probs")),
        strict=True,
    ):
        whole = tuple(token for token, there in zip(ids, attention, strict=True) if there)
        trained = seen[whole].pop()
        begins = len(whole) - sum(attention[len(ids) - len(response) :])
        assert {begins + place for place, value in enumerate(mask) if value} == set(trained)
        for place, value in trained.items():
            assert logprobs[place - begins] == pytest.approx(value, abs=1e-6)
    assert not any(seen.values())


def test_rewards_and_weights_are_verls(made: dict[str, Any]) -> None:
    rewards = [sum(row) for row in made["rm_scores"]]
    assert set(rewards) == {0.0, 1.0}
    assert made["max_global_steps"] == [3] * 8
    assert made["prompts"][1][-1] == {"role": "user", "content": "Write 1 into answer.txt"}


def test_train_check_says_exact_and_notices_what_is_spoiled(tmp_path: Path) -> None:
    command = [str(HOME / "venv/bin/hermes-rl"), "train-check", "learn/smollm2", "--trainer", "verl"]
    command += ["--groups", "1", "--json", "--openai.options.weights", "F16"]
    command += ["--model", str(HOME / "smollm2"), "--env.limits.rollout_timeout_s", "1200", "--env.group_size", "2"]
    command += [word for control in ("swapped", "shifted", "wrong") for word in ("--control", control)]
    found = json.loads(run(command, tmp_path).splitlines()[-1])
    assert found["samples"]["exact"]
    assert not any(found[control]["exact"] for control in ("swapped", "shifted", "wrong"))


def test_verls_own_configuration_takes_the_commands_of_the_page(tmp_path: Path) -> None:
    calls = python_calls("verl.md")
    assert len(calls) == 2
    for words, gpus in zip(calls, ("1", "8"), strict=True):
        said = run([str(HOME / "venv/bin/python"), *words, "--cfg", "job"], tmp_path)
        assert f"n_gpus_per_node: {gpus}" in said
        assert "agent_loop_config_path: agent.yaml" in said
