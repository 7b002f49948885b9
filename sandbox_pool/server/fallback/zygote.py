"""Host side in Python: clones slots on request, reaps them, says so."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys

from . import kernel, worker
from .config import Request, SlotConfig, receive, send
from .init import init_main


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _map_ids(pid: int, config: SlotConfig) -> None:
    privileged = os.geteuid() == 0
    if not privileged:
        _write(f"/proc/{pid}/setgroups", "deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        _write(f"/proc/{pid}/{name}", f"0 {config.uid_base if privileged else own} {config.uid_count}\n")


def _prepare(pid: int, config: SlotConfig) -> list[int]:
    """Ids, cgroups, layers of a child that waits for them."""
    if config.user_ns:
        _map_ids(pid, config)
    for path in config.cgroups:
        _write(path, str(pid))
    if not config.idmap:
        return []
    userns = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [kernel.clone_layer(path, userns) for path in config.layers]
    finally:
        os.close(userns)


def _slot_child(control: socket.socket, go: socket.socket, config: SlotConfig) -> None:
    kernel.prctl("die with the zygote", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    start = receive(go)
    if start is None:
        os._exit(71)
    init_main(control, config, start.fds)


def _create(control: socket.socket, request: Request) -> None:
    config = SlotConfig.read(request)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flags = (
        kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS if config.namespaces else 0
    )
    flags |= kernel.CLONE_NEWUSER if config.user_ns else 0
    flags |= kernel.CLONE_NEWNET if config.net_ns else 0
    slot, pid = request.get("slot"), -1
    try:
        pid = kernel.clone(flags, signal.SIGCHLD)
        if pid == 0:
            ours.close()
            control.close()
            _slot_child(socket.socket(fileno=request.fds[0]), theirs, config)
            os._exit(0)
        layers = _prepare(pid, config)
        send(ours, "go", fds=layers)
        for fd in layers:
            os.close(fd)
    except OSError as error:
        step = getattr(error, "step", "prepare the slot")
        fields = {"slot": slot, "pid": pid, "step": step, "errno": error.errno or errno.EIO}
        send(control, "failed", fields=fields)
    else:
        send(control, "created", fields={"slot": slot, "pid": pid, "errno": 0})
    finally:
        ours.close()  # a child that was not let go dies of this
        theirs.close()


def _report_dead(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        send(control, "dead", fields={"pid": pid, "status": status})


def _kill(pid: int) -> None:
    """Only a child that was not reaped yet can be meant: its number can not have been given to another."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    os.kill(pid, signal.SIGKILL)


def _handle(control: socket.socket, request: Request) -> None:
    if request.op == "create":
        _create(control, request)
    elif request.op == "kill":
        _kill(request.number("pid"))
    elif request.op == "file" and os.fork() == 0:
        control.close()
        worker.worker_main(request, None, -1)
        os._exit(0)


def main() -> None:
    """`--python-helper zygote FD`."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    os.set_inheritable(control.fileno(), False)
    kernel.prctl("die with the server", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_dead(control)
        if control.fileno() in ready:
            request = receive(control)
            if request is None:
                return
            _handle(control, request)
            for fd in request.fds:
                os.close(fd)
