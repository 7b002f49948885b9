from __future__ import annotations

import pytest

from environments.runs.report.view_model import as_text, conversation, cut, detail, index_entry, readable, text_of
from support.records import call_record, make_record


def test_each_sampled_turn_carries_its_times_and_each_call_its_result() -> None:
    entries = conversation(make_record(turns=3, statuses=("ok", "error")), 1000)
    assert [entry["role"] for entry in entries] == ["system", "user", "assistant", "assistant", "assistant"]
    first = entries[2]
    assert first["turn"]["turn"] == 1
    assert first["turn"]["model_s"] == 0.8
    assert [call["status"] for call in first["calls"]] == ["ok", "error"]
    assert "notes.txt" in first["calls"][0]["result"]
    assert first["calls"][0]["arguments"] == "ls -la"
    assert entries[4]["calls"] == []


def test_assistant_messages_of_the_prompt_are_no_turns() -> None:
    record = make_record(turns=2)
    record.messages[1:1] = [{"role": "user", "content": "example"}, {"role": "assistant", "content": "shown before"}]
    turns = [entry["turn"] for entry in conversation(record, 1000) if entry["role"] == "assistant"]
    assert turns[0] is None
    assert [turn["turn"] for turn in turns[1:]] == [1, 2]


def test_a_truncation_stands_before_its_turn() -> None:
    record = make_record(turns=3, truncations=[{"turn": 2, "shortened": 4, "tokens_before": 900}])
    roles = [entry["role"] for entry in conversation(record, 1000)]
    assert roles == ["system", "user", "assistant", "truncation", "assistant", "assistant"]
    marker = conversation(record, 1000)[3]
    assert marker["text"] == "Context truncated before turn 2: shortened 4, tokens before 900"


def test_what_was_repaired_is_shown_as_written_and_as_run() -> None:
    call = call_record(
        1, 0, repairs=["trailing_comma"], raw_arguments='{"command": "ls",}', arguments={"command": "ls"}
    )
    record = make_record(turns=2, tool_calls=[call])
    (shown,) = conversation(record, 1000)[2]["calls"]
    assert (shown["arguments"], shown["written"]) == ("ls", '{"command": "ls",}')
    assert shown["repairs"] == ["trailing_comma"]


def test_a_malformed_call_without_a_message_of_its_own_still_appears() -> None:
    record = make_record(turns=2)
    broken = call_record(1, 9, "malformed", raw_arguments="<tool_call>{oops", arguments=None, error="not JSON")
    record.tool_calls.append(broken)
    shown = conversation(record, 1000)[2]["calls"][-1]
    assert shown["arguments"] == "<tool_call>{oops"
    assert shown["result"] is None
    assert shown["error"] == "not JSON"


def test_calls_without_a_record_and_results_without_a_call_are_not_lost() -> None:
    record = make_record(turns=2, tool_calls=[])
    record.messages.append({"role": "tool", "tool_call_id": "orphan", "content": "late"})
    entries = conversation(record, 1000)
    assert entries[2]["calls"][0]["name"] == "terminal"
    assert entries[2]["calls"][0]["result"]
    assert (entries[-1]["role"], entries[-1]["text"]) == ("tool", "late")


def test_a_shortened_result_says_where_the_whole_is() -> None:
    record = make_record(turns=2)
    record.tool_calls[0] |= {"stored_path": "/tmp/x", "result_chars": 9000}
    assert conversation(record, 1000)[2]["calls"][0]["stored"] == "9000 characters in all, kept at /tmp/x"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("plain", "plain"),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}], "a\n[image_url]"),
        ({"command": "ls"}, "ls"),
        ({"a": 1, "b": "é"}, '{\n  "a": 1,\n  "b": "é"\n}'),
    ],
)
def test_content_of_any_shape_becomes_text(content: object, text: str) -> None:
    assert text_of(content) == text


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ('{"output": "a\\nb\\n", "exit_code": 0, "error": null}', "a\nb"),
        ('{"content": "1|x", "total_lines": 3, "hint": ""}', "1|x\ntotal_lines: 3"),
        ('{"error": "no such tool"}', '{"error": "no such tool"}'),
        ('{"output": 5}', '{"output": 5}'),
        ("{not json", "{not json"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        ("", ""),
    ],
)
def test_a_json_result_is_shown_with_real_line_ends(result: str, text: str) -> None:
    assert readable(result) == text


def test_long_texts_keep_head_and_tail_and_say_what_is_missing() -> None:
    found = cut("a" * 500 + "b" * 500, 100)
    assert found.startswith("a" * 50 + "\n")
    assert found.endswith("\n" + "b" * 50)
    assert "900 characters left out" in found
    assert cut("short", 100) == "short"
    assert as_text(None) == ""


def test_the_index_says_what_lists_and_charts_need() -> None:
    entry = index_entry(make_record(turns=3, statuses=("ok", "invalid"), verifier_score=0.0))
    assert entry["calls"] == {"ok": 2, "invalid": 2}
    assert entry["cause"] == "policy: wrong result"
    assert entry["asked"].startswith("Sort the lines")
    assert entry["time"] == [pytest.approx(2.4), pytest.approx(0.15), 0.2, 0.1, 3.5]
    assert (entry["solved"], entry["trainable"], entry["verifier"]) == (False, True, 0.0)


def test_details_count_trained_tokens_and_leave_the_ids_out() -> None:
    found = detail(make_record(), 1000)
    assert ["segments", "1, 2 trained tokens"] in found["facts"]
    assert ["segments", "no tokens"] in detail(make_record(has_tokens=False, segments=[]), 1000)["facts"]
    assert found["components"][0] == ("verifier", 1.0)
    assert "sampled_ids" not in str(found)
