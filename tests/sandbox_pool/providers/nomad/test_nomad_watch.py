"""What is known of allocations: the newest word, whatever the order in which words arrive."""

from hypothesis import given
from hypothesis import strategies as st

from sandbox_pool.providers.nomad.nomad_watch import Allocation, AllocationWatch
from support.nomad_recorded import recorded

STATUSES = st.sampled_from(["pending", "running", "complete", "failed", "lost", "unknown"])


def data(index, client="running", desired="run", alloc_id="a", job_id="p/dispatch-x"):
    states = {"t": {"State": "running" if client == "running" else "dead", "Events": []}}
    return {
        "ID": alloc_id,
        "JobID": job_id,
        "ClientStatus": client,
        "DesiredStatus": desired,
        "TaskStates": states,
        "ModifyIndex": index,
    }


def watch_with(lost):
    return AllocationWatch(None, "p", 30.0, lambda name, reason: lost.append((name, reason)))


@given(st.lists(st.tuples(st.integers(1, 50), STATUSES), min_size=1, unique_by=lambda each: each[0]))
def test_whatever_the_order_the_newest_word_stays(words):
    watch = watch_with([])
    for index, client in words:
        watch.learn(data(index, client))
    newest = max(words)
    (known,) = watch.of_job("p/dispatch-x")
    assert (known.index, known.client_status) == newest


@given(STATUSES, st.sampled_from(["run", "stop", "evict"]))
def test_an_allocation_is_never_both_running_and_gone(client, desired):
    known = Allocation.parse(data(1, client, desired))
    assert not (known.running and known.gone)
    assert known.running == (client == "running" and desired == "run")
    assert not known.ended or known.gone


def test_a_recorded_allocation_is_understood():
    running, stopping = Allocation.parse(recorded("allocation")), Allocation.parse(recorded("allocation_stopping"))
    assert running.running
    assert not stopping.running
    assert stopping.gone
    assert not stopping.ended


def test_a_host_is_told_lost_once():
    lost = []
    watch = watch_with(lost)
    watch.learn(data(1))
    watch.guard("one", "p/dispatch-x", "a")
    assert lost == []
    watch.learn(data(2, "lost"))
    watch._wake()
    watch._wake()
    assert [name for name, _ in lost] == ["one"]


def test_a_host_that_is_gone_when_it_is_guarded_is_told_at_once():
    lost = []
    watch = watch_with(lost)
    watch.learn(data(2, "failed"))
    watch.guard("one", "p/dispatch-x", "a")
    assert [name for name, _ in lost] == ["one"]
