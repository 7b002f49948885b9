"""State directory, journal and scratch space that cannot be used: one sentence, exit 2, nothing half-done."""

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from environments.apps.cli.main import main
from sandbox_pool import StateError
from sandbox_pool.config import default_state_dir
from sandbox_pool.journal import journal as journal_module
from sandbox_pool.journal.journal import Journal, JournalHost
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers.base import ProviderContext

ME = this_process()


def make_file(path):
    path.write_text("not a folder")
    return path


def garbage(path):
    path.mkdir()
    (path / "pool.db").write_bytes(b"this is not a database" * 1000)
    return path


def torn(path):
    """A real journal whose second half is lost."""
    journal = Journal(path)
    for number in range(200):
        journal.intend(JournalHost(f"h{number}", ME.tag(), "local", {"slots": 1}, "k" * 200, "intent"))
    journal.close()
    data = bytearray((path / "pool.db").read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    (path / "pool.db").write_bytes(data)
    return path


def a_folder_as_journal(path):
    (path / "pool.db").mkdir(parents=True)
    return path


def newer(path):
    Journal(path).close()
    with sqlite3.connect(path / "pool.db") as db:
        db.execute("PRAGMA user_version=99")
    return path


def of_another_program(path):
    path.mkdir()
    with sqlite3.connect(path / "pool.db") as db:
        db.execute("CREATE TABLE hosts (something TEXT)")
        db.execute("INSERT INTO hosts VALUES ('x')")
    return path


STATE = {
    "a file": (make_file, "state_dir"),
    "below a file": (lambda path: make_file(path) / "state", "state_dir"),
    "in /proc": (lambda path: Path("/proc/hermes/state"), "state_dir"),
    "garbage": (garbage, "pool gc --rebuild"),
    "torn": (torn, "pool gc --rebuild"),
    "a folder": (a_folder_as_journal, "pool.db cannot be written"),
    "newer": (newer, "newer hermes-rl"),
    "another program's": (of_another_program, "pool gc --rebuild"),
}


def refused(capsys, *words):
    """The one sentence of a command that was refused."""
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("hermes-rl: ")
    return err


@pytest.mark.parametrize("action", ["status", "gc", "check"])
@pytest.mark.parametrize("case", STATE)
def test_a_state_directory_that_cannot_be_used(tmp_path, capsys, case, action):
    make, hint = STATE[case]
    more = ["--scratch-dir", str(tmp_path / "scratch"), "--only", "exec"] if action == "check" else []
    assert hint in refused(capsys, "pool", action, "--state-dir", str(make(tmp_path / "state")), *more)


@pytest.mark.parametrize("case", ["a file", "below a file", "in /proc"])
def test_a_scratch_space_that_cannot_be_used(tmp_path, capsys, case):
    scratch = STATE[case][0](tmp_path / "scratch")
    state = ["--state-dir", str(tmp_path / "state")]
    assert "scratch_dir" in refused(capsys, "pool", "check", "--only", "exec", "--scratch-dir", str(scratch), *state)


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "HOME"])
def test_a_home_that_cannot_be_written(tmp_path, capsys, monkeypatch, variable):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv(variable, str(make_file(tmp_path / "file")))
    assert "state_dir" in refused(capsys, "pool", "status")


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(StateError, match="state_dir"):
        default_state_dir()


def test_a_journal_that_another_process_locks(tmp_path, capsys, monkeypatch):
    Journal(tmp_path).close()
    monkeypatch.setattr(journal_module, "LOCK_TIMEOUT_S", 0.2)
    holder = sqlite3.connect(tmp_path / "pool.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert "locked by another process" in refused(capsys, "pool", "gc", "--state-dir", str(tmp_path))
    holder.close()
    assert main(["pool", "gc", "--state-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_key_that_is_no_key_is_refused(tmp_path, content):
    (tmp_path / "pool.key").write_bytes(content)
    with pytest.raises(StateError, match=r"pool\.key is damaged"):
        ProviderContext(owner="me", slots=1, state_dir=tmp_path).token("h1")


def test_a_damaged_journal_is_set_aside_and_rebuilt_from_what_is_there(tmp_path, capsys):
    state, host = garbage(tmp_path / "state"), tmp_path / "s" / f"hermes-rl-{os.getuid()}" / "lost"
    (host / "scratch").mkdir(parents=True)
    os.utime(host, (0, 0))
    flags = ["--state-dir", str(state), "--scratch-dir", str(tmp_path / "s")]
    assert main(["pool", "gc", "--rebuild", *flags]) == 0
    out, err = capsys.readouterr()
    assert "destroyed lost" in out
    assert "pool.db.damaged-" in err
    assert not host.exists()
    assert main(["pool", "gc", "--rebuild", *flags]) == 0
    assert capsys.readouterr().err == ""
    assert len([path for path in state.iterdir() if "damaged" in path.name]) == 1


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="only root can mount")
@pytest.mark.parametrize(
    ("prepare", "hint"),
    [
        (
            "mount -t tmpfs -o size=96k none {0}; mkdir -m 700 {0}/s; head -c 1M /dev/zero > {0}/fill 2>/dev/null",
            "disk",
        ),
        ("mkdir -m 700 {0}/s; mount --bind {0} {0}; mount -o remount,ro,bind {0}", "cannot be written"),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_nothing_more(tmp_path, prepare, hint):
    run = "import sys; from environments.apps.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = f'{prepare}; {sys.executable} -P -c "{run}" pool status --state-dir {{0}}/s'.format(tmp_path)
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert hint in done.stderr
