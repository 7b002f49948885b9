"""The token ledger: everything in order, every sampled token trained once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.model.contract import WeightsSpan
from agent_loop.model.tokens.ledger import MASKED, NO_LOGPROB, Ledger, LedgerError
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import CHECKS

IDS = st.lists(st.integers(0, 50_000), max_size=6)
LOGPROB = st.one_of(st.none(), st.floats(-30, 0))
SAMPLE = st.lists(st.tuples(st.integers(0, 50_000), LOGPROB), max_size=6)
STEP = st.one_of(
    st.tuples(st.just("begin"), IDS), st.tuples(st.just("extend"), IDS), st.tuples(st.just("sample"), SAMPLE)
)


def play(steps) -> tuple[Ledger, list]:
    ledger = Ledger()
    ledger.begin([1])
    sampled = []
    for kind, what in steps:
        if kind == "begin":
            ledger.begin(what)
        elif kind == "extend":
            ledger.extend(what)
        else:
            ids, logprobs = [t for t, _ in what], [p for _, p in what]
            ledger.sampled(ids, logprobs, sent=list(ledger.tokens), finish_reason="length")
            sampled.append((ids, logprobs))
    return ledger, sampled


@given(st.lists(STEP, max_size=20))
def test_every_sampled_token_is_trained_exactly_once_with_its_own_logprob(steps):
    ledger, sampled = play(steps)
    trained = [
        (t, p) for s in ledger.segments() for t, m, p in zip(s.tokens, s.masks, s.logprobs, strict=True) if m != MASKED
    ]
    assert trained == [(t, p) for ids, probs in sampled for t, p in zip(ids, probs, strict=True) if p is not None]


@given(st.lists(STEP, max_size=20))
def test_whatever_is_written_passes_every_offline_check(steps):
    ledger, sampled = play(steps)
    record = RolloutRecord("r", "g", "e", "i", "finished", True, [], has_tokens=bool(sampled))
    record.segments, record.sampled_calls = ledger.segments(), ledger.sampled_calls()
    assert [m for check in CHECKS.values() for m in check(record)] == []


@given(st.lists(STEP, max_size=20))
def test_stored_calls_are_the_prompts_and_samples_in_order(steps):
    ledger, sampled = play(steps)
    calls = ledger.sampled_calls()
    assert [c.sampled_ids for c in calls] == [ids for ids, _ in sampled]
    assert [c.logprobs for c in calls] == [[NO_LOGPROB if p is None else p for p in probs] for _, probs in sampled]
    segments = ledger.segments()
    for call in calls:
        whole = call.prompt_ids + call.sampled_ids
        assert segments[call.segment].tokens[: len(whole)] == whole


def test_segments_end_with_their_last_sampled_token_and_unused_ones_are_left_out():
    ledger, _ = play([("begin", [9]), ("begin", [5]), ("sample", [(6, -1.0)]), ("extend", [7, 8])])
    assert [s.tokens for s in ledger.segments()] == [[5, 6]]


def test_a_missing_logprob_is_masked_and_its_neighbours_keep_theirs():
    ledger, _ = play([("sample", [(6, -0.5), (7, None), (8, -0.25)])])
    (segment,) = ledger.segments()
    assert segment.masks == [MASKED, 6, MASKED, 8]
    assert segment.logprobs == [NO_LOGPROB, -0.5, NO_LOGPROB, -0.25]


def test_logprobs_of_another_length_are_refused():
    ledger, _ = play([])
    with pytest.raises(LedgerError, match="2 sampled tokens with 1 logprobs"):
        ledger.sampled([1, 2], [-0.1], sent=[1], finish_reason="stop")


def test_a_prompt_that_was_not_sent_is_noticed():
    ledger, _ = play([])
    with pytest.raises(LedgerError, match="not the prompt that was sent"):
        ledger.sampled([2], [-0.1], sent=[99], finish_reason="stop")


def test_a_stored_call_says_all_that_the_server_said():
    ledger, spans = Ledger(), (WeightsSpan("7", 0, 2),)
    ledger.begin([1])
    ledger.sampled(
        [2, 3],
        [-0.1, None],
        sent=[1],
        finish_reason="stop",
        duration_s=0.5,
        weights_version="7",
        weights_spans=spans,
        temperature=0.7,
    )
    ledger.extend([4])
    ledger.sampled([5], [-0.2], sent=[1, 2, 3, 4], finish_reason="length")
    first, second = ledger.sampled_calls()
    assert (first.finish_reason, first.duration_s, first.temperature) == ("stop", 0.5, 0.7)
    assert (first.weights_version, first.weights_spans) == ("7", list(spans))
    assert (second.finish_reason, second.duration_s, second.temperature) == ("length", 0.0, None)
    assert (second.weights_version, second.weights_spans) == (None, [])


def test_another_prompt_than_was_sent_is_refused_in_words():
    ledger = Ledger()
    ledger.begin([1])
    with pytest.raises(LedgerError, match=r"^the prompt in the ledger is not the prompt that was sent$"):
        ledger.sampled([2], [-0.1], sent=[9], finish_reason="stop")
