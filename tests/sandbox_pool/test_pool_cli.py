"""`hermes-rl pool`: status, gc, check, bench."""

import dataclasses
import json

import pytest

from sandbox_pool.journal.gc import default_place
from sandbox_pool.journal.journal import Journal, JournalHost
from sandbox_pool.journal.owner import this_process
from support.cli_verb import UsageError, run_verb


@pytest.fixture
def state(tmp_path):
    return ["--state-dir", str(tmp_path / "state")]


@pytest.fixture
def alone(tmp_path):
    """A scratch folder that no other test leaves anything in."""
    return ["--scratch-dir", str(tmp_path / "scratch")]


def add_dead_host(tmp_path):
    dead = dataclasses.replace(this_process(), start_ticks=1)
    journal = Journal(tmp_path / "state")
    journal.beat(dead, "python train.py")
    settings = default_place("local", tmp_path / "s")[1]
    journal.intend(JournalHost("h1", dead.tag(), "local", settings, "key", "intent"))
    journal.close()


def test_status_of_nothing(state, capsys):
    assert run_verb("pool", "status", *state) == 0
    assert "No hosts." in capsys.readouterr().out


def test_status_shows_hosts_and_dead_owners(state, tmp_path, capsys):
    add_dead_host(tmp_path)
    assert run_verb("pool", "status", "--json", *state) == 0
    (host,) = json.loads(capsys.readouterr().out)["hosts"]
    assert (host["name"], host["state"], host["owner_alive"]) == ("h1", "intent", False)
    assert host["owner_command"] == "python train.py"
    run_verb("pool", "status", *state)
    shown = capsys.readouterr().out
    assert "is dead" in " ".join(shown.split())
    assert "pool gc" in shown


def test_gc_prints_what_it_did(state, alone, tmp_path, capsys):
    add_dead_host(tmp_path)
    assert run_verb("pool", "gc", *state, *alone) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 removed, 0 left"
    assert run_verb("pool", "gc", *state, *alone) == 0
    assert capsys.readouterr().out == "0 removed, 0 left\n"


def test_gc_fails_when_something_is_left(state, tmp_path, capsys, monkeypatch):
    add_dead_host(tmp_path)

    async def refuse(self, name):
        raise OSError("will not go")

    monkeypatch.setattr("sandbox_pool.providers.local.LocalProvider.stop", refuse)
    assert run_verb("pool", "gc", "--json", *state) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["left"] == 1
    assert "will not go" in report["actions"][0]["reason"]


def test_check_runs_the_suite_and_says_what_is_not_promised(state, tmp_path, capsys):
    words = ["check", "--only", "execution.output", "--only", "own_loopback", "--only", "no_network", "--slots", "4"]
    words += ["--option", "level=plain", "--scratch-dir", str(tmp_path / "s"), *state]
    assert run_verb("pool", *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["isolation"] == "plain"
    verdicts = {check["id"]: check["verdict"] for check in report["checks"]}
    assert verdicts["execution.output_and_exit_code"] == "passed"
    assert verdicts["isolation.no_network_means_none"] == "not promised"


def test_check_fails_when_a_promise_is_not_kept(state, tmp_path, capsys, monkeypatch):
    import sandbox_pool.conformance
    from sandbox_pool.conformance.check import Check, CheckFailed

    async def broken(ctx):
        raise CheckFailed("it did something else")

    monkeypatch.setattr(sandbox_pool.conformance, "all_checks", lambda: (Check("x", "y", "It works.", (), broken),))
    words = ["check", "--slots", "2", "--scratch-dir", str(tmp_path / "s"), *state]
    assert run_verb("pool", *words) == 1
    shown = capsys.readouterr().out
    assert "it did something else" in shown
    assert "1 failed" in shown


def test_check_lists_promises_without_running_anything(state, capsys):
    assert run_verb("pool", "check", "--list", *state) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 80
    assert any("fork bomb" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "--only", "no-such-check"], "no check's id contains"),
        (["check", "--provider", "locl"], "no provider 'locl'"),
        (["check", "--option", "level"], "not KEY=VALUE"),
        (["check", "--option", "levle=plain"], "levle"),
        (["bench", "--slots", "0"], "--slots: 0 is too small"),
        (["check", "--option", "level=plain", "--min-isolation", "namespaces", "--slots", "1"], "could not be started"),
    ],
)
def test_bad_input_is_one_clear_sentence(state, words, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        run_verb("pool", *words, "--scratch-dir", str(tmp_path / "s"), *state)


def test_bench_gives_every_promised_figure_beside_its_control(state, tmp_path, capsys):
    words = ["bench", "--slots", "2", "--rounds", "5", "--throughput-s", "0.2", "--transfer-mb", "2", "--rest-s", "0"]
    words += ["--scratch-dir", str(tmp_path / "s"), *state]
    assert run_verb("pool", *words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("control_exec_ms", "exec_ms", "acquire_ms", "reset_ms", "fork_ms"):
        assert set(result[name]) == {"p50", "p95", "p99"}
        assert result[name]["p50"] > 0
    for name in (
        "isolation",
        "throughput_per_s",
        "control_throughput_per_s",
        "waiting_kb_per_slot",
        "idle_kb_per_slot",
    ):
        assert result[name]
    assert result["transfer_exact"] is True
    assert set(result["ratios"]) == {"exec_p50", "exec_p99", "reset_p50", "cycle_p50", "throughput"}


def test_bench_as_a_table(state, tmp_path, capsys):
    words = ["bench", "--slots", "1", "--rounds", "2", "--throughput-s", "0.05", "--transfer-mb", "1", "--rest-s", "0"]
    words += ["--many", "60"]
    assert run_verb("pool", *words, "--scratch-dir", str(tmp_path / "s"), *state) == 0
    shown = capsys.readouterr()
    assert "control_exec" in shown.out
    assert "x control" in shown.out
    assert "usable 60, quarantined 0" in shown.out
    assert "measuring" in shown.err
