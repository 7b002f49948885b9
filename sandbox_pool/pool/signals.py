"""SIGTERM closes the pools of this process before it ends the process, as SIGINT does through the interpreter.

Python turns SIGINT into an exception, and leaving `async with` cleans up. SIGTERM would end the process at once; so
the first pool installs a handler, unless the program already has one. The process then still dies of SIGTERM, after
its pools are closed or a grace time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import weakref
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox_pool.pool.pool import SlotPool

GRACE_S = 20.0
_pools: weakref.WeakSet[SlotPool] = weakref.WeakSet()


def close_on_sigterm(pool: SlotPool) -> None:
    """Close this pool on SIGTERM."""
    _pools.add(pool)
    install()


def install() -> None:
    """Install the handler, if this is the main thread and the program has none."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def forget(pool: SlotPool) -> None:
    """The pool is closed; the last one takes the handler away."""
    _pools.discard(pool)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not _pools and in_main_thread and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    # From here on a second SIGTERM ends the process at once, and the closing thread ends it the same way.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A thread, because this handler runs inside the loop that has to go on to close the pools. Not a daemon: a program
    # that ends because its calls fail meanwhile waits for it, and still dies of SIGTERM.
    threading.Thread(target=_close_all_and_exit, name="sandbox-pool-sigterm").start()


def _close_all_and_exit() -> None:
    closings = []
    for pool in list(_pools):
        loop = pool.loop
        if loop is not None and loop.is_running():
            closings.append(asyncio.run_coroutine_threadsafe(pool.close(), loop))
    concurrent.futures.wait(closings, timeout=GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)
