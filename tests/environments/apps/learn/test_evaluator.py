"""Figures of an evaluation, and the rollouts they are made from."""

from __future__ import annotations

import pytest

from environments.apps.learn.evaluator import RolloutTail, evaluation_figures, shared_prompt
from support.env_records import record


def test_success_is_the_verifiers_word_over_all_and_by_kind():
    parsed = {"tool_calls_attempted": 1.0, "tool_calls_schema_valid": 1.0}
    rollouts = [
        record("a/0", item_id="a", score=1.2, verifier_score=1.0, metrics=parsed),
        record("a/1", item_id="a", score=0.2, verifier_score=0.0, metrics=parsed),
        record("b/0", item_id="b", score=0.2, verifier_score=0.0, metrics={"tool_calls_attempted": 0.0}),
    ]
    figures = evaluation_figures(rollouts, {"a": "sort", "b": "copy"})
    assert figures["success"] == pytest.approx(1 / 3)
    assert figures["parse_rate"] == pytest.approx(2 / 3)
    assert {kind: part["success"] for kind, part in figures["by_kind"].items()} == {"copy": 0.0, "sort": 0.5}


def test_new_rollouts_are_read_once_and_never_half(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    line = record("a/0").to_json()
    tail = RolloutTail(path)
    assert tail.new() == []
    path.write_bytes(line + b"\n" + line[:20])
    assert len(tail.new()) == 1
    with path.open("ab") as file:
        file.write(line[20:] + b"\n")
    assert len(tail.new()) == 1
    assert tail.new() == []
    assert shared_prompt(path) == []
