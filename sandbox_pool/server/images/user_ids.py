"""The user namespace of an ordinary user: with the id ranges that /etc/subuid gives him, else with his own id alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import subprocess
import sys
from typing import NamedTuple

from ..host_files import remove_tree

CLONE_NEWUSER = 0x10000000
WANTED = 65_535
"""Ids besides 0: what images use."""


class Range(NamedTuple):
    """Ids of the host that this user may map."""

    first: int
    length: int


def subordinate_ids() -> tuple[Range, Range] | None:
    """User and group ids that this user may map besides his own; None where he has none, or nothing maps them."""
    if os.geteuid() == 0 or not shutil.which("newuidmap") or not shutil.which("newgidmap"):
        return None
    users, groups = _range("/etc/subuid"), _range("/etc/subgid")
    return (users, groups) if users and groups else None


def _range(path: str) -> Range | None:
    names = {str(os.geteuid())}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(os.geteuid()).pw_name)
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            owner, _, rest = line.strip().partition(":")
            first, _, count = rest.partition(":")
            if owner in names and first.isdigit() and count.isdigit() and int(count) >= WANTED:
                return Range(int(first), WANTED)
    return None


def run_module(name: str) -> list[str]:
    """The command that runs `main` of a module of this folder, packed or not, in a Python of its own."""
    package = __name__.rpartition(".")[0]
    place = __file__[: -len(f"/{__name__.replace('.', '/')}.py")]
    program = f"import sys; sys.path.insert(0, {place!r}); from {package}.{name} import main; main()"
    return [sys.executable, "-I", "-c", program]


def remove_mapped(path: str) -> list[str]:
    """As `remove_tree`, also for trees with files of the ids that this user may map."""
    problems = remove_tree(path)
    if problems and subordinate_ids() is not None:
        subprocess.call([*run_module("user_ids"), "/bin/rm", "-rf", "--", path], stderr=subprocess.DEVNULL)
        problems = remove_tree(path)
    return problems


class _Enter:
    """Called once, in a process with one thread."""

    entered = False
    one_user = False

    def __call__(self) -> None:
        """Become root of a new user namespace."""
        ranges = subordinate_ids()
        uid, gid = os.geteuid(), os.getegid()
        start_read, start_write = os.pipe()
        mapper = os.fork()
        if mapper == 0:
            os.close(start_write)
            _map_and_exit(os.getppid(), start_read, ranges, uid, gid)
        os.close(start_read)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWUSER) != 0:
            error = ctypes.get_errno()
            os.close(start_write)
            os.waitpid(mapper, 0)
            raise OSError(error, f"a user namespace cannot be made: {os.strerror(error)}")
        os.write(start_write, b"!")
        os.close(start_write)
        _, status = os.waitpid(mapper, 0)
        self.one_user = os.WEXITSTATUS(status) != 0
        if self.one_user:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        self.entered = True


def _map_and_exit(pid: int, start: int, ranges: tuple[Range, Range] | None, uid: int, gid: int) -> None:
    """In a process that stayed outside: only the set-id programs of the host may map ranges."""
    code = 1
    if os.read(start, 1) and ranges is not None:
        code = 0
        for program, own, more in (("newuidmap", uid, ranges[0]), ("newgidmap", gid, ranges[1])):
            words = [program, str(pid), "0", str(own), "1", "1", str(more.first), str(more.length)]
            code = code or subprocess.call(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os._exit(1 if code else 0)


enter_user_namespace = _Enter()


def main() -> None:
    """Run the program that the arguments name, as root of a new user namespace."""
    enter_user_namespace()
    os.execv(sys.argv[1], sys.argv[1:])
