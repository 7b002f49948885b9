from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.runs.summary import clustered_standard_error, mean, mean_pass_at_k, pass_at_k


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_what_counting_every_draw_gives(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    results = [True] * correct + [False] * (samples - correct)
    draws = list(itertools.combinations(results, k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_k_grows_with_k_and_starts_at_the_plain_rate(case: tuple[int, int]) -> None:
    samples, correct = case
    values = [pass_at_k(samples, correct, k) for k in range(1, samples + 1)]
    assert values[0] == pytest.approx(correct / samples)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    assert values[-1] == float(correct > 0)


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_is_not_defined(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(samples, correct, k)


def test_tasks_with_too_few_samples_are_left_out_of_pass_at_k() -> None:
    assert mean_pass_at_k([(4, 4), (2, 0)], 4) == 1.0
    assert mean_pass_at_k([(2, 0)], 4) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_one_value_per_cluster_gives_the_usual_standard_error(values: list[float]) -> None:
    clusters = {str(i): [value] for i, value in enumerate(values)}
    usual = statistics.stdev(values) / math.sqrt(len(values))
    assert clustered_standard_error(clusters) == pytest.approx(usual, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=10), st.integers(2, 6))
def test_repeating_a_rollout_adds_no_certainty(values: list[float], copies: int) -> None:
    once = clustered_standard_error({str(i): [value] for i, value in enumerate(values)})
    repeated = clustered_standard_error({str(i): [value] * copies for i, value in enumerate(values)})
    assert repeated == pytest.approx(once, abs=1e-12)


def test_one_cluster_has_no_standard_error_and_nothing_has_no_mean() -> None:
    assert clustered_standard_error({"a": [0.0, 1.0], "b": []}) is None
    assert clustered_standard_error({}) is None
    assert mean([]) is None
