"""What only a process of our own may decide: its event loop, how often it collects garbage, and when it ends.

`python own_process.py OWNER_PID COMMAND...` becomes COMMAND and ends with its owner. It is run by its path, so nothing
but the standard library is imported at the top.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

COLLECT_AFTER = 20_000
"""New containers before the garbage collector looks at them. Python's 700 would have it read every prompt that waits
for its answer (lists of thousands of ids) again and again: with hundreds of rollouts a twentieth of the CPU."""
PR_SET_PDEATHSIG = 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where it is installed. A library has no say in this: call it where `main` is ours."""
    gc.set_threshold(COLLECT_AFTER)
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends; exits when it has ended already.

    Only Linux does that. Elsewhere a parent that is killed leaves this process behind.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
