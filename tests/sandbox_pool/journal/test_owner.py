import dataclasses
import subprocess
import sys

import pytest

from sandbox_pool.journal.owner import Owner, is_alive, start_ticks, this_process


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def owner_of(pid):
    return dataclasses.replace(this_process(), pid=pid, start_ticks=start_ticks(pid))


def test_this_process_is_alive():
    assert is_alive(this_process(), heartbeat_age_s=None)


def test_a_process_that_ended_is_dead_even_before_it_is_waited_for(child):
    owner = owner_of(child.pid)
    assert is_alive(owner, heartbeat_age_s=None)
    child.kill()
    child.stdin.close()
    child.wait()
    assert not is_alive(owner, heartbeat_age_s=1.0)


def test_a_zombie_counts_as_dead(child):
    owner = owner_of(child.pid)
    child.kill()
    assert _eventually(lambda: not is_alive(owner, heartbeat_age_s=None))


def _eventually(condition):
    return any(condition() for _ in range(1000000))


def test_another_process_with_the_same_pid_is_not_the_owner():
    here = this_process()
    assert not is_alive(dataclasses.replace(here, start_ticks=here.start_ticks - 1), heartbeat_age_s=1.0)


def test_owners_from_before_a_reboot_are_dead():
    assert not is_alive(dataclasses.replace(this_process(), boot_id="other"), heartbeat_age_s=1.0)


def test_an_owner_on_another_machine_is_judged_by_its_heartbeat():
    elsewhere = dataclasses.replace(this_process(), machine="far", pid=1)
    assert is_alive(elsewhere, heartbeat_age_s=5.0)
    assert not is_alive(elsewhere, heartbeat_age_s=500.0)


def test_an_owner_never_heard_of_and_out_of_sight_is_left_alone():
    assert is_alive(dataclasses.replace(this_process(), machine="far"), heartbeat_age_s=None)


def test_a_pid_of_another_pid_namespace_says_nothing_here():
    inside = dataclasses.replace(this_process(), pid_namespace="1", pid=1)
    assert not is_alive(inside, heartbeat_age_s=500.0)
    assert is_alive(inside, heartbeat_age_s=5.0)


def test_a_tag_reads_back_as_the_same_owner():
    assert Owner.parse(this_process().tag()) == this_process()


@pytest.mark.parametrize("text", ["", "a_b_c", "a_b_c_x_1", "a_b_c_1_2_3"])
def test_text_that_is_no_tag_is_refused(text):
    with pytest.raises(ValueError, match="not an owner tag"):
        Owner.parse(text)
