"""Which rollouts an export takes: by score, end, length, tools, group and likeness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_loop.records.record import RolloutRecord
from environments.apps.cli import main as cli
from environments.runs.selection import Rules, choose, read_at
from support.records import call_record, make_record, make_run, write_run

SPEECHES = ("Sort the file with care.", "I count the lines of each part first, then put all of them together again.")


def ids(tmp_path: Path, records: list[RolloutRecord], rules: Rules) -> list[str]:
    path = tmp_path / "rollouts.jsonl"
    write_run(path, records)
    return [record.rollout_id.removeprefix("smollm2-135m-") for record in read_at(path, choose(path, rules).places)]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(), ["0-0", "0-1", "0-2", "0-3", "0-4"]),
        (Rules(takes="trainable"), ["0-0", "0-1", "0-3"]),
        (Rules(takes="tokens"), ["0-0", "0-3"]),
        (Rules(min_score=0.5), ["0-0", "0-1", "0-4"]),
        (Rules(max_score=0.4), ["0-3"]),
        (Rules(outcomes=frozenset({"deadline"})), ["0-2"]),
        (Rules(min_turns=3), ["0-1", "0-3"]),
        (Rules(max_turns=2), ["0-0", "0-2", "0-4"]),
        (Rules(max_tokens=3), []),
        (Rules(max_tokens=500), ["0-0", "0-2", "0-3", "0-4"]),
        (Rules(uses=frozenset({"patch"})), ["0-3"]),
        (Rules(avoids=frozenset({"patch"})), ["0-0", "0-1", "0-2", "0-4"]),
        (Rules(valid_calls=True), ["0-0", "0-2", "0-3", "0-4"]),
    ],
)
def test_a_rule_takes_what_it_says(rules: Rules, expected: list[str], tmp_path: Path) -> None:
    records = [
        make_record(sample=0),
        make_record(sample=1, verifier_score=0.5, turns=4, has_tokens=False, statuses=("invalid",)),
        make_record(sample=2, outcome="deadline"),
        make_record(sample=3, verifier_score=0.0, turns=3, tool_calls=[call_record(1, 0, name="patch")]),
        make_record(sample=4, hack="the tests were changed"),
    ]
    assert ids(tmp_path, records, rules) == expected


def test_the_best_are_those_of_each_group(tmp_path: Path) -> None:
    scores = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.5, (0, 2): 1.0, (1, 1): 0.2}
    records = [make_record(item=i, sample=s, verifier_score=score) for (i, s), score in scores.items()]
    records[1].turns *= 3
    assert ids(tmp_path, records, Rules(best=1)) == ["1-0", "0-2"]


def test_pairs_are_far_apart_and_use_a_rollout_once(tmp_path: Path) -> None:
    scores = [0.4, 1.0, 0.0, 0.9, 0.5, 0.6]
    path = tmp_path / "rollouts.jsonl"
    records = [make_record(sample=n, verifier_score=score) for n, score in enumerate(scores)]
    other = make_record(sample=9, verifier_score=0.0)
    other.messages[1] = {"role": "user", "content": "another task in the same group"}
    write_run(path, [*records, other])
    found = choose(path, Rules(pairs=5, gap=0.5)).pairs
    assert [[own.verifier_score for own in read_at(path, pair)] for pair in found] == [[1.0, 0.0], [0.9, 0.4]]
    assert len(choose(path, Rules(pairs=1, gap=0.5)).pairs) == 1


def test_what_is_said_again_is_left_out(tmp_path: Path) -> None:
    records = [make_record(sample=n, turns=4) for n in range(6)]
    for record, speech in zip(records, SPEECHES * 3, strict=True):
        record.messages[-1]["content"] = speech * 20
    records[2].messages[-1]["content"] += " One word more."
    records[5].messages[-1]["content"] = " ".join(f"word{n}" for n in range(200))
    assert ids(tmp_path, records, Rules(similar=0.8)) == ["0-0", "0-1", "0-5"]
    assert len(ids(tmp_path, records, Rules(similar=1.0))) == 4


def test_the_verb_writes_chosen_rollouts_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "rollouts.jsonl", make_run(items=2, samples=2))
    assert cli.main(["export", str(tmp_path), "--to", "trl", "--max-turns", "9"]) == 0
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "trl" / "train.jsonl").read_text().splitlines()]
    assert said.startswith(f"{len(rows)} of 12 rollouts in {tmp_path / 'trl' / 'train.jsonl'} (left out: ")
    assert 0 < len(rows) < 12
    assert all(set(row) == {"messages", "tools"} for row in rows)


def test_the_verb_writes_pairs_and_shapes_for_a_model(tmp_path: Path) -> None:
    write_run(tmp_path / "rollouts.jsonl", [make_record(sample=n, verifier_score=float(n)) for n in range(2)])
    assert cli.main(["export", str(tmp_path), "--to", "trl", "--pairs", "1", "--tokenizer", "standin"]) == 0
    [row] = map(json.loads, (tmp_path / "trl" / "train.jsonl").read_text().splitlines())
    assert set(row) == {"prompt", "chosen", "rejected", "tools"}
