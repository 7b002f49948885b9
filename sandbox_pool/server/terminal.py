"""Whether /dev/tty leads to the terminal of a program; in gVisor it leads nowhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import termios

WAIT_S = 2.0


def controlling_terminal_works() -> bool:
    """Found by writing to it from a process that has a new terminal."""
    try:
        ours, theirs = os.openpty()
    except OSError:
        return False
    pid = os.fork()
    if pid == 0:
        _write_and_exit(theirs)
    os.close(theirs)
    try:
        arrived, _, _ = select.select([ours], [], [], WAIT_S)
        return bool(arrived) and os.read(ours, 1) == b"!"
    except OSError:  # the other side was closed, and nothing had been written
        return False
    finally:
        os.close(ours)
        os.waitpid(pid, 0)


def _write_and_exit(terminal: int) -> None:
    with contextlib.suppress(OSError):
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        os.write(os.open("/dev/tty", os.O_RDWR), b"!")
    os._exit(0)
