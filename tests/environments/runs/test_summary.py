from __future__ import annotations

import io

import orjson
import pytest
from rich.console import Console

from environments.runs.summary import Slice, classify, print_summary, summarize, summarize_slice
from support.records import make_record, make_run


def test_means_leave_lost_rollouts_out_and_say_what_they_cost() -> None:
    records = [
        make_record(item=0, sample=0, verifier_score=1.0),
        make_record(item=0, sample=1, outcome="sandbox_lost"),
        make_record(item=1, sample=0, verifier_score=0.0),
        make_record(item=2, sample=0, outcome="api_error"),
    ]
    found = summarize_slice("x", records)
    assert (found.rollouts, found.items, found.scored) == (4, 3, 2)
    assert found.mean_score == 0.5
    assert found.losses.rollouts == 2
    assert found.losses.share == 0.5
    assert found.losses.by_cause == {"sandbox_lost": 1, "api_error": 1}
    # The first was worth its task's mean (1.0), the second, alone with its task, the mean of the slice (0.5).
    assert found.losses.points == 1.5
    assert found.losses.mean_if_zero == 0.25


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"verifier_score": 1.0}, None),
        ({"verifier_score": 0.0}, "policy: wrong result"),
        ({"verifier_score": 0.5}, "policy: partly right"),
        ({"verifier_score": 0.0, "turns": 1}, "policy: no tool call"),
        ({"verifier_score": 0.0, "statuses": ("invalid", "unknown")}, "policy: no call ran"),
        ({"verifier_score": 0.0, "outcome": "max_turns"}, "limit: max_turns"),
        ({"verifier_score": 1.0, "outcome": "max_turns"}, None),
        ({"outcome": "sandbox_lost"}, "infrastructure: sandbox_lost"),
        ({"outcome": "deadline"}, "infrastructure: deadline"),
        ({"verifier_score": None}, "unscored"),
    ],
)
def test_every_zero_has_a_cause(changes: dict, cause: str | None) -> None:
    assert classify(make_record(**changes)) == cause


def test_causes_cover_every_rollout_without_full_score() -> None:
    records = make_run(items=20, samples=4)
    found = summarize(records).overall
    assert sum(found.zeros.values()) == sum(r.verifier_score != 1.0 for r in records)
    assert sum(found.outcomes.values()) == found.rollouts == len(records)


def test_slices_partition_the_run() -> None:
    records = make_run()
    summary = summarize(records)
    for slices in (summary.policies, summary.categories):
        assert sum(part.rollouts for part in slices) == summary.overall.rollouts
        assert sum(part.losses.rollouts for part in slices) == summary.overall.losses.rollouts
        assert sum(part.sampled_tokens for part in slices) == summary.overall.sampled_tokens
    assert [part.name for part in summary.policies] == ["scripted-good", "scripted-sloppy", "smollm2-135m"]


def test_pass_at_k_is_over_items_with_enough_scored_rollouts() -> None:
    records = [make_record(item=i, sample=s, verifier_score=float(s == 0)) for i in range(3) for s in range(4)]
    found = summarize_slice("x", records)
    assert found.pass_at == {1: pytest.approx(0.25), 2: pytest.approx(0.5), 4: 1.0}


def test_call_rates_come_from_totals_not_from_means_of_rates() -> None:
    records = [
        make_record(turns=2, statuses=("invalid",)),
        make_record(turns=10, statuses=("ok",), sample=1),
        make_record(turns=1, sample=2),
    ]
    calls = summarize_slice("x", records).calls
    assert calls["tool_calls_attempted"] == 10
    assert calls["valid_rate"] == pytest.approx(0.9)
    assert calls["ok_rate"] == pytest.approx(0.9)


def test_time_that_no_part_accounts_for_is_shown_as_other() -> None:
    timing = {"model_s": 2.0, "tools_s": 1.0, "acquire_s": 0.5, "verify_s": 0.5, "total_s": 5.0}
    found = summarize_slice("x", [make_record(timing=timing), make_record(timing={"model_s": 3.0, "total_s": 1.0})])
    assert found.time_s == {"model_s": 5.0, "tools_s": 1.0, "acquire_s": 0.5, "verify_s": 0.5, "other_s": 1.0}


def test_a_run_of_nothing_has_no_figures_and_no_error() -> None:
    overall: Slice = summarize([]).overall
    assert (overall.rollouts, overall.mean_score, overall.standard_error, overall.pass_at) == (0, None, None, {})
    assert overall.losses.mean_if_zero is None


def test_a_summary_is_plain_json() -> None:
    data = orjson.loads(summarize(make_run()).to_json())
    assert data["overall"]["losses"]["rollouts"] > 0
    assert set(data["overall"]["pass_at"]) == {"1", "2", "4", "8"}
    assert data["isolation"] == {"namespaces": data["overall"]["rollouts"]}


def test_the_tables_show_scores_errors_and_losses() -> None:
    out = io.StringIO()
    print_summary(summarize(make_run()), Console(file=out, width=80))
    text = out.getvalue()
    for word in ("scripted-good", "±", "pass@4", "valid", "turns each", "why no full score", "Lost, not scored", "git"):
        assert word in text


def test_no_table_needs_more_than_eighty_columns() -> None:
    records = make_run()
    for record in records:
        record.policy, record.category = f"a-long-name-of-a-policy-{record.policy}", f"the category {record.category}"
    out = io.StringIO()
    print_summary(summarize(records), Console(file=out, width=400))
    tables, _, _ = out.getvalue().partition("why no full score")
    assert max(map(len, tables.splitlines())) <= 80


def test_a_clean_run_says_that_nothing_was_lost() -> None:
    out = io.StringIO()
    print_summary(summarize([make_record(), make_record(sample=1)]), Console(file=out, width=160))
    assert "No rollout was lost" in out.getvalue()
