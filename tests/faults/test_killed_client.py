"""A client that dies leaves nothing behind: not after SIGTERM or SIGINT, and not after SIGKILL and the next gc."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.journal.journal import Journal
from support import pool_client_program
from support.cli_verb import run_verb
from support.pool_leftovers import cgroup_name, leftovers, namespaces, processes
from support.pool_wait import eventually

pytestmark = pytest.mark.skipif(not Path("/proc/self/ns").exists(), reason="needs Linux")


class Client:
    """The client program, busy with its slots."""

    def __init__(self, tmp_path, slots, *flags):
        self.state, self.scratch = tmp_path / "state", tmp_path / "scratch"
        self.scratch.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, pool_client_program.__file__, str(self.state), str(self.scratch), str(slots), *flags],
            stdout=subprocess.PIPE,
            text=True,
            # Tests that a shell runs in the background ignore interrupts, and would pass that on.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        assert self.process.stdout.readline() == "busy\n"
        (record,) = self.scratch.glob("hermes-rl-*/*/host.json")
        self.server_pid = json.loads(record.read_text())["pid"]
        self.cgroups = [cgroup_name(record.parent / "scratch")]
        inside = [pid for pid, _ in processes(self.scratch, self.cgroups)]
        self.namespaces = namespaces(inside) - namespaces([os.getpid()])
        assert len(self.namespaces) >= slots or os.getuid() != 0

    def kill(self, number):
        self.process.send_signal(number)
        self.process.wait(60)
        self.process.stdout.close()

    def left(self):
        """What is there; a process that was killed gets a moment, because init takes its time to bury it."""
        for _ in range(600):
            found = leftovers(self.scratch, self.cgroups)
            kept = self.namespaces & namespaces()
            if not found and not kept:
                return {}
            time.sleep(0.05)
        return {**found, "network namespaces": kept} if kept else found


@pytest.fixture
def client(tmp_path):
    clients = []

    def start(slots=4, *flags):
        clients.append(Client(tmp_path, slots, *flags))
        return clients[-1]

    yield start
    for each in clients:
        if each.process.poll() is None:
            each.kill(signal.SIGKILL)
        collect(each)


def collect(client, *flags):
    """`hermes-rl pool gc`, in this process."""
    return run_verb("pool", "gc", "--json", "--state-dir", str(client.state), *flags)


def kill_tree(pid):
    """Kill a process and its children at once, as the OOM killer or a power cut of a container would."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for victim in (pid, *map(int, children)):
        os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize("also", ["nothing else", "the server", "the server and its helper"])
def test_after_sigkill_with_fifty_busy_slots_gc_leaves_nothing(client, capsys, also):
    victim = client(slots=50)
    if also == "the server":
        os.kill(victim.server_pid, signal.SIGKILL)
    elif also == "the server and its helper":
        kill_tree(victim.server_pid)
    victim.kill(signal.SIGKILL)
    assert collect(victim) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["left"] == 0
    assert victim.left() == {}
    journal = Journal(victim.state)
    assert (journal.hosts(), journal.leases()) == ([], [])
    journal.close()


@pytest.mark.parametrize("flags", [(), ("--sync",)], ids=["async", "sync"])
def test_sigterm_cleans_up_before_the_process_dies_of_it(client, flags):
    victim = client(4, *flags)
    victim.kill(signal.SIGTERM)
    assert victim.process.returncode == -signal.SIGTERM
    assert victim.left() == {}


@pytest.mark.parametrize("flags", [(), ("--sync",)], ids=["async", "sync"])
def test_sigint_cleans_up(client, flags):
    victim = client(4, *flags)
    victim.kill(signal.SIGINT)
    assert victim.process.returncode not in (0, None)
    assert victim.left() == {}


def test_the_next_pool_removes_what_a_killed_one_left(client):
    victim = client(slots=4)
    kill_tree(victim.server_pid)
    victim.kill(signal.SIGKILL)

    async def use_another():
        config = PoolConfig(slots_per_host=2, state_dir=victim.state, scratch_dir=victim.scratch)
        async with SlotPool.from_config(config) as pool, pool.lease("t") as box:
            assert (await box.exec("echo ok")).output == "ok\n"
            await eventually(lambda: not leftovers(victim.scratch, victim.cgroups).get("cgroups"), 30)

    asyncio.run(use_another())
    assert victim.left() == {}


def test_gc_leaves_a_living_owners_hosts_alone(client, capsys):
    living = client(slots=2)
    assert collect(living) == 0
    touched = {action["name"] for action in json.loads(capsys.readouterr().out)["actions"]}
    assert not touched & {
        path.name for path in living.scratch.rglob("hrl-*")
    }  # others' tests leave dead hosts here too
    assert living.process.poll() is None
    assert Path(f"/proc/{living.server_pid}").exists()


def test_without_its_journal_the_host_is_still_found(client, capsys):
    victim = client(slots=2)
    kill_tree(victim.server_pid)
    victim.kill(signal.SIGKILL)
    for path in victim.state.glob("pool.db*"):
        path.unlink()
    assert collect(victim, "--scratch-dir", str(victim.scratch)) == 0
    assert [action["done"] for action in json.loads(capsys.readouterr().out)["actions"]] == ["destroyed"]
    assert victim.left() == {}
