"""The paired comparison: against a table worked out by hand, and its interval against a simulation."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from rich.console import Console

from agent_loop.records.record import RolloutRecord
from environments.errors import UsageError
from environments.runs.comparison import by_category, compare, read_run, render
from environments.runs.intervals import sign_test, t_quantile, wilson
from support.cli_verb import run_verb


def rollout(item: str, score: float | None, category: str = "", sample: int = 0) -> RolloutRecord:
    lost = score is None
    return RolloutRecord(
        rollout_id=f"{item}/{sample}",
        group_id=item,
        environment="e",
        item_id=item,
        category=category,
        outcome="sandbox_lost" if lost else "finished",
        trainable=not lost,
        messages=[],
        score=score,
        verifier_score=score,
    )


A = [
    rollout("fixed", 0.0),
    rollout("fixed", 0.0),
    rollout("broken", 1.0),
    rollout("better", 0.0),
    rollout("better", 1.0),
    rollout("same", 1.0),
    rollout("gone", 1.0),
    rollout("old", 1.0),
]
B = [
    rollout("fixed", 1.0),
    rollout("broken", 0.0),
    rollout("better", 1.0),
    rollout("better", None),
    rollout("same", 1.0),
    rollout("gone", None),
    rollout("new", 0.0),
]


def test_a_table_worked_out_by_hand() -> None:
    found = compare(A, B)
    # Differences: fixed +1, broken -1, better +0.5, same 0. Mean 0.125; squared deviations from it: 0.765625 + 1.265625
    # + 0.140625 + 0.015625 = 2.1875; variance 2.1875 / 3; standard error sqrt(2.1875 / 3 / 4) = 0.426956; t(3) 3.1824.
    assert found.difference == 0.125
    assert (found.mean_a, found.mean_b) == (0.625, 0.75)
    assert found.standard_error == pytest.approx(0.4269563)
    assert found.interval == pytest.approx((0.125 - 1.3587656, 0.125 + 1.3587656))
    assert (found.wins, found.losses, found.ties) == (2, 1, 1)
    assert found.p_value == 1.0
    assert (found.fixed, found.broken) == (("fixed",), ("broken",))
    assert (found.only_a, found.only_b) == (("old",), ("new",))
    assert [pair.item_id for pair in found.unscored] == ["gone"]
    # With zeros: better becomes 0.5 - 0.5 = 0, gone 0 - 1 = -1: (1 - 1 + 0 + 0 - 1) / 5.
    assert found.difference_if_zero == pytest.approx(-0.2)


def test_related_items_make_one_cluster() -> None:
    a = [rollout(name, 0.0, name[0]) for name in ("x1", "x2", "y1", "z1")]
    b = [rollout(name, score, name[0]) for name, score in (("x1", 1.0), ("x2", 1.0), ("y1", 0.0), ("z1", 0.0))]
    found = compare(a, b, cluster=by_category)
    # Mean 0.5; sums of deviations by cluster: x +1, y -0.5, z -0.5; sqrt(3 / 2 * 1.5) / 4 = 0.375; t(2) 4.302653.
    assert (found.difference, found.clusters, found.standard_error) == (0.5, 3, 0.375)
    assert found.interval == pytest.approx((0.5 - 1.6134948, 0.5 + 1.6134948))


def test_items_that_all_change_alike_give_no_interval() -> None:
    found = compare([rollout(str(n), 0.1) for n in range(5)], [rollout(str(n), 0.4) for n in range(5)])
    assert found.difference == pytest.approx(0.3)
    assert found.interval is None


def test_what_it_prints_names_flips_and_what_infrastructure_took() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(render(compare(A, B, "runs/a", "runs/b")))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "Difference +0.125, 95 % interval -1.234 to +1.484 (4 clusters",
        "Wins 2, losses 1, ties 1.",
        "always now): 1: fixed",
        "never now): 1: broken",
        "If lost rollouts counted 0, the difference would be -0.200.",
        "not compared: 1: gone",
        "Only in runs/a: 1: old",
    ):
        assert part in text


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423), (999, 1.9623)])
def test_quantiles_of_t_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),  # Newcombe (1998), method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(hits: int, trials: int, low: float, high: float) -> None:
    assert wilson(hits, trials) == pytest.approx((low, high), abs=5e-5)


def test_the_sign_test_is_exact() -> None:
    assert sign_test(8, 1) == 2 * (1 + 9) / 2**9
    assert sign_test(0, 0) == 1.0


def play(draw: random.Random, families: int, gain: float) -> tuple[list[RolloutRecord], list[RolloutRecord], float]:
    """Two runs over families of three items. Families differ in how hard they are, and in what B gains on them."""
    a, b, expected = [], [], gain
    for family in range(families):
        hard, gained = draw.betavariate(1.5, 1.5) * (1 - 2 * gain), draw.uniform(0, 2 * gain)
        for number in range(3):
            name = f"{family}.{number}"
            a += [rollout(name, float(draw.random() < hard), str(family)) for _ in range(2)]
            b += [rollout(name, float(draw.random() < hard + gained), str(family)) for _ in range(3)]
    return a, b, expected


def covered(runs: int, families: int) -> float:
    draw, hits = random.Random(22), 0
    for _ in range(runs):
        a, b, expected = play(draw, families, 0.15)
        found = compare(a, b, cluster=by_category)
        assert found.interval is not None
        hits += found.interval[0] <= expected <= found.interval[1]
    return hits / runs


def test_the_interval_holds_the_true_difference_95_times_in_100() -> None:
    assert covered(runs=1000, families=12) == pytest.approx(0.95, abs=0.015)


@pytest.mark.slow
def test_the_interval_holds_it_for_few_and_for_many_clusters() -> None:
    for families in (8, 20, 100):
        assert covered(runs=2000, families=families) == pytest.approx(0.95, abs=0.015)


def test_a_folder_of_runs_is_read_as_one(tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}" / "rollouts.jsonl").write_bytes(rollout("x", 1.0, sample=seed).to_json() + b"\n")
    assert [record.rollout_id for record in read_run(tmp_path)] == ["x/0", "x/1"]
    with pytest.raises(UsageError, match=r"no rollouts\.jsonl"):
        read_run(tmp_path / "nowhere")


def test_runs_without_a_common_item_are_not_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rollouts.jsonl").write_bytes(rollout(name, 1.0).to_json() + b"\n")
    with pytest.raises(UsageError, match=r"no item in common \(1 and 1 items\)"):
        run_verb("compare", str(tmp_path / "a"), str(tmp_path / "b"))
