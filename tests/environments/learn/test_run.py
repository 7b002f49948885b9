"""`learn` as a process, with a trainer that learns nothing: what it leaves behind, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from agent_loop.records import RolloutRecord
from environments.learn.folder import read_entries
from support.learn_program import LearnProcess, tiny_config
from support.tokens_cpu import require_cpu_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def start(tmp_path):
    require_cpu_model()
    pytest.importorskip("jax", reason="jax is not installed (extra learn)")
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


def test_a_run_is_stored_goes_on_where_it_stopped_and_its_first_batch_can_be_had_again(start, tmp_path):
    first = start("one", steps=1)
    assert first.end() == 0, first.said()
    out = tmp_path / "one"
    assert [(e["event"], e["step"]) for e in read_entries(out)] == [("evaluation", 0), ("evaluation", 1), ("step", 1)]
    assert {c.weights_version for r in records(out / "evaluations" / "step-1.jsonl") for c in r.sampled_calls} == {"1"}
    batch = sampled(out / "rollouts.jsonl", "0")
    assert len(batch) == 4
    assert "<svg" in (out / "report.html").read_text()

    resumed = start("one", "--resume", steps=2)
    assert resumed.end() == 0, resumed.said()
    assert [(e["event"], e["step"]) for e in read_entries(out)][3:] == [("evaluation", 2), ("step", 2)]
    assert sampled(out / "rollouts.jsonl", "0") == batch
    later = {r.item_id for r in records(out / "rollouts.jsonl")[4:]}
    assert later
    assert later.isdisjoint(item for item, *_ in batch)

    again = start("again", steps=1)
    assert again.end() == 0, again.said()
    assert sampled(tmp_path / "again" / "rollouts.jsonl", "0") == batch


def test_a_lost_part_ends_the_run_with_one_sentence_and_leaves_no_process(start):
    run = start("dies", steps=2, die_at=2)
    run.until("step", 1)
    children = run.children()
    assert len(children) >= 4
    assert run.end() == 1
    sentence = run.said().strip().splitlines()[-1]
    assert sentence.startswith("hermes-rl: the trainer ended with exit code 3: the batch tastes bad")
    assert gone(children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process(start, number):
    run = start("stopped", steps=50)
    run.until("step", 1)
    children = run.children()
    os.kill(run.process.pid, number)
    code = run.end()
    if number == signal.SIGTERM:
        assert code == 130
        assert "`--resume` goes on after step" in run.events[-1]["lines"][0]
    assert gone(children)
