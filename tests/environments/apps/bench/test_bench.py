"""`hermes-rl bench`: figures with their targets, as a table or as JSON."""

from __future__ import annotations

import json

import pytest

from agent_loop import HermesAgentLoop
from environments.apps.bench import bench_loop
from environments.apps.bench.bench_loop import bench_server
from environments.apps.cli.bench import Figure, Report, as_table
from environments.apps.cli.main import main


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("text", marks=pytest.mark.slow),
        pytest.param("in-process", marks=pytest.mark.ci),
        pytest.param("stand-in", marks=pytest.mark.slow),
    ],
)
def test_bench_loop_reports_every_figure_as_json(capsys, monkeypatch, server):
    monkeypatch.setattr(bench_loop, "GROWTH_PAIRS", 1)
    monkeypatch.setattr(bench_loop, "GROWTH_ROLLOUTS", 1)
    sizes = ["--rollouts", "4", "--turns", "2", "--latency", "0.01", "--repeat", "2"]
    assert main(["bench", "loop", *sizes, "--server", server, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"] == {"server": server, "rollouts": 4, "turns": 2, "latency_s": 0.01, "repeat": 2}
    names = set(report["figures"])
    assert names >= {"wall_over_ideal", "cpu_per_turn", "stall_p99", "memory_per_rollout", "growth_60_over_10"}
    measured = {name: figure["value"] for name, figure in report["figures"].items()}
    measured.pop("memory_per_rollout")  # of four rollouts the process may give back more than it took
    assert all(value >= 0 for value in measured.values())
    assert 0 <= report["figures"]["cpu_taken"]["value"] <= 100
    assert report["figures"]["wall_slowest"]["value"] >= report["figures"]["wall"]["value"]


async def test_the_stand_in_runs_as_a_process_of_its_own_and_answers_with_tokens():
    async with bench_server("stand-in", 0.0) as server:
        loop = HermesAgentLoop(server, max_turns=1)
        result = await loop.run([{"role": "user", "content": "hello"}])
    assert result.has_tokens, result.error


def test_a_missed_target_is_shown(capsys):
    table = as_table(Report("x", {"size": 3, "kind": "k"}, (Figure("slow", 9.0, "ms", 1.0), Figure("free", 2.0, "KB"))))
    assert "target <= 1: MISSED" in table
    assert "size 3, kind k" in table


def test_a_bad_size_is_one_sentence_and_exit_2(capsys):
    assert main(["bench", "loop", "--rollouts", "0"]) == 2
    assert "--rollouts" in capsys.readouterr().err


def test_an_unknown_bench_names_the_known_ones(capsys):
    assert main(["bench", "nope"]) == 2
    assert "loop" in capsys.readouterr().err
