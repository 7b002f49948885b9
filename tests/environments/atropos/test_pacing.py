"""When groups start, evaluations fire and a run ends; each rule at its edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.atropos.api import EnvStatus
from environments.atropos.serve_loop import Pace, batch_problem, crossed, enough, groups_to_start

PACE = Pace(group_size=4, batch_size=8, max_batches_offpolicy=3, max_workers=8)
"""Three batches of eight are six groups."""


def status(queue: int = 0, own: int = 0, step: int = 0, **more: float) -> EnvStatus:
    return EnvStatus(current_step=step, queue_size=queue, self_queue_size=own, **more)  # type: ignore[arg-type]


def test_an_empty_queue_is_filled_up_to_the_off_policy_limit() -> None:
    assert groups_to_start(PACE, status(), running=0, unsent=0) == 6


def test_queue_running_and_unsent_all_count() -> None:
    assert groups_to_start(PACE, status(queue=2, own=2), running=1, unsent=1) == 2


def test_a_full_queue_starts_nothing_and_cancels_nothing() -> None:
    assert groups_to_start(PACE, status(queue=6, own=1), running=4, unsent=0) == 0
    assert groups_to_start(PACE, status(queue=60, own=1), running=4, unsent=0) == 0


def test_an_environment_with_nothing_anywhere_may_always_run_one_group() -> None:
    assert groups_to_start(PACE, status(queue=60, own=0), running=0, unsent=0) == 1
    assert groups_to_start(PACE, status(queue=60, own=0), running=1, unsent=0) == 0


def test_workers_bound_what_runs_at_once() -> None:
    assert groups_to_start(Pace(4, 800, 3, max_workers=8), status(), running=3, unsent=0) == 5


def test_no_off_policy_limit_means_workers_alone_decide() -> None:
    assert groups_to_start(Pace(4, 8, 0, max_workers=8), status(queue=99), running=0, unsent=0) == 8


def test_a_guaranteed_share_is_filled_even_when_others_fill_the_queue() -> None:
    pace = Pace(4, 8, 3, max_workers=8, min_batch_allocation=0.5)
    full = status(queue=60, own=1, max_group_size=4, unallocated_fraction=0.5)
    assert groups_to_start(pace, full, running=1, unsent=0) == 1


def test_an_evaluation_can_hold_new_groups_back() -> None:
    assert groups_to_start(PACE, status(), running=0, unsent=0, limit_ratio=0.0) == 0
    assert groups_to_start(PACE, status(), running=0, unsent=0, limit_ratio=0.5) == 4


@pytest.mark.parametrize(
    ("before", "now", "every", "fires"),
    [
        (0, 1, 1, True),
        (0, 3, 2, True),
        (0, 4, 2, True),
        (1, 2, 2, True),
        (2, 3, 2, False),
        (5, 5, 5, False),
        (0, 9, 0, False),
    ],
)
def test_jumps_over_a_multiple_fire(before: int, now: int, every: int, fires: bool) -> None:
    assert crossed(before, now, every) is fires


@given(st.lists(st.integers(1, 7), max_size=30), st.integers(1, 9))
def test_every_multiple_passed_fires_at_most_once_and_none_is_missed(jumps: list[int], every: int) -> None:
    step, fired = 0, 0
    for jump in jumps:
        passed = (step + jump) // every - step // every
        assert crossed(step, step + jump, every) is (passed > 0)
        fired += passed
        step += jump
    assert fired == step // every


def test_nothing_new_is_started_when_what_exists_reaches_the_last_step() -> None:
    assert enough(PACE, status(queue=2, step=8), running=1, unsent=1, total_steps=10)
    assert not enough(PACE, status(queue=2, step=8), running=1, unsent=0, total_steps=10)
    assert not enough(PACE, status(queue=99, step=8), running=9, unsent=9, total_steps=-1)


def test_sizes_that_never_make_a_batch_are_named() -> None:
    assert batch_problem(4, 8) is None
    assert "multiple" in str(batch_problem(3, 8))
    assert "multiple" in str(batch_problem(16, 8))
    assert "no batch size" in str(batch_problem(4, -1))
