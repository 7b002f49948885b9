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
from .jobs import ALIVE_MS, BASH, Job, exit_code, shell_fields
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
        self.state = shell.state_of(self.environment)
        self.cwd = workdir
        self.previous = workdir
        self.jobs: set[Job] = set()
        self.processes: dict[str, Job] = {}
        self.proxy: Proxy | None = None
        """The way out, for specs with network rules."""
        self.lost: str | None = None
        self._names = itertools.count(1)
        self._warm: Job | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Message] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._killed: list[asyncio.Future[int]] = []
        self.control = Channel(control, self._on_message, self._on_close)

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

    def _on_close(self) -> None:
        self.lost = "the slot's init process is gone"
        self._end()
        if not self._ready.done():
            self._ready.set_exception(BuildError(self.lost))
        for job in list(self.jobs):
            job.fail(SlotError("lost", self.lost))
            job.discard()
        for future in self._killed:
            if not future.done():
                future.set_exception(SlotError("lost", self.lost))

    @property
    def state(self) -> bytes:
        """What the last command's shell saved: exported variables, functions, aliases, as bash writes them."""
        return self._state

    @state.setter
    def state(self, state: bytes) -> None:
        self._state = state
        self.exec_fields = shell_fields(state, shell.EXEC_BOOT, self.shell_program)
        self.spawn_fields = shell_fields(state, shell.SPAWN_BOOT, self.shell_program)

    def set_environment(self, env: Mapping[str, str]) -> None:
        """Variables of the spec, on top of the minimal ones."""
        self.environment.update(env)
        self.state = shell.state_of(self.environment)

    async def log_in(self, env: Mapping[str, str]) -> bytes:
        """Source the profiles as a login shell does; the state after it, in which `env` holds whatever they say."""
        request = {"max_chars": LOGIN_CHARS, "timeout_ms": LOGIN_MS}
        job, log = self.start(request, shell.login_script(env), b"")
        reply, output = self.finish(request, job, log, await job.outcome())
        if reply["code"]:
            why = "took too long" if reply["timed_out"] else f"ended with exit code {reply['code']}"
            text = output.decode("utf-8", "replace").strip()
            raise BuildError(f"login: the profile {why}{': ' if text else ''}{text[-200:]}")
        return self.state

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def restore(self, state: bytes, cwd: str, previous: str) -> None:
        """Go on from another slot's shell state."""
        self.state, self.cwd, self.previous = state, cwd, previous
        self._replace_warm()

    def forget_state(self) -> None:
        """The next command starts in a shell as the first one did; what runs goes on."""
        self.restore(shell.state_of(self.environment), self.workdir, self.workdir)

    def _replace_warm(self) -> None:
        if self._warm is not None and self._warm.state != self.state:
            self._discard_warm()
            self.warm_up()

    def _discard_warm(self) -> None:
        if self._warm is not None:
            self._warm.discard()
            self._warm = None

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
        if self._warm is None and not self.lost:
            self._warm = Job(self)

    def _take_job(self) -> Job:
        job, self._warm = self._warm, None
        if job is not None and (job.channel.closed or job.state != self.state):
            job.discard()
            job = None
        return job or Job(self)

    def log_path(self) -> str:
        """Where the next command's log would go, inside the slot."""
        return f"{self.log_dir}/{next(self._names)}.log"

    def start(self, request: Mapping[str, Any], command: str, stdin: bytes) -> tuple[Job, str]:
        """Begin a command; its outcome arrives at the job's `exit`."""
        self.check_alive()
        env = check_env(request.get("env"))
        script = shell.exec_script(
            command,
            cwd=request.get("cwd"),
            current=self.cwd,
            previous=self.previous,
            workdir=self.workdir,
            env=env,
        )
        log = self.log_path()
        # Only the usual kind of command can use the shell that waits; another one gets a shell made for it.
        if request.get("stdin") or not request.get("merge", True):
            job = Job(self, stdin=stdin if request.get("stdin") else None, separate=not request.get("merge", True))
        else:
            job = self._take_job()
        job.run(
            script,
            timeout_ms=int(request.get("timeout_ms") or 0),
            max_chars=int(request["max_chars"]),
            log_path=log,
            alive_ms=int(request.get("alive_ms") or ALIVE_MS),
        )
        self.warm_up()
        return job, log

    def finish(self, request: Mapping[str, Any], job: Job, log: str, message: Message) -> tuple[dict[str, Any], bytes]:
        """Response to an exec, and the slot's state after it."""
        facts, out, err, saved = _split_exit(message, int(request["max_chars"]), log)
        self._adopt(message, saved, job, request.get("env") or {})
        limit_us = int(request.get("timeout_ms") or 0) * 1000
        timed_out = bool(message.number("timed_out") or (limit_us and message.number("us") >= limit_us))
        code, signal_number = exit_code(message.number("status"), timed_out)
        if message.number("state_dropped"):
            out += f"\n[variables and functions of this shell exceed {shell.STATE_LIMIT} bytes: not kept]\n"
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

    def _adopt(self, message: Message, saved: bytes, job: Job, env: Mapping[str, str]) -> None:
        directories = message.number("directories")
        if "ran" not in message.fields:  # its keeper was killed; whatever did that may have killed the waiting one too
            self._discard_warm()
        if not directories:
            return
        cwd, _, rest = saved[:directories].partition(b"\0")
        self.cwd = cwd.decode("utf-8", "surrogateescape") if len(cwd) <= MAX_PATH else self.workdir
        self.previous = rest.rstrip(b"\0").decode("utf-8", "surrogateescape") or self.cwd
        if message.number("state", -1) >= 0:
            self.state = shell.restore_env(saved[directories:], job.state, env)
            self._replace_warm()

    async def kill_all(self) -> int:
        """Kill every process of the slot, keep its files."""
        self.check_alive()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._killed.append(future)
        self._discard_warm()
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
        self._warm = None
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
    """Truncation facts, stdout, stderr and the saved state out of a keeper's exit message."""
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


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Variables for one command; a name bash cannot hold is the caller's mistake."""
    for name in env or {}:
        if not shell.valid_env_name(name):
            raise SlotError("refused", f"not a name for an environment variable: {name!r}")
    return dict(env or {})
