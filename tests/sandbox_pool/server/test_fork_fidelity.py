"""A fork has the files of its original, by the word of rsync: owners, modes, times, links, attributes, holes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.slot_server import Server, running_server

pytestmark = [
    pytest.mark.skipif(shutil.which("rsync") is None, reason="there is no rsync"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can look into slots from outside"),
]

MAKE = r"""
set -e
mkdir -p a/b/c; echo one > a/f; echo two > a/b/run; chmod 4755 a/b/run; chmod 2770 a/b; chmod 1777 a/b/c
ln a/f a/b/hard; ln a/f hard; ln -s ../a/f a/link; ln -s /nowhere dangling; mkfifo a/pipe; chmod 640 a/pipe
truncate -s 20M sparse; echo end >> sparse; : > empty; chmod 000 empty
mkdir closed; echo x > closed/in; chmod 500 closed
echo n > $'new\nline'; echo b > $'\xff\xfe'; echo s > 'with space'; mkdir "$(printf 'n%.0s' $(seq 250))"
python3 - <<'P'
import contextlib, os, socket, struct
for path in ("a/f", "a", "a/b/run"):
    with contextlib.suppress(OSError):
        os.setxattr(path, "user.note", b"kept\x00\xff")
with contextlib.suppress(OSError):
    os.chown("a/b/run", 12, 34); os.chown("a/link", 5, 6, follow_symlinks=False); os.chmod("a/b/run", 0o6755)
    os.chown("a/pipe", 7, 8)
entries = (1, 7, -1), (4, 5, -1), (8, 7, 77), (16, 7, -1), (32, 5, -1)
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
for name in ("access", "default"):  # the second holds for what is made in the folder from now on, not for what is there
    with contextlib.suppress(OSError):
        os.setxattr("a/b" if name == "default" else "a/f", "system.posix_acl_" + name, acl)
socket.socket(socket.AF_UNIX).bind("sock")
os.utime("a/f", ns=(1_234_567_890_123_456_789,) * 2)
os.utime("dangling", ns=(987_654_321_000_000_001,) * 2, follow_symlinks=False)
os.utime("a/pipe", ns=(555_000_000_000_000_000,) * 2)
os.utime("a/b/c", ns=(1_000_000_000_000_000_007,) * 2)
P
"""
COMPARE = ("--checksum", "--delete", "--dry-run")


def slot_folder(server: Server, workdir: str) -> Path:
    """The workspace of the only slot, from outside."""
    if not workdir.startswith("/workspace"):
        return Path(workdir)
    below = [server.process.pid]
    for pid in below:
        with contextlib.suppress(OSError):
            below += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return next(path for pid in below if ((path := Path(f"/proc/{pid}/root{workdir}")) / "with space").exists())


async def rsync(source: Path, target: Path, *options: str) -> list[str]:
    """What rsync changes, a line for each."""
    command = ["rsync", "-aHAXS", "--numeric-ids", "--itemize-changes", *options, f"{source}/", f"{target}/"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, errors="replace", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("level", ["namespaces-root", "namespaces-nouser", "landlock"])
@pytest.mark.parametrize(
    ("workspace", "more"),
    [(True, ""), (True, "head -c 300K /dev/urandom > big"), (False, "")],
    ids=["workspace", "large-workspace", "layer"],
)
async def test_rsync_finds_nothing_to_change_in_a_fork(level: str, workspace: bool, more: str, tmp_path: Path) -> None:
    """The slot is the same one twice, so that its users have the same numbers on the host."""
    try:
        starting = running_server("--level", level, slots=1)
        server = await starting.__aenter__()
    except RuntimeError as error:
        pytest.skip(f"this machine cannot do it: {error}")
    try:
        async with server.lease() as agent:
            made = await agent.exec(MAKE + more)
            assert made.exit_code == 0, made.output
            # rsync goes out of a slot, not into one: what it judges are copies that it made itself.
            await rsync(slot_folder(server, agent.workdir), tmp_path / "kept")
            snapshot = await agent.snapshot(workspace=workspace)
        async with server.lease(snapshot=snapshot) as fork:
            await rsync(slot_folder(server, fork.workdir), tmp_path / "fork")
            assert int((await fork.exec("stat -c %b sparse")).output) < 64
        assert await rsync(tmp_path / "kept", tmp_path / "fork", *COMPARE) == []
        assert await rsync(tmp_path / "fork", tmp_path / "kept", *COMPARE) == []
        (tmp_path / "fork/a/b/run").chmod(0o700)  # what finds nothing must be able to find something
        assert await rsync(tmp_path / "kept", tmp_path / "fork", *COMPARE) != []
    finally:
        await starting.__aexit__(None, None, None)
