"""The demo: every policy on the same tasks, exact tokens, a page; the real model too where its packages are."""

from __future__ import annotations

import importlib.util
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from agent_loop.local_models.standin.solver import WRITERS, solver
from agent_loop.records.record import RolloutRecord
from environments.apps.cli.demo import CONFIG, OWN_SETTINGS
from environments.apps.demo.demo_run import DemoPlan, run_demo
from environments.launch import load_environment


def plan(folder: Path, tasks: int, with_model: bool) -> DemoPlan:
    env = load_environment(CONFIG, [*OWN_SETTINGS, "--env.pool.state_dir", str(folder / "state")])
    return DemoPlan(env.config, env.server_configs[0], folder / "demo", tasks, with_model, model_s=5.0)


def stored(folder: Path) -> list[RolloutRecord]:
    return [RolloutRecord.from_json(line) for line in (folder / "demo/rollouts.jsonl").read_bytes().splitlines()]


async def test_scripted_policies_of_different_quality_score_differently(tmp_path: Path) -> None:
    said = io.StringIO()
    assert await run_demo(plan(tmp_path, 2, with_model=False), Console(file=said, width=120)) == 0
    by_policy: dict[str, list[float]] = {}
    for record in stored(tmp_path):
        by_policy.setdefault(record.policy, []).append(record.verifier_score or 0.0)
    means = {policy: sum(scores) / len(scores) for policy, scores in by_policy.items()}
    assert means["good (scripted)"] == 1.0
    assert means["malformed (scripted)"] < means["sloppy (scripted)"] <= 1.0
    assert re.search(r"24 rollouts, \d+ checks each: exact", said.getvalue())
    assert "isolation:" in said.getvalue()
    assert (tmp_path / "demo/report.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="the [cpu-model] extra is not installed")
async def test_the_real_model_acts_and_confirms_its_tokens(tmp_path: Path) -> None:
    said = io.StringIO()
    assert await run_demo(plan(tmp_path, 1, with_model=True), Console(file=said, width=120)) == 0, said.getvalue()
    real = [record for record in stored(tmp_path) if record.policy == "SmolLM2-135M"]
    assert real
    assert all(record.segments for record in real if record.trainable)
    assert "verify --against the model itself" in said.getvalue()


async def test_without_the_models_packages_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_loop.local_models.cpu_model import CpuModelMissing, UpdatableModel

    class Missing(UpdatableModel):
        async def __aenter__(self) -> Missing:
            raise CpuModelMissing("no CPU model here")

    monkeypatch.setattr("agent_loop.local_models.cpu_model.UpdatableModel", Missing)
    said = io.StringIO()
    assert await run_demo(plan(tmp_path, 1, with_model=True), Console(file=said, width=120)) == 0
    assert "real model: no CPU model here; going on with the scripted policies" in said.getvalue()


def test_a_policy_is_the_same_for_the_same_seed_and_knows_only_its_tasks() -> None:
    from agent_loop.local_models.standin import PolicyRequest
    from environments.terminal_tasks import TerminalTasks

    task = TerminalTasks("train", levels=[0])[0]
    text = f"<|im_start|>user\n{task.prompt}<|im_end|>\n<|im_start|>assistant\n"
    for writer in WRITERS.values():
        policy = solver({task.prompt: task.solution}, writer)
        turns = [policy(PolicyRequest(text, None, n, body={"seed": 7})) for n in (0, 99)]  # type: ignore[arg-type]
        assert turns[0] == turns[1]
        assert policy(PolicyRequest("something else", None, 0)) == "I do not know this task."  # type: ignore[arg-type]
