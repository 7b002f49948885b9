from hypothesis import given
from hypothesis import strategies as st

from sandbox_pool.config import PoolConfig
from sandbox_pool.pool.host import HostView, plan

CONFIG = PoolConfig(slots_per_host=4, min_hosts=0, max_hosts=3, max_starting=2, idle_s=60.0)


def ready(name, key="a", free=0, idle=None):
    return HostView(name, key, False, free, idle)


def starting(name, key="a"):
    return HostView(name, key, True, 0, None)


def decide(hosts, waiting, config=CONFIG, blocked=frozenset()):
    return plan(hosts, waiting, config, default_key="a", blocked=blocked)


def test_nothing_waits_nothing_starts():
    assert decide([], {}).start == ()


def test_as_many_hosts_as_the_waiting_need():
    assert decide([], {"a": 5}).start == ("a", "a")


def test_hosts_already_starting_are_counted_in():
    assert decide([starting("h1")], {"a": 4}).start == ()
    assert decide([starting("h1")], {"a": 5}).start == ("a",)


def test_free_slots_are_counted_in():
    assert decide([ready("h1", free=3)], {"a": 3}).start == ()


def test_the_cap_on_starting_hosts_holds_whatever_the_demand():
    assert decide([], {"a": 100}).start == ("a", "a")
    assert decide([starting("h1"), starting("h2")], {"a": 100}).start == ()


def test_the_cap_on_hosts_holds():
    assert decide([ready("h1"), ready("h2"), ready("h3")], {"a": 9}).start == ()


def test_the_longest_wait_is_served_first():
    assert decide([ready("h1"), ready("h2")], {"b": 1, "a": 1}).start == ("b",)


def test_a_key_that_failed_lately_is_left_alone():
    assert decide([], {"a": 1, "b": 1}, blocked=frozenset({"a"})).start == ("b",)


def test_the_minimum_is_kept_without_any_demand():
    config = PoolConfig(slots_per_host=4, min_hosts=2, max_hosts=3, max_starting=2, idle_s=60.0)
    assert decide([], {}, config).start == ("a", "a")
    assert decide([ready("h1", idle=999.0), ready("h2", idle=999.0)], {}, config).stop == ()


def test_a_host_idle_too_long_is_stopped():
    assert decide([ready("h1", free=4, idle=61.0), ready("h2", free=4, idle=59.0)], {}).stop == ("h1",)


def test_an_idle_host_of_another_key_makes_room_when_all_hosts_are_taken():
    hosts = [ready("h1", free=4, idle=1.0), ready("h2", free=4, idle=5.0), ready("h3")]
    assert decide(hosts, {"b": 1}).stop == ("h2",)


def test_busy_hosts_are_never_given_up():
    assert decide([ready("h1"), ready("h2"), ready("h3")], {"b": 1}).stop == ()


views = st.builds(
    HostView,
    name=st.uuids().map(str),
    key=st.sampled_from("abc"),
    starting=st.booleans(),
    free=st.integers(0, 4),
    idle_for_s=st.none() | st.floats(0, 200),
).map(lambda v: HostView(v.name, v.key, True, 0, None) if v.starting else v)


@given(
    hosts=st.lists(views, max_size=6),
    waiting=st.dictionaries(st.sampled_from("abc"), st.integers(1, 30)),
    minimum=st.integers(0, 3),
    room=st.integers(0, 4),
    max_starting=st.integers(1, 3),
)
def test_no_plan_ever_breaks_a_cap(hosts, waiting, minimum, room, max_starting):
    config = PoolConfig(
        slots_per_host=4,
        min_hosts=minimum,
        max_hosts=max(1, minimum + room),
        max_starting=max_starting,
        idle_s=60.0,
    )
    steps = plan(hosts, waiting, config, default_key="a")
    assert len(hosts) + len(steps.start) <= max(config.max_hosts, len(hosts))
    assert sum(host.starting for host in hosts) + len(steps.start) <= max(
        config.max_starting, sum(host.starting for host in hosts)
    )
    assert len(set(steps.stop)) == len(steps.stop)
    by_name = {host.name: host for host in hosts}
    assert all(by_name[name].idle_for_s is not None and not by_name[name].starting for name in steps.stop)
    idle_stops = [name for name in steps.stop if (by_name[name].idle_for_s or 0) >= config.idle_s]
    assert len(steps.stop) == len(idle_stops) or waiting
