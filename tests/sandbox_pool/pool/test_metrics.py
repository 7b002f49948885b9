import threading

from hypothesis import given
from hypothesis import strategies as st

from sandbox_pool.pool.metrics import PoolMetrics, Reservoir, percentile


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_one_of_the_values_with_the_right_share_below(values, q):
    ordered = sorted(values)
    found = percentile(ordered, q)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= q * len(ordered)


def test_percentiles_of_a_known_row():
    row = [float(n) for n in range(1, 101)]
    assert [percentile(row, q) for q in (0.5, 0.95, 0.99)] == [50.0, 95.0, 99.0]
    assert percentile([], 0.5) == 0.0


def test_a_reservoir_keeps_a_bounded_even_sample_and_exact_count_and_maximum():
    reservoir = Reservoir(kept=100)
    for value in range(10_000):
        reservoir.add(float(value))
    summary = reservoir.summary()
    assert (summary["count"], summary["max"]) == (10_000, 9999.0)
    assert 2000 < summary["p50"] < 8000
    assert len(reservoir._values) == 100


def test_metrics_from_many_threads_lose_nothing():
    metrics = PoolMetrics()

    def work():
        for _ in range(1000):
            metrics.bump("leases")
            metrics.observe("exec", 0.001)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = metrics.summary()
    assert summary["leases"] == 8000
    assert summary["exec_ms"]["count"] == 8000
    assert summary["exec_ms"]["p50"] == 1.0
