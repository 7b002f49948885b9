"""A cluster that cannot be reached leaves no ghosts in the journal, and keeps nothing else from being cleaned."""

import dataclasses
import json
import logging
import os
import sqlite3

import pytest

from environments.apps.cli.main import main
from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.journal.gc import INTENT_EXPIRES_S, default_place
from sandbox_pool.journal.journal import Journal, JournalHost
from sandbox_pool.journal.owner import this_process

DEAD = dataclasses.replace(this_process(), start_ticks=1)
NOWHERE = {"address": "http://127.0.0.1:1", "api_timeout_s": 0.3}
SETTINGS = default_place("nomad", options=NOWHERE)[1]


@pytest.fixture
def record(tmp_path):
    """Put a host of a dead process into the journal."""

    def add(name, *, age_s=0.0, ran=False):
        journal = Journal(tmp_path / "state")
        journal.beat(DEAD)
        journal.intend(JournalHost(name, DEAD.tag(), "nomad", SETTINGS, "key", "intent"))
        if ran:
            journal.running(name, address="tcp:far:1", slots=1, isolation="namespaces")
        journal.close()
        with sqlite3.connect(journal.path) as db:
            db.execute("UPDATE hosts SET created_s = created_s - ? WHERE name = ?", (age_s, name))

    return add


def hosts(tmp_path):
    journal = Journal(tmp_path / "state")
    try:
        return [host.name for host in journal.hosts()]
    finally:
        journal.close()


def collect(tmp_path, capsys, *flags):
    code = main(["pool", "gc", "--json", "--state-dir", str(tmp_path / "state"), *flags])
    report = json.loads(capsys.readouterr().out)
    return code, {action["name"]: action for action in report["actions"]}


def test_a_check_of_a_cluster_that_is_not_there_leaves_nothing_on_record(tmp_path, capsys):
    options = [word for key, value in NOWHERE.items() for word in ("--option", f"{key}={value}")]
    state = ["--state-dir", str(tmp_path / "state")]
    assert main(["pool", "check", "--provider", "nomad", "--only", "exec", *options, *state]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert hosts(tmp_path) == []


def test_gc_says_what_it_cannot_reach_and_cleans_the_rest(tmp_path, capsys, record):
    for number in range(5):
        record(f"ghost{number}")
    stray = tmp_path / "s" / f"hermes-rl-{os.getuid()}" / "stray"
    (stray / "scratch").mkdir(parents=True)
    os.utime(stray, (0, 0))  # a young one may be somebody's who is about to write its record
    code, actions = collect(tmp_path, capsys, "--scratch-dir", str(tmp_path / "s"))
    assert (code, actions["stray"]["done"], actions["ghost0"]["done"]) == (0, "destroyed", "kept")
    assert "cannot be asked" in actions["ghost0"]["reason"]
    assert len(hosts(tmp_path)) == 5


def test_an_intent_that_nobody_saw_running_expires(tmp_path, capsys, record):
    record("ghost", age_s=INTENT_EXPIRES_S + 1)
    code, actions = collect(tmp_path, capsys)
    assert (code, actions["ghost"]["done"]) == (0, "expired")
    assert hosts(tmp_path) == []


def test_a_host_that_ran_stays_on_record_until_its_place_answers(tmp_path, capsys, record):
    record("real", age_s=INTENT_EXPIRES_S + 1, ran=True)
    code, actions = collect(tmp_path, capsys)
    assert (code, actions["real"]["done"]) == (1, "failed")
    assert hosts(tmp_path) == ["real"]


def test_a_cluster_that_was_asked_for_and_does_not_answer_is_a_failure(tmp_path, capsys):
    options = [word for key, value in NOWHERE.items() for word in ("--option", f"{key}={value}")]
    code, actions = collect(tmp_path, capsys, "--provider", "nomad", *options)
    assert (code, actions["*"]["done"]) == (1, "failed")


async def test_local_runs_do_not_show_the_troubles_of_another_place(tmp_path, caplog, record):
    record("ghost", ran=True)
    config = PoolConfig(slots_per_host=1, state_dir=tmp_path / "state", scratch_dir=tmp_path / "s")
    with caplog.at_level(logging.INFO):
        async with SlotPool.from_config(config) as pool:
            await pool._collect()
    assert "ghost" not in caplog.text
