"""What stands in the files of other formats; that their own readers take them is tested in tests/live/exports."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from environments.apps.cli import main as cli
from environments.runs.exports import atif, file_name, inspect_log
from support.records import make_record, make_run, write_run
from support.token_records import tokenized

WRITTEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_trajectory_has_calls_with_their_results_and_exact_tokens() -> None:
    record = tokenized(make_record(turns=3, statuses=("ok", "error")))
    found = atif(record)
    assert [step["source"] for step in found["steps"]] == ["system", "user", "agent", "agent", "agent"]
    assert [step["step_id"] for step in found["steps"]] == [1, 2, 3, 4, 5]
    first = found["steps"][2]
    assert [call["tool_call_id"] for call in first["tool_calls"]] == ["call_1_0", "call_1_1"]
    assert [result["source_call_id"] for result in first["observation"]["results"]] == ["call_1_0", "call_1_1"]
    assert first["metrics"]["completion_token_ids"] == record.sampled_calls[0].sampled_ids
    assert first["metrics"]["prompt_token_ids"] == record.sampled_calls[0].prompt_ids
    assert first["metrics"]["logprobs"] == record.sampled_calls[0].logprobs
    assert found["final_metrics"]["extra"]["verifier_score"] == 1.0


def test_examples_of_the_prompt_and_broken_arguments_are_marked() -> None:
    record = make_record(turns=2)
    record.messages[1:1] = [{"role": "user", "content": "example"}, {"role": "assistant", "content": "shown before"}]
    record.messages[4]["tool_calls"][0]["function"]["arguments"] = "{oops"
    record.sampled_by = [None, None, None, None, 0, None, 1]
    steps = atif(record)["steps"]
    assert [step.get("is_copied_context") for step in steps if step["source"] == "agent"] == [True, None, None]
    call = next(call for step in steps for call in step.get("tool_calls", ()))
    assert call["arguments"] == {"arguments": "{oops"}
    assert "parse_error" in call["extra"]


def test_a_lost_rollout_is_an_error_and_no_zero_in_a_log() -> None:
    records = [make_record(sample=0), make_record(sample=1, outcome="deadline"), make_record(sample=2, turns=4)]
    records[2].outcome = "max_turns"
    log = inspect_log("p", records, WRITTEN)
    assert [sample["epoch"] for sample in log["samples"]] == [1, 2, 3]
    lost = log["samples"][1]
    assert "scores" not in lost
    assert lost["error"]["message"].startswith("deadline: ")
    assert log["samples"][2]["limit"] == {"type": "turn", "limit": 4.0, "reason": "max_turns"}
    assert log["results"]["scores"][0]["metrics"]["mean"]["value"] == 1.0
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (3, 2)


def test_names_of_files_stay_apart() -> None:
    assert file_name("plain-0.1_x") == "plain-0.1_x"
    assert len({file_name(text) for text in ("a/b", "a b", "a-b", "ä")}) == 4


@pytest.mark.parametrize(("to", "files"), [("atif", 12), ("inspect", 3)])
def test_export_writes_a_folder_next_to_the_run(
    to: str, files: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "rollouts.jsonl", make_run(items=2, samples=2))
    assert cli.main(["export", str(tmp_path), "--to", to]) == 0
    assert capsys.readouterr().out == f"12 of 12 rollouts in {files} files in {tmp_path / to}\n"
    written = sorted((tmp_path / to).iterdir())
    assert len(written) == files
    for path in written:
        json.loads(path.read_text())
