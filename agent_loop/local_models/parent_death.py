"""Ties a process to its owner: the kernel kills it when the owner is gone, however that ended.

`python tie.py OWNER_PID COMMAND...` becomes COMMAND, tied. It is run by its path, so that nothing else is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(owner: int) -> None:
    """Ask the kernel for SIGKILL when the owner goes; ends at once when it is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        sys.exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
