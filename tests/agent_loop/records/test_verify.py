"""`verify` accepts what is right and names the first thing that is wrong."""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.local_models.standin import StandIn
from agent_loop.local_models.standin.policies import wild
from agent_loop.model.backends import VllmBackend
from agent_loop.model.contract import WeightsSpan
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import Report, verify
from environments.apps.cli import verify as verb
from environments.errors import UsageError
from environments.runs.report.view_model import detail, index_entry
from support.tokens_rollouts import Rollout
from tool_parsers import get_parser


@pytest.fixture(scope="module")
def records() -> list[RolloutRecord]:
    """A few stored rollouts, one of them truncated."""
    stored = asyncio.run(play())
    assert any(len(record.segments) > 1 for record in stored)
    return stored


async def play() -> list[RolloutRecord]:
    stored = []
    async with StandIn(wild, seed=3) as server:
        recorder = Recorder(VllmBackend(server.url), probe_template(server.tokenizer), get_parser("hermes"))
        for number in range(6):
            rollout = Rollout(recorder, Random(number), context_tokens=700)
            await rollout.play(8)
            stored.append(rollout.record(f"r{number}"))
        await recorder.close()
    return stored


def lines(records) -> list[bytes]:
    return [record.to_json() for record in records]


def truncated(records) -> RolloutRecord:
    return next(record for record in records if len(record.segments) > 1)


def first_sampled(record: RolloutRecord) -> int:
    return next(k for k, mask in enumerate(record.segments[0].masks) if mask != -100)


def flip_mask(r: RolloutRecord) -> None:
    k = first_sampled(r)
    r.segments[0].masks[k] = -100
    r.segments[0].logprobs[k] = 1.0


def unmask_prompt(r: RolloutRecord) -> None:
    r.segments[0].masks[0] = r.segments[0].tokens[0]
    r.segments[0].logprobs[0] = -0.5


def drop_segment(r: RolloutRecord) -> None:
    del r.segments[0]


def drop_last_segment(r: RolloutRecord) -> None:
    del r.segments[-1]


def double_end(r: RolloutRecord) -> None:
    """In the segment only: the log still has what was sent."""
    call = next(c for c in r.sampled_calls if c.finish_reason == "stop" and c.segment == 0)
    at = len(call.prompt_ids) + len(call.sampled_ids)
    s = r.segments[0]
    s.tokens.insert(at, call.sampled_ids[-1])
    s.masks.insert(at, -100)
    s.logprobs.insert(at, 1.0)


def double_end_everywhere(r: RolloutRecord) -> None:
    """As a server would see it that was really sent the doubled token: consistent, and still wrong."""
    calls = [c for c in r.sampled_calls if c.segment == 0]
    call = next(c for c in calls[:-1] if c.finish_reason == "stop")
    at = len(call.prompt_ids) + len(call.sampled_ids)
    double_end(r)
    for later in calls[calls.index(call) + 1 :]:
        later.prompt_ids.insert(at, call.sampled_ids[-1])


def shift_logprobs(r: RolloutRecord) -> None:
    call = r.sampled_calls[0]
    start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.sampled_ids)
    r.segments[0].logprobs[start:end] = [call.logprobs[-1], *call.logprobs[:-1]]


def change_sampled_token(r: RolloutRecord) -> None:
    k = first_sampled(r)
    r.segments[0].tokens[k] = r.segments[0].masks[k] = r.segments[0].tokens[k] + 1


def drop_glue(r: RolloutRecord) -> None:
    call = r.sampled_calls[0]
    at = len(call.prompt_ids) + len(call.sampled_ids)
    for values in (r.segments[0].tokens, r.segments[0].masks, r.segments[0].logprobs):
        del values[at]


def shorten_masks(r: RolloutRecord) -> None:
    r.segments[0].masks.pop()


def train_twice(r: RolloutRecord) -> None:
    r.segments.append(copy.deepcopy(r.segments[0]))


def positive_logprob(r: RolloutRecord) -> None:
    r.segments[0].logprobs[first_sampled(r)] = r.sampled_calls[0].logprobs[0] = 0.5


def not_a_number(r: RolloutRecord) -> None:
    r.segments[0].logprobs[first_sampled(r)] = r.sampled_calls[0].logprobs[0] = float("nan")


def lose_a_call(r: RolloutRecord) -> None:
    del r.sampled_calls[0]


def orphan_result(r: RolloutRecord) -> None:
    next(m for m in r.messages if m["role"] == "tool")["tool_call_id"] = "nobody"


def count_wrong(r: RolloutRecord) -> None:
    r.metrics["turns"] += 1


def score_untrainable(r: RolloutRecord) -> None:
    r.trainable, r.outcome = False, "api_error"


def lose_weights_of_the_last_token(r: RolloutRecord) -> None:
    r.sampled_calls[0].weights_spans = [WeightsSpan("1", 0, len(r.sampled_calls[0].sampled_ids) - 1)]
    r.sampled_calls[0].weights_version = "1"


def weights_in_the_wrong_order(r: RolloutRecord) -> None:
    end = len(r.sampled_calls[0].sampled_ids)
    r.sampled_calls[0].weights_spans = [WeightsSpan("1", 1, end), WeightsSpan("2", 0, 1)]
    r.sampled_calls[0].weights_version = "1"


def claim_a_given_message(r: RolloutRecord) -> None:
    r.sampled_by[1] = r.sampled_by[2]
    r.sampled_by[2] = None


