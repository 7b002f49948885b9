"""A built slot: one init process, its shell state, its commands. It is thrown away at reset, never cleaned."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..faults import SlotError
from . import shell
from .channel import Channel, Message, message_pair
from .exec_messages import KEEPER_GRACE_S, ExecOutcome, begun, path_for_wire, path_text, run_fields, run_message
from .jobs import BASH, Job, next_number, shell_fields
from .zygote import BuildError, failure_text

if TYPE_CHECKING:
    from .proxy import Proxy

READY_TIMEOUT_S = 20.0
LOGIN_MS, LOGIN_CHARS = 30_000, 2_000
END_HEARD_S = 0.5
# LC_CTYPE and not LANG: the same UTF-8, and every shell starts with one locale file to open instead of a dozen.
BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_CTYPE": "C.UTF-8",
    "TERM": "xterm",
    "SHELL": "/bin/bash",
}


class Instance:
    """State that belongs to one life of a slot, between two resets."""

    def __init__(
        self,
        pid: int,
        control: socket.socket,
        *,
        workdir: str,
        alias: str,
        home: str,
        log_dir: str,
        env: Mapping[str, str],
        shell_program: Sequence[str] = (BASH,),
    ) -> None:
        self.pid = pid
        self.workdir = workdir
        self.alias = alias
        """The spec's name for `workdir` where the slot has no root of its own; else empty."""
        self.log_dir = log_dir
        self.shell_program = tuple(shell_program)
        self._base_environment = {**BASE_ENVIRONMENT, "HOME": home, "USER": "root", "LOGNAME": "root", **env}
        self.environment: dict[str, str] = dict(self._base_environment)
        self._session_boot, self._process_boot = shell.session_boot(workdir), shell.process_boot(workdir)
        self.cwd = workdir
        """Of the session, as its last command left it."""
        self.state = 0
        """The job whose state the next shell starts from; 0 is the environment alone."""
        self._shell: Job | None = None
        """The session: the shell that ran the last command that ended, and waits."""
        self._lent: Job | None = None
        """The session while a client sends it commands on a line of its own."""
        self._superseded = False
        """A command beside the line has ended since the last one on it."""
        self.line_running = False
        self.line_used_s = 0.0
        """When the last command on that line ended, as far as was heard."""
        self._recalls: list[asyncio.Future[None]] = []
        self._line_ended: Callable[[], None] | None = None
        self._resting: Job | None = None
        """The session while its keeper finds out whether it can be ended."""
        self.jobs: set[Job] = set()
        self.processes: dict[str, Job] = {}
        self.proxy: Proxy | None = None
        """The way out, for specs with network rules."""
        self.lost: str | None = None
        self.hidden = 0
        """What `PrivateFiles.changes` was when it was built."""
        self._names = itertools.count(1)
        self._states: list[asyncio.Future[Message]] = []
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Message] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._killed: list[asyncio.Future[int]] = []
        self.control = Channel(control, self._on_message, self._on_close)
        self._set_fields()

    async def ready(self) -> Message:
        """Until the init reports that the slot is built; its report is the proof that it starts empty."""
        return await asyncio.wait_for(asyncio.shield(self._ready), READY_TIMEOUT_S)

    def _on_message(self, message: Message) -> None:
        if message.op == "ready" and not self._ready.done():
            self._ready.set_result(message)
        elif message.op == "failed" and not self._ready.done():
            self._ready.set_exception(BuildError(failure_text(message)))
        elif message.op == "killed" and self._killed:
            self._killed.pop(0).set_result(message.number("count"))
        elif message.op == "state" and self._states:
            self._states.pop(0).set_result(message)

    def _on_close(self) -> None:
        self.lost = "the slot's init process is gone"
        self._end()
        if not self._ready.done():
            self._ready.set_exception(BuildError(self.lost))
        for job in list(self.jobs):
            job.fail(SlotError("lost", self.lost))
            job.discard()
        waiting: list[asyncio.Future[Any]] = [*self._killed, *self._states]
        for future in waiting:
            if not future.done():
                future.set_exception(SlotError("lost", self.lost))

    def _set_fields(self) -> None:
        folder = self.workdir if self.alias else ""
        self._session_fields = shell_fields(self.environment, self._session_boot, self.shell_program, folder)
        self._process_fields = shell_fields(self.environment, self._process_boot, self.shell_program, folder)

    def add_environment(self, env: Mapping[str, str]) -> None:
        """Variables that every lease of this instance has."""
        self._base_environment.update(env)
        self.set_environment({})

    def set_environment(self, env: Mapping[str, str]) -> None:
        """Variables of one lease, on top of those. A shell that waits with others is given up."""
        environment = {**self._base_environment, **env}
        if environment != self.environment:
            self.environment = environment
            self._set_fields()
            self.cool_down()

    async def log_in(self, env: Mapping[str, str]) -> bytes:
        """Source the profiles as a login shell does; the state after it, in which `env` holds whatever they say."""
        request = {"max_chars": LOGIN_CHARS, "timeout_ms": LOGIN_MS}
        job, log = self.start(request, shell.login_script(env).encode(), b"")
        reply, output = self.finish(request, job, log, await job.outcome())
        if reply["code"]:
            why = "took too long" if reply["timed_out"] else f"ended with exit code {reply['code']}"
            text = output.decode("utf-8", "replace").strip()
            raise BuildError(f"login: the profile {why}{': ' if text else ''}{text[-200:]}")
        return await self.saved_state()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    async def saved_state(self) -> bytes:
        """What the session would start from again, as bash wrote it. Only bash reads it."""
        self.check_alive()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._states.append(future)
        self.control.send("send_state", [("id", self.state)])
        message = await future
        if not message.number("whole"):
            raise SlotError("refused", "the variables and functions of this shell are too many to be kept")
        return message.raw

    def restore(self, state: bytes, cwd: str) -> None:
        """Go on from a state that was saved in another slot; empty: in a shell as the first one was."""
        self.cool_down()
        number = 0
        if state:
            number = next_number()
            self.control.send("store_state", [("id", number)], state)
        self._use_state(number)
        self.cwd = cwd

    def _use_state(self, number: int) -> None:
        before, self.state = self.state, number
        if before and before != number and not any(job.id == before for job in self.jobs):
            self.control.send("forget_state", [("id", before)])

    def job_ended(self, job: Job) -> None:
        """Its keeper lets go of it; what it saved is kept as long as it is the slot's state."""
        if job not in self.jobs:
            return
        self.jobs.discard(job)
        if self._shell is job:
            self._shell = None
        if self._lent is job:
            self._line_over()
        if self._resting is job:
            self._resting = None
            self._recalled()
        if not job.background and job.id != self.state and not self.lost:
            self.control.send("forget_state", [("id", job.id)])

    def forget_state(self) -> None:
        """The next command starts in a shell as the first one did; what runs goes on."""
        self.restore(b"", self.workdir)

    def check_alive(self) -> None:
        """Refuse work for a slot whose init died."""
        if self.lost:
            raise SlotError("lost", self.lost)

    async def check_still_alive(self) -> None:
        """The same for a moment at which its end may not have been heard of yet, only that of a process in it."""
        await asyncio.wait([self.ended], timeout=END_HEARD_S)
        self.check_alive()

    @property
    def has_shell(self) -> bool:
        """Whether one waits for the next command."""
        return self._shell is not None

    def warm_up(self) -> None:
        """Have a shell waiting, so that the next command need not wait for one."""
        if self._shell is None and self._lent is None and not self.lost:
            self._shell = Job(self, self._session_fields, state=self.state)

    def cool_down(self) -> None:
        """Let go of the shell that waits; the next one starts from the same state."""
        if self._shell is not None:
            self._shell.discard()
            self._shell = None

    def spawn(self, terminal: tuple[int, int] | None) -> Job:
        """A shell for a background process, in the state of the session."""
        self.check_alive()
        return Job(self, self._process_fields, state=self.state, background=True, terminal=terminal)

    def log_path(self) -> str:
        """Where the next command's log would go, inside the slot."""
        return f"{self.log_dir}/{next(self._names)}.log"

    def start(self, request: Mapping[str, Any], command: bytes, stdin: bytes) -> tuple[Job, str]:
        """Begin a command; its outcome arrives at the job's `exit`. Beside one that runs it gets a shell of its own."""
        self.check_alive()
        log = self.log_path()
        fields, raw = run_message(command, run_fields(request, log), stdin if request.get("stdin") else None)
        job, self._shell = self._shell, None
        if job is None:
            job = Job(self, self._session_fields, state=self.state)
        job.run(fields, raw)
        return job, log

    def not_begun(self, job: Job, message: Message, attempt: int) -> bool:
        """Whether the shell ended before it took the command. A state that no shell survives is given up."""
        if begun(message):
            return False
        job.discard()
        if attempt > 0:
            self.forget_state()
        return True

    def finish(self, request: Mapping[str, Any], job: Job, log: str, message: Message) -> tuple[dict[str, Any], bytes]:
        """Response to an exec, and the slot's session after it: that of the command that ended last."""
        outcome = ExecOutcome(message, request, log, cwd=self.cwd, workdir=self.workdir)
        self.cwd = outcome.cwd
        self._superseded = self._lent is not None and bool(message.number("shell"))
        self._settle(job, message)
        return outcome.reply, outcome.body

    def _settle(self, job: Job, message: Message) -> None:
        """The session goes on in this shell, or in a new one from the state it left."""
        if message.number("saved"):
            self._use_state(job.id)
        if message.number("shell"):
            before, self._shell = self._shell, job
            if before is not None:
                before.discard()
        else:
            job.discard()
            self.warm_up()

    def lend(self, ended: Callable[[], None]) -> tuple[socket.socket, dict[str, Any]] | None:
        """A line to the session for a client on this machine, and what it must know; None while a command runs.

        `ended` is called when the line is over."""
        if self._shell is None or self._lent is not None:
            return None
        self._lent, self._shell = self._shell, None
        self._line_ended = ended
        ours, theirs = message_pair()
        self._lent.channel.send("lend", fds=[theirs.fileno()])
        theirs.close()
        self.line_used_s = time.monotonic()
        logs = f"{self.log_dir}/{next(self._names)}-"
        return ours, {"cwd": path_for_wire(self.cwd), "workdir": self.workdir, "logs": logs}

    def line_told(self, job: Job, message: Message) -> None:
        """What the keeper says of its line: that it was used, that it is over, that a command still runs on it."""
        if self._lent is not job:
            return
        self.line_running = bool(message.number("running"))
        self.line_used_s = time.monotonic()
        if self.line_running:
            self._superseded = False
        if self._superseded and not message.number("lent"):
            self._line_over()
            job.discard()
            return
        if message.raw and not self._superseded:
            self.cwd = path_text(message.raw, self.workdir)
        if message.number("lent"):
            if message.number("saved") and not self._superseded:
                self._use_state(job.id)
            if message.number("recalled"):
                self._recalled()
            return
        self._line_over()
        self._settle(job, message)

    def _line_over(self) -> None:
        self._lent, self.line_running, self._superseded = None, False, False
        if self._line_ended is not None:
            self._line_ended()
        self._recalled()

    async def rest(self) -> None:
        """End the shell of a session that waits, and start the next one from its state when a command comes. One that
        has processes, or descriptors that a command opened in it, stays."""
        await self.recall()
        job = self._shell
        if job is not None and not self.lost:
            self._resting, self._shell = job, None
            job.channel.send("rest")

    def stays_awake(self, job: Job) -> None:
        """Its shell is needed."""
        if self._resting is job:
            self._resting, self._shell = None, job
            self._recalled()

    def _recalled(self) -> None:
        for future in self._recalls:
            if not future.done():
                future.set_result(None)
        self._recalls.clear()

    async def recall(self) -> None:
        """Have the session back from the client it was lent to, unless a command of the client's still runs in it: then
        it comes back when that ends, and until then other shells start from its last state."""
        if self._lent is None and self._resting is None:
            return
        if self._lent is not None:
            self._lent.channel.send("recall")
        if not await self._heard():
            await self.drop_line()

    async def _heard(self) -> bool:
        """Whether the keeper of the session answers in time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._recalls.append(future)
        await asyncio.wait([future], timeout=KEEPER_GRACE_S)
        return future.done()

    async def drop_line(self) -> None:
        """Kill the session that was lent, with what its command started: its keeper did not do what it was told."""
        job = self._lent or self._resting
        if job is not None:
            job.drop_keeper()
            await self._heard()

    async def cut_outcome(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Of a command on a line that was cut, or did not answer: killed with its keeper, unless the slot is gone."""
        await self.drop_line()
        await self.check_still_alive()
        message = Message("exit", {"status": str(int(signal.SIGKILL)), "us": str(int(request["us"]))}, b"")
        outcome = ExecOutcome(message, request, "", cwd=self.cwd, workdir=self.workdir)
        return outcome.reply, outcome.body

    def any_process_runs(self) -> bool:
        """Whether a background process has not ended."""
        return any(not job.exit.done() for job in self.processes.values())

    async def kill_all(self) -> int:
        """Kill every process of the slot, keep its files."""
        self.check_alive()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._killed.append(future)
        if self._shell is not None:
            self._shell.discard()
        self.control.send("kill_all")
        return await future

    def give_up_jobs(self, reason: str) -> None:
        """Commands under way are lost to their callers, however they end."""
        for job in list(self.jobs):
            job.fail(SlotError("lost", reason))

    def close(self) -> None:
        """Forget the init; the zygote kills it."""
        self.lost = self.lost or "the slot was given back"
        self._end()
        for job in list(self.jobs) + list(self.processes.values()):
            job.fail(SlotError("lost", self.lost))
            job.discard()
        self.processes.clear()
        self.control.close()
