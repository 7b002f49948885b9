"""One sandbox: its life from create to end, its commands, its tunnels and its readiness probe."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass

from grpclib import Status
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2

from .activity import Activity
from .backends import SYSTEM_PATH, Namespaces
from .faults import error
from .process import Process, readable
from .tunnels import Tunnel, connect
from .worker import Worker, first_of

DEFAULT_TIMEOUT_S = 300
DEFAULT_COMMAND = ("sleep", "infinity")
BASE_ENV = {"PATH": SYSTEM_PATH, "HOME": "/root", "TERM": "xterm", "LANG": "C.UTF-8"}
Result = api_pb2.GenericResult


@dataclass(frozen=True)
class Identity:
    """What a sandbox is called."""

    sandbox_id: str
    task_id: str
    app_id: str


class Sandbox:
    """Registered, then running, then ended; `result` says how."""

    def __init__(self, identity: Identity, definition: api_pb2.Sandbox, backend: Namespaces, env: Mapping[str, str],
                 workdir: str, tags: Mapping[str, str]) -> None:  # fmt: skip
        self.id, self.task_id, self.app_id = identity.sandbox_id, identity.task_id, identity.app_id
        self.definition = definition
        self.name = definition.name
        self.backend = backend
        self.env = {**BASE_ENV, **env, "MODAL_SANDBOX_ID": self.id, "MODAL_TASK_ID": self.task_id}
        self.workdir = definition.workdir or workdir
        self.tags = dict(tags)
        self.created_at = time.time()
        self.result: Result | None = None
        self.started, self.ending, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.entry = Process()
        self.execs: dict[str, Process] = {}
        self.tunnels: list[api_pb2.TunnelData] = []
        self.activity = Activity()
        self.worker = Worker()
        self.ready = asyncio.Event()
        self.ready_at = 0.0
        self._open_tunnels: list[Tunnel] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Registered and not ended."""
        return self.result is None

    async def start(self, context: ssl.SSLContext, delay_s: float) -> None:
        """Answers when its command runs, or when it was ended before that."""
        try:
            await first_of(self.ending, timeout_s=delay_s)
            if self.running:
                await self._launch()
                await self._open_ports(context)
                self._spawn(self._watch())
                if self.definition.HasField("readiness_probe"):
                    self._spawn(self._probe())
        finally:
            self.started.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _launch(self) -> None:
        argv = list(self.definition.entrypoint_args) or DEFAULT_COMMAND
        outside = {"PATH": f"{os.environ['PATH']}:{SYSTEM_PATH}", "MODAL_SANDBOX_ID": self.id}
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as ready:
            with os.fdopen(writing, "wb"):
                command = self.backend.launch(argv, self.env, self.workdir, writing)
                self.entry.start(command, outside, pass_fds=(writing,))
            await readable(reading)
            up = ready.read(1)
        if not up:
            said = b"".join([chunk async for chunk in self.entry.err.chunks(0)]).decode(errors="replace")
            raise error(Status.INTERNAL, f"sandbox did not start: {said[-800:]}")
        self.backend.launched(self.entry.pid)

    async def _open_ports(self, context: ssl.SSLContext) -> None:
        for port in self.definition.open_ports.ports:
            tunnel = Tunnel(self, port.port)
            self._open_tunnels.append(tunnel)
            self.tunnels.append(await tunnel.open(None if port.unencrypted else context))

    async def _watch(self) -> None:
        """Ends the sandbox with its command, at its timeout or at its idle timeout."""
        ends_at = time.monotonic() + (self.definition.timeout_secs or DEFAULT_TIMEOUT_S)
        idle_timeout_s = self.definition.idle_timeout_secs or float("inf")
        while not self.entry.done.is_set():
            left_s = ends_at - time.monotonic()
            idle_left_s = idle_timeout_s - self.activity.idle_s()
            if left_s <= 0:
                await self.finish(Result.GENERIC_STATUS_TIMEOUT)
                return
            if idle_left_s <= 0:
                await self.finish(Result.GENERIC_STATUS_IDLE_TIMEOUT)
                return
            self.activity.changed.clear()
            await first_of(self.entry.done, self.activity.changed, timeout_s=min(left_s, idle_left_s))
        code = self.entry.code or 0
        status = Result.GENERIC_STATUS_SUCCESS if code == 0 else Result.GENERIC_STATUS_FAILURE
        await self.finish(status, code if code >= 0 else 128 - code)

    async def finish(self, status: int, exitcode: int = 0, exception: str = "") -> None:
        """End it, with every process it has. Of several ends the first is the one that is told."""
        if self._ending is None:
            self.result = Result(status=status, exitcode=exitcode, exception=exception)
            self.ending.set()
            self._ending = asyncio.create_task(self._end())
        # To its end, even when the call that asked for it is cancelled.
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        await self.started.wait()
        for process in self.execs.values():
            process.lost = not process.done.is_set()
            process.kill()
        for tunnel in self._open_tunnels:
            tunnel.close()
        if self.backend.pid1 is not None:
            self.backend.kill()
            await self.entry.done.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.to_thread(shutil.rmtree, self.backend.folder, ignore_errors=True)
        self.ended.set()

    def close(self) -> None:
        """Let go of all output; it has ended."""
        for process in (self.entry, *self.execs.values()):
            process.close()

    def cut_tunnels(self) -> None:
        """Break every open connection."""
        for tunnel in self._open_tunnels:
            tunnel.cut()

    async def exec(self, request: router_pb2.TaskExecStartRequest, env: Mapping[str, str]) -> None:
        """Start a command; a second start of the same one changes nothing."""
        await self.started.wait()
        if self.result is not None:
            raise error(Status.NOT_FOUND, f"Sandbox {self.id} has already finished")
        if request.exec_id in self.execs:
            return
        process = self.execs[request.exec_id] = Process()
        discard = (request.stdout_config == 0, request.stderr_config == 0)
        argv, workdir = list(request.command_args), request.workdir or self.workdir
        self._run(process, request.exec_id, argv, env, workdir, request.HasField("pty_info"), discard)
        if request.timeout_secs:
            self._spawn(self._limit(process, request.exec_id, request.timeout_secs))

    def _run(self, process: Process, exec_id: str, argv: Sequence[str], env: Mapping[str, str], workdir: str,
             terminal: bool = False, discard: tuple[bool, bool] = (False, False)) -> None:  # fmt: skip
        whole = {**self.env, **env}
        command = self.backend.command(exec_id, argv, whole, workdir, terminal)
        process.start(command, whole, terminal=terminal, discard=discard)
        self._spawn(self._be_busy(process))

    async def _be_busy(self, process: Process) -> None:
        with self.activity.busy():
            await process.done.wait()

    async def _limit(self, process: Process, exec_id: str, timeout_s: float) -> None:
        await first_of(process.done, timeout_s=timeout_s)
        if not process.done.is_set():
            await asyncio.to_thread(self.backend.end_command, exec_id)
            process.kill()

    async def _probe(self) -> None:
        """Sets `ready` when the readiness probe first succeeds."""
        probe = self.definition.readiness_probe
        number = 0
        while not await self._probe_once(f"probe-{number}"):
            number += 1
            await asyncio.sleep((probe.interval_ms or 100) / 1000)
        self.ready_at = time.time()
        self.ready.set()

    async def _probe_once(self, exec_id: str) -> bool:
        probe = self.definition.readiness_probe
        if probe.HasField("exec_command"):
            process = Process()
            self._run(process, exec_id, list(probe.exec_command.argv), {}, self.workdir)
            await process.done.wait()
            return process.code == 0
        try:
            _, writer = await connect(self, probe.tcp_port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True