def swap_calls(r: RolloutRecord) -> None:
    first, second = [place for place, call in enumerate(r.sampled_by) if call is not None][:2]
    r.sampled_by[first], r.sampled_by[second] = r.sampled_by[second], r.sampled_by[first]


def forget_a_call(r: RolloutRecord) -> None:
    r.sampled_by[r.sampled_by.index(0)] = None


def call_a_message_too_many(r: RolloutRecord) -> None:
    r.sampled_by.append(None)


CORRUPTIONS = {
    flip_mask: "trained exactly once",
    unmask_prompt: "trained exactly once",
    drop_segment: "segments complete",
    drop_last_segment: "segments complete",
    double_end: "equal to the wire",
    double_end_everywhere: "turn ends not doubled",
    shift_logprobs: "equal to the wire",
    change_sampled_token: "equal to the wire",
    drop_glue: "equal to the wire",
    shorten_masks: "lengths",
    train_twice: "segments complete",
    positive_logprob: "masks and logprobs",
    not_a_number: "masks and logprobs",
    lose_a_call: "trained exactly once",
    lose_weights_of_the_last_token: "weights versions",
    weights_in_the_wrong_order: "weights versions",
    orphan_result: "messages paired",
    claim_a_given_message: "messages and their calls",
    swap_calls: "messages and their calls",
    forget_a_call: "messages and their calls",
    call_a_message_too_many: "messages and their calls",
    count_wrong: "metrics",
    score_untrainable: "metrics",
}


def test_stored_rollouts_are_accepted(records):
    report = verify(lines(records))
    assert report.ok, report.violations[:1]
    assert report.rollouts == report.with_tokens == 6
    assert report.trained_tokens == sum(len(c.sampled_ids) for r in records for c in r.sampled_calls)


def test_weights_of_each_range_of_tokens_survive_the_file(records):
    record = copy.deepcopy(records[0])
    call = record.sampled_calls[0]
    call.weights_version = "1"
    call.weights_spans = [WeightsSpan("1", 0, 1), WeightsSpan("2", 1, len(call.sampled_ids))]
    assert RolloutRecord.from_json(record.to_json()) == record
    assert verify(lines([record])).ok


def test_a_line_from_before_there_were_spans_is_read(records):
    line = json.loads(records[0].to_json())
    for call in line["sampled_calls"]:
        del call["weights_spans"]
    assert RolloutRecord.from_json(json.dumps(line)) == records[0]


NONSENSE = [None, True, -1, 0.5, 2**70, "", "x", [], {}, [[]], [None], {"a": 1}]


@settings(max_examples=300)
@given(data=st.data())
def test_a_line_with_a_value_of_another_kind_is_one_error_or_is_judged(records, data):
    """Whatever stands in a file, checking it and drawing it are no tracebacks."""
    line = json.loads(truncated(records).to_json())
    place, last = line, data.draw(st.sampled_from(sorted(line)))
    while isinstance(place[last], dict | list) and place[last] and data.draw(st.booleans()):
        place = place[last]
        last = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[last] = data.draw(st.sampled_from(NONSENSE))
    try:
        record = RolloutRecord.from_json(json.dumps(line))
    except ValueError:
        return
    report = Report()
    report.add(record, 1)
    index_entry(record)
    detail(record, 1000)


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_each_corruption_is_found_by_the_check_that_should(records, corrupt):
    broken = copy.deepcopy(truncated(records))
    corrupt(broken)
    report = verify([*lines(records), broken.to_json()])
    assert not report.ok
    assert CORRUPTIONS[corrupt] in {v.check for v in report.violations}
    assert {v.line for v in report.violations} == {7}


def test_a_record_without_tokens_says_so_and_is_accepted(records):
    plain = copy.deepcopy(records[0])
    plain.has_tokens, plain.segments, plain.sampled_calls, plain.metrics = False, [], [], {}
    assert verify([plain.to_json()]).ok
    plain.has_tokens = True
    assert not verify([plain.to_json()]).ok


def test_a_token_without_logprob_is_counted_and_accepted(records):
    record = copy.deepcopy(records[0])
    call = record.sampled_calls[0]
    at = len(call.prompt_ids)
    call.logprobs[0] = record.segments[0].logprobs[at] = 1.0
    record.segments[0].masks[at] = -100
    report = verify([record.to_json()])
    assert report.ok
    assert report.untrained_samples == 1


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(words))


def test_the_command_prints_a_table_and_exits_0(records, tmp_path, capsys):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\n".join(lines(records)) + b"\n")
    assert run(str(path)) == 0
    printed = capsys.readouterr().out
    assert "6 rollouts, 6 with tokens" in printed
    assert "trained exactly once" in printed
    assert run(str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_the_command_exits_1_with_the_first_violation_named(records, tmp_path, capsys):
    broken = copy.deepcopy(truncated(records))
    broken.rollout_id = "broken"
    flip_mask(broken)
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\n".join([*lines(records), broken.to_json()]))
    assert run(str(path)) == 1
    printed = capsys.readouterr().out
    assert "FAILED: line 7" in printed
    assert "the logprob at position" in printed
    assert run(str(path), "--json") == 1
    assert "line 7" in json.loads(capsys.readouterr().out)["first_violation"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"not json\n", "line 1"), (b"[]\n", "line 1"), (b"", "no rollouts"), (b'{"version": 99}\n', "record version 99")],
)
def test_a_file_that_is_none_is_bad_input(tmp_path, content, words):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        run(str(path))


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        run(str(tmp_path / "nothing.jsonl"))
