"""`learn` as a process, with a trainer that learns nothing: what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from agent_loop.records.record import RolloutRecord
from environments.apps.learn.learn_run import Clock, tracked_figures
from environments.apps.learn.run_folder import read_entries
from support.learn_program import LearnProcess, tiny_config
from support.own_packages import write_own_packages
from support.tokens_cpu import require_cpu_model

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def start(tmp_path):
    require_cpu_model()
    pytest.importorskip("jax", reason="jax is not installed (extra learn)")
    write_own_packages(tmp_path)  # the processes of a run must not import them
    started: list[LearnProcess] = []

    def begin(name: str, *flags: str, steps: int = 1, die_at: int = -1) -> LearnProcess:
        config = tiny_config(tmp_path / f"{name}.yaml", steps=steps)
        started.append(LearnProcess(config, tmp_path / name, *flags, die_at=die_at))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def records(path: Path) -> list[RolloutRecord]:
    return [RolloutRecord.from_json(line) for line in path.read_bytes().splitlines()]


def sampled(path: Path, version: str) -> list[tuple]:
    calls = [(r.item_id, c) for r in records(path) for c in r.sampled_calls if c.weights_version == version]
    return sorted((item, c.prompt_ids, c.sampled_ids, c.logprobs) for item, c in calls)


def gone(pids: list[int]) -> bool:
    """No process of these is left; one that only waits to be reaped counts as gone."""

    def alive(pid: int) -> bool:
        try:
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False

    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_two_runs_of_one_seed_sample_the_same_first_batch(start, tmp_path):
    stopped = start("one", steps=50)
    stopped.until("step", 1)
    children = stopped.children()
    assert len(children) >= 4
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.end() == 130, stopped.said()
    assert "`--resume` goes on after step" in stopped.events[-1]["lines"][0]
    assert gone(children)
    out = tmp_path / "one"
    steps = [entry["step"] for entry in read_entries(out) if entry["event"] == "step"]
    assert "<svg" in (out / "report.html").read_text()

    resumed = start("one", "--resume", steps=steps[-1] + 1)
    assert resumed.end() == 0, resumed.said()
    entries = [(entry["event"], entry["step"]) for entry in read_entries(out)]
    last = steps[-1] + 1
    assert sorted(entries) == sorted(
        [("evaluation", 0), *(("step", n) for n in range(1, last + 1)), ("evaluation", last)]
    )
    evaluated = records(out / "evaluations" / f"step-{last}.jsonl")
    assert {call.weights_version for record in evaluated for call in record.sampled_calls} == {str(last)}
    batch = sampled(out / "rollouts.jsonl", "0")
    assert len(batch) == 4
    later = {item for item, *_ in sampled(out / "rollouts.jsonl", str(steps[-1]))}
    assert later
    assert later.isdisjoint(item for item, *_ in batch)

    lost = start("dies", steps=2, die_at=2)
    lost.until("step", 1)
    children = lost.children()
    assert lost.end() == 1
    sentence = lost.said().strip().splitlines()[-1]
    assert sentence.startswith("hermes-rl: the trainer ended with exit code 3: the batch tastes bad")
    assert gone(children)
    assert sampled(tmp_path / "dies" / "rollouts.jsonl", "0") == batch


@pytest.mark.slow
def test_cheating_is_a_figure_of_each_step_and_ends_the_run_where_it_is_too_much(start, tmp_path):
    flags = ["--env.hack_meter.impossible", "0.5", "--env.hack_meter.stop_at", "0.9", "--env.hack_meter.least", "8"]
    run = start("cheated", "--environment", "support.learn_cheater:CheaterEnv", *flags, steps=60)
    assert run.end() == 1
    sentence = run.said().strip().splitlines()[-1]
    assert sentence.startswith("hermes-rl: the environment ended with exit code 1")
    assert "of the last 8 probed rollouts cheated (100.0 %), env.hack_meter.stop_at is 90 %" in sentence
    rates = [entry["hack_rate"] for entry in read_entries(tmp_path / "cheated") if entry["event"] == "step"]
    assert rates
    assert set(rates) <= {None, 1.0}
    probed = [r for r in records(tmp_path / "cheated" / "rollouts.jsonl") if r.probe]
    assert {(r.probe, r.hack) for r in probed} == {("impossible", "passed an impossible item")}
    status = json.loads((tmp_path / "cheated" / "status.json").read_bytes())["facts"]
    assert status["rejected"]["probe"] == len({r.group_id for r in probed})  # none of them was sent


def test_a_killed_run_leaves_no_process(start):
    run = start("killed", steps=50)
    run.until("step", 1)
    children = run.children()
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    assert gone(children)


def test_no_step_is_started_that_would_end_too_late():
    clock = Clock(minutes=1.0)
    assert clock.another_step_fits()
    clock.step_took(20.0)
    clock.evaluation_took(30.0)
    assert clock.another_step_fits()
    clock.evaluation_took(41.0)
    assert not clock.another_step_fits()
    assert Clock(None, earlier_s=90.0).elapsed_s >= 90.0


def test_trackers_get_steps_and_held_out_figures_under_names_of_their_own():
    step = {"event": "step", "step": 3, "reward": 0.5, "loss": 0.1}
    assert tracked_figures(step) == {"learn/event": "step", "learn/reward": 0.5, "learn/loss": 0.1}
    evaluation = {
        "event": "evaluation",
        "step": 3,
        "success": 0.6,
        "by_kind": {"sort": {"success": 0.2, "rollouts": 8}},
    }
    figures = tracked_figures(evaluation)
    assert (figures["held_out/success"], figures["held_out/sort/success"]) == (0.6, 0.2)
    assert not any(key.startswith("learn/") for key in figures)
