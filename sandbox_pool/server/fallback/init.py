"""First process of a slot, in Python: forks a keeper per command and a worker per file request, and reaps."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket

from . import confine, keeper, kernel, rootfs, tree, worker
from .config import Request, SlotConfig, receive, send


class Init:
    """The slot's control socket and its keepers."""

    def __init__(self, control: socket.socket, config: SlotConfig, upper: int) -> None:
        self.control = control
        self.config = config
        self.upper = upper
        self.keepers: dict[int, int] = {}
        self.wake, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Until the server lets go; then everything ends."""
        while True:
            ready, _, _ = select.select([self.control.fileno(), self.wake], [], [])
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap()
            if self.control.fileno() not in ready:
                continue
            request = receive(self.control)
            if request is None:
                self.kill_all()
                os._exit(0)
            self.handle(request)
            for fd in request.fds:
                os.close(fd)

    def reap(self) -> None:
        """Collect the dead, known or adopted."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.keepers = {number: other for number, other in self.keepers.items() if other != pid}

    def kill_all(self) -> int:
        """Everything but this process."""
        killed = 0
        if not self.config.namespaces:
            killed = tree.kill_descendants(os.getpid())
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
                killed += 1
        self.keepers.clear()
        return killed

    def handle(self, request: Request) -> None:
        """One request of the server."""
        if request.op in ("job", "file"):
            self.fork_helper(request)
        elif request.op == "drop" and request.number("id") in self.keepers:
            pid = self.keepers[request.number("id")]
            tree.kill_descendants(pid)
            os.kill(pid, signal.SIGKILL)
        elif request.op == "kill_all":
            send(self.control, "killed", fields={"count": self.kill_all()})

    def fork_helper(self, request: Request) -> None:
        """A keeper or a file worker."""
        pid = os.fork()
        if pid:
            if request.op == "job":
                self.keepers[request.number("id")] = pid
            return
        try:
            signal.set_wakeup_fd(-1)
            self.control.close()
            kernel.prctl("die with the init", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if request.op == "job":
                keeper.Keeper(request, self.config).run()
            else:
                worker.worker_main(request, self.config, self.upper)
        finally:
            os._exit(0)


def _enter(config: SlotConfig, layer_fds: list[int]) -> tuple[int, dict[str, object]]:
    """Build the slot and give up everything; returns the writable layer and the proof that it starts empty."""
    upper, entries = -1, 0
    if config.user_ns:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    if config.namespaces:
        upper = rootfs.build_root(config, layer_fds)
        entries = len(os.listdir(upper)) - len(config.parts)
    with open("/proc/self/mountinfo") as table:
        mounts = sum(1 for _ in table)
    os.umask(0o022)
    if config.namespaces:
        os.makedirs(config.workdir, exist_ok=True)
        os.makedirs(config.home, mode=0o700, exist_ok=True)
    else:
        kernel.prctl("adopt orphans", kernel.PR_SET_CHILD_SUBREAPER, 1)
    processes = tree.count_processes() if config.namespaces else 1
    confine.drop_init_privileges(config)
    return upper, {"processes": processes, "upper_entries": entries, "mounts": mounts}


def init_main(control: socket.socket, config: SlotConfig, layer_fds: list[int]) -> None:
    """Become the slot."""
    try:
        upper, proof = _enter(config, layer_fds)
    except OSError as error:
        step = getattr(error, "step", error.filename or "build the slot")
        send(control, "failed", fields={"step": step, "errno": error.errno or errno.EIO})
        os._exit(71)
    for fd in layer_fds:
        os.close(fd)
    signal.set_wakeup_fd(-1)
    _close_others({0, 1, 2, control.fileno(), upper})
    send(control, "ready", fields=proof)
    Init(control, config, upper).run()


def _close_others(kept: set[int]) -> None:
    """Descriptors of the zygote have no business in a slot."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
