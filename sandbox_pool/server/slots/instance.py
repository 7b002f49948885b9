"""A built slot: one init process, its shell state, its commands. It is thrown away at reset, never cleaned."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..faults import SlotError
from . import shell
from .channel import Channel, Message
from .jobs import ALIVE_MS, BASH, Job, exit_code, next_number, shell_fields
from .zygote import BuildError, failure_text

if TYPE_CHECKING:
    from .proxy import Proxy

READY_TIMEOUT_S = 20.0
LOGIN_MS, LOGIN_CHARS = 30_000, 2_000
END_HEARD_S = 0.5
MAX_PATH = 4096
"""No `cd` can go to a longer one."""
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
        self.environment: dict[str, str] = {**BASE_ENVIRONMENT, "HOME": home, "USER": "root", "LOGNAME": "root", **env}
        self._session_boot, self._process_boot = shell.session_boot(workdir), shell.process_boot(workdir)
        self.cwd = workdir
        """Of the session, as its last command left it."""
        self.state = 0
        """The job whose state the next shell starts from; 0 is the environment alone."""
        self._shell: Job | None = None
        """The session: the shell that ran the last command that ended, and waits."""
        self.jobs: set[Job] = set()
        self.processes: dict[str, Job] = {}
        self.proxy: Proxy | None = None
        """The way out, for specs with network rules."""
        self.lost: str | None = None
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
        self._session_fields = shell_fields(self.environment, self._session_boot, self.shell_program)
        self._process_fields = shell_fields(self.environment, self._process_boot, self.shell_program)

    def set_environment(self, env: Mapping[str, str]) -> None:
        """Variables of the spec, on top of the minimal ones."""
        self.environment.update(env)
        self._set_fields()

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
        if self._shell is not None:
            self._shell.discard()
            self._shell = None
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

    def warm_up(self) -> None:
        """Have a shell waiting, so that the next command need not wait for one."""
        if self._shell is None and not self.lost:
            self._shell = Job(self, self._session_fields, state=self.state)

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
        fields: list[tuple[str, Any]] = [
            ("timeout_ms", int(request.get("timeout_ms") or 0)),
            ("max_chars", int(request["max_chars"])),
            ("log", log),
            ("alive_ms", int(request.get("alive_ms") or ALIVE_MS)),
        ]
        if not request.get("merge", True):
            fields.append(("separate", 1))
        fields += surroundings(request)
        job, self._shell = self._shell, None
        if job is None:
            job = Job(self, self._session_fields, state=self.state)
        job.run(command, fields, stdin if request.get("stdin") else None)
        return job, log

    def not_begun(self, job: Job, message: Message, attempt: int) -> bool:
        """Whether the shell ended before it took the command. A state that no shell survives is given up."""
        if message.number("begun", 1) or message.number("timed_out") or message.number("killed"):
            return False
        job.discard()
        if attempt > 0:
            self.forget_state()
        return True

    def finish(self, request: Mapping[str, Any], job: Job, log: str, message: Message) -> tuple[dict[str, Any], bytes]:
        """Response to an exec, and the slot's session after it: that of the command that ended last."""
        facts, out, err, directory = _split_exit(message, int(request["max_chars"]), log)
        if directory:
            self.cwd = directory.decode("utf-8", "surrogateescape") if len(directory) <= MAX_PATH else self.workdir
        if message.number("saved"):
            self._use_state(job.id)
        if message.number("shell"):
            before, self._shell = self._shell, job
            if before is not None:
                before.discard()
        else:
            job.discard()
            self.warm_up()
        limit_us = int(request.get("timeout_ms") or 0) * 1000
        timed_out = bool(message.number("timed_out") or (limit_us and message.number("us") >= limit_us))
        code, signal_number = exit_code(message.number("status"), timed_out)
        encoded = out.encode("utf-8", "replace")
        reply = {
            "code": code,
            "signal": signal_number,
            "timed_out": timed_out,
            "cwd": self.cwd.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
            "us": message.number("us"),
            "out": len(encoded),
            "cut": facts,
        }
        return reply, encoded + err.encode("utf-8", "replace")

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


def shown(head: bytes, tail: bytes, truncated: bool, chars: int, max_chars: int, log: str) -> tuple[str, int]:
    """The text to show (40 % head, 60 % tail) and how many characters it leaves out."""
    text = head.decode("utf-8", "replace")
    if not truncated:
        return text, 0
    head_chars = max_chars * 2 // 5
    tail_chars = max_chars - head_chars
    omitted = chars - max_chars
    ending = tail.decode("utf-8", "replace")
    note = f"\n... [{omitted} of {chars} characters omitted; all of it is in {log}] ...\n"
    return text[:head_chars] + note + (ending[-tail_chars:] if tail_chars else ""), omitted


def _split_exit(message: Message, max_chars: int, log: str) -> tuple[dict[str, Any], str, str, bytes]:
    """Truncation facts, stdout, stderr and the directory out of a keeper's exit message."""
    position = 0
    texts = []
    facts: dict[str, Any] = {}
    for name, path in (("out", log), ("err", f"{log}.stderr")):
        head_size, tail_size = message.number(f"{name}_head"), message.number(f"{name}_tail", -1)
        chars = message.number(f"{name}_chars")
        head = message.raw[position : position + head_size]
        position += head_size
        tail = message.raw[position : position + max(tail_size, 0)]
        position += max(tail_size, 0)
        text, omitted = shown(head, tail, tail_size >= 0, chars, max_chars, path)
        texts.append(text)
        if tail_size >= 0:
            facts[name] = {"total": chars, "omitted": omitted, "log": path}
    return facts, texts[0], texts[1], message.raw[position:]


def surroundings(request: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The directory and the variables of one command alone."""
    env = check_env(request.get("env"))
    fields: list[tuple[str, Any]] = [("set", f"{name}={value}") for name, value in env.items()]
    if request.get("cwd") is not None:
        fields.append(("cwd", request["cwd"]))
    return fields


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Variables for one command; a name bash cannot hold is the caller's mistake."""
    for name in env or {}:
        if not shell.valid_env_name(name):
            raise SlotError("refused", f"not a name for an environment variable: {name!r}")
    return dict(env or {})
