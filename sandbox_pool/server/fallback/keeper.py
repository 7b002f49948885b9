"""Owner of one command, in Python; see helper/keeper.c for what it promises."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import termios
import time

from . import kernel, tree
from .capture import Capture
from .config import Request, SlotConfig, receive, send
from .confine import become_command

FD_WAKE, FD_STATE, FD_SCRIPT = 200, 201, 202
BACKGROUND_LOG = 256 << 10


class Keeper:
    """One job, from its waiting shell to the last process it leaves."""

    def __init__(self, request: Request, config: SlotConfig) -> None:
        self.config = config
        self.sock = socket.socket(fileno=os.dup(request.fds[0]))
        self.background = bool(request.number("background"))
        self.pty = bool(request.number("pty"))
        size = request.number("state_size")
        self.initial_state = request.raw[:size]
        self.out, self.err, self.input = -1, -1, -1
        self.captures: dict[str, Capture] = {}
        self.log = b""
        self.log_total = 0
        self.unsent = b""
        self.close_when_sent = False
        self.running = self.finished = self.timed_out = self.killed = self.detached = False
        self.began = self.deadline = self.next_alive = 0.0
        kernel.prctl("adopt orphans", kernel.PR_SET_CHILD_SUBREAPER, 1)
        self.signals, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.start_shell(request, request.raw[size:])

    def start_shell(self, request: Request, stdin: bytes) -> None:
        """Fork the shell with its descriptors in place."""
        wake_read, self.script = (os.dup(fd) for fd in request.fds[1:3])
        self.state = os.memfd_create("state")
        os.write(self.state, self.initial_state[request.number("restore_from") :])
        child_in, child_out, child_err = self.open_standard(request, stdin)
        self.shell = os.fork()
        if self.shell == 0:
            self.run_shell(request, wake_read, child_in, child_out, child_err)
        for fd in {wake_read, child_in, child_out, child_err, self.script, *request.fds}:
            os.close(fd)
        for fd in (self.out, self.err, self.input):
            if fd >= 0:
                os.set_blocking(fd, False)
        if self.background:
            send(self.sock, "started", fields={"pid": self.shell})

    def open_standard(self, request: Request, stdin: bytes) -> tuple[int, int, int]:
        """The shell's stdin, stdout and stderr; ours are kept."""
        if self.pty:
            self.out, terminal = pty.openpty()
            self.input = self.out
            self.resize(request)
            if self.config.run_uid:
                os.fchown(terminal, self.config.run_uid, self.config.run_uid)
            return terminal, terminal, terminal
        self.out, child_out = os.pipe2(os.O_CLOEXEC)
        child_err = child_out
        if request.number("separate"):
            self.err, child_err = os.pipe2(os.O_CLOEXEC)
        if self.background:
            child_in, self.input = os.pipe2(os.O_CLOEXEC)
        elif request.number("stdin"):
            child_in = os.memfd_create("stdin")
            view = memoryview(stdin)
            while view:
                view = view[os.write(child_in, view) :]
            os.lseek(child_in, 0, os.SEEK_SET)
        else:
            child_in = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        return child_in, child_out, child_err

    def run_shell(self, request: Request, wake: int, child_in: int, child_out: int, child_err: int) -> None:
        """In the child; does not return."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.setsid()
            targets = ((child_in, 0), (child_out, 1), (child_err, 2))
            fixed = ((wake, FD_WAKE), (self.state, FD_STATE), (self.script, FD_SCRIPT))
            for source, target in (*targets, *fixed):
                os.dup2(source, target, inheritable=True)
            if self.pty:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            become_command(self.config)
            environment = dict(text.partition("=")[::2] for text in request.all("env"))
            os.execve(request.get("program"), request.all("arg"), environment)
        except OSError as error:
            os.write(2, f"cannot start the shell: {error}\n".encode())
        finally:
            os._exit(127)

    def run(self) -> None:
        """Until nothing of the job is left."""
        empty = False
        while not (self.finished and empty and (self.detached or not self.background)):
            readers = [fd for fd in (self.signals, self.out, self.err) if fd >= 0]
            readers += [] if self.detached else [self.sock.fileno()]
            writers = [self.input] if self.unsent and self.input >= 0 else []
            ready, writable, _ = select.select(readers, writers, [], self.timeout())
            # The server says `run` before it wakes the shell, so it must be heard before anything the shell did.
            if not self.detached and (self.sock.fileno() in ready or self.run_is_waiting()):
                self.receive()
            for name in ("out", "err"):
                if getattr(self, name) in ready:
                    self.drain(name, 1 << 20)
            if writable:
                self.send_input()
            self.tick()
            if self.signals in ready:
                os.read(self.signals, 4096)
            empty = self.reap()

    def run_is_waiting(self) -> bool:
        """It may have come while select() was looking at the other descriptors already."""
        return not self.running and not self.finished and bool(select.select([self.sock.fileno()], [], [], 0)[0])

    def receive(self) -> None:
        """One message, or the end of the server's interest."""
        request = receive(self.sock)
        if request is not None:
            self.handle(request)
            return
        self.detached = True
        if not self.finished:
            self.kill_tree()
        if self.background:
            os._exit(0)

    def handle(self, request: Request) -> None:
        """One message of the server."""
        if request.op == "run" and not self.running:
            self.run_command(request)
        elif request.op == "kill":
            self.killed = not self.finished
            self.kill_tree()
        elif request.op == "signal" and not self.finished:
            with contextlib.suppress(OSError):
                os.killpg(self.shell, request.number("number", signal.SIGTERM))
        elif request.op == "log":
            self.send_log(request)
        elif request.op == "input" and self.input >= 0:
            self.unsent += request.raw
            self.close_when_sent = self.close_when_sent or bool(request.number("eof"))
            self.send_input()
        elif request.op == "resize" and self.pty:
            self.resize(request)

    def resize(self, request: Request) -> None:
        """Size of the terminal."""
        size = struct.pack("HHHH", request.number("rows", 30), request.number("cols", 120), 0, 0)
        fcntl.ioctl(self.out, termios.TIOCSWINSZ, size)

    def run_command(self, request: Request) -> None:
        """Hand the waiting shell its script."""
        log, cap = request.get("log"), request.number("max_chars")
        self.captures = {
            "out": Capture(cap, log, self.config.run_uid),
            "err": Capture(cap, f"{log}.stderr", self.config.run_uid),
        }
        self.running = True
        self.began = time.monotonic()
        timeout_ms = request.number("timeout_ms")
        self.deadline = self.began + timeout_ms / 1000 if timeout_ms else 0.0
        self.alive_every_s = request.number("alive_ms", 10_000) / 1000
        self.next_alive = self.began + self.alive_every_s

    def timeout(self) -> float | None:
        """Seconds until something is due."""
        if not self.running or self.finished:
            return None
        due = min(self.next_alive, self.deadline or self.next_alive)
        return max(0.0, due - time.monotonic())

    def tick(self) -> None:
        """What is due now."""
        now = time.monotonic()
        if not self.running or self.finished:
            return
        if self.deadline and now >= self.deadline:
            self.timed_out = True
            self.kill_tree()
        elif now >= self.next_alive:
            send(self.sock, "alive", fields={"us": int((now - self.began) * 1e6)})
            self.next_alive += self.alive_every_s

    def drain(self, name: str, limit: int) -> None:
        """At most `limit` bytes of what is there now."""
        fd = getattr(self, name)
        while fd >= 0 and limit > 0:
            try:
                data = os.read(fd, min(limit, 65536))
            except BlockingIOError:
                return
            except OSError:  # EIO: the last program on the terminal is gone
                data = b""
            if not data:
                if fd == self.input:
                    self.input = -1
                os.close(fd)
                setattr(self, name, -1)
                return
            limit -= len(data)
            self.keep(name, data)

    def keep(self, name: str, data: bytes) -> None:
        """Output of the command."""
        if self.background:
            self.log = (self.log + data)[-BACKGROUND_LOG:]
            self.log_total += len(data)
        elif not self.finished and name in self.captures:
            self.captures[name].add(data)

    def reap(self) -> bool:
        """True when nothing is left below this keeper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.shell and not self.finished:
                self.shell_ended(status)

    def kill_tree(self) -> None:
        """Everything the command started."""
        tree.kill_descendants(os.getpid())
        for _ in range(5000):
            if self.reap():
                return
            time.sleep(0.001)

    def shell_ended(self, status: int) -> None:
        """What the shell wrote is in the pipes already; a child that goes on writing must not delay the result."""
        for name in ("out", "err"):
            fd = getattr(self, name)
            if fd >= 0:
                (available,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
                self.drain(name, available)
        elapsed_us = int((time.monotonic() - self.began) * 1e6)
        if self.background:
            fields = {"status": status, "killed": self.killed, "us": elapsed_us}
            self.detached |= not send(self.sock, "exit", fields=fields)
        else:
            self.report(status, elapsed_us)
        self.finished = True

    def report(self, status: int, elapsed_us: int) -> None:
        """The outcome of a command, with its state when it saved one."""
        saved = os.pread(self.state, os.fstat(self.state).st_size, 0)
        first = saved.find(b"\0")
        directories = saved.find(b"\0", first + 1) + 1 if first >= 0 else 0
        state = saved[directories:] if directories else b""
        same = not directories or state == self.initial_state
        fields: dict[str, object] = {"status": status, "ran": self.running, "timed_out": self.timed_out}
        fields.update(killed=self.killed, us=elapsed_us)
        raw = b""
        for name in ("out", "err"):
            capture = self.captures.get(name) or Capture(0, "", 0)
            capture.finish()
            tail = b"" if capture.tail is None else capture.tail
            fields[f"{name}_head"] = len(capture.head)
            fields[f"{name}_tail"] = -1 if capture.tail is None else len(tail)
            fields[f"{name}_chars"] = capture.chars
            raw += capture.head + tail
        fields.update(directories=directories, state=-1 if same else len(state))
        raw += saved[:directories] + (b"" if same else state)
        self.detached |= not send(self.sock, "exit", raw, fields=fields)

    def send_log(self, request: Request) -> None:
        """Part of the rolling log."""
        oldest = self.log_total - len(self.log)
        asked = request.number("offset")
        start = min(max(asked, oldest), self.log_total)
        data = self.log[start - oldest :]
        limit = request.number("limit", -1)
        data = data[:limit] if limit >= 0 else data
        fields = {
            "id": request.number("id"),
            "offset": start,
            "dropped": max(0, start - asked),
            "total": self.log_total,
        }
        send(self.sock, "log", data, fields=fields)

    def send_input(self) -> None:
        """What the process takes now; the rest when it reads on."""
        try:
            while self.unsent and self.input >= 0:
                self.unsent = self.unsent[os.write(self.input, self.unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self.unsent = b""
        if self.close_when_sent and self.input >= 0:
            if self.pty:
                os.write(self.input, b"\x04")
            else:
                os.close(self.input)
                self.input = -1
            self.close_when_sent = False
