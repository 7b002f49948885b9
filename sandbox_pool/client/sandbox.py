"""A leased slot: commands, files, background processes, snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import struct
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sandbox_pool.client.connection import TaskSet
from sandbox_pool.client.process import Process
from sandbox_pool.client.trees import TreeLimits, is_tree, pack_local, unpack_local
from sandbox_pool.errors import SandboxFileError
from sandbox_pool.results import ExecResult, FileStat, HostAsked, Truncation

if TYPE_CHECKING:
    from sandbox_pool.client.connection import Connection, Header
    from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

INLINE_BYTES = 1 << 20
"""Content up to this size travels in the request itself."""
MAX_READ_BYTES = 64 << 20
"""Of a file whose reader gave no length: an agent's file can be longer than this machine's memory, and take no disk."""
ANSWER = struct.Struct("!QQ")
"""Call number and length: an answer may be sent in several pieces."""


class Sandbox:
    """Handle on one lease. Every call carries its epoch: once the slot is taken back, all of them raise StaleLease."""

    def __init__(
        self,
        connection: Connection,
        slot: int,
        epoch: int,
        *,
        task_id: str,
        spec: SandboxSpec,
        isolation: str,
        workdir: str,
    ) -> None:
        self._connection = connection
        self.slot = slot
        self.epoch = epoch
        self.task_id = task_id
        self.spec = spec
        self.isolation = isolation
        self.workdir = workdir
        """Where commands start, as they see it; differs from `spec.workdir` where slots have no root of their own."""

    def _header(self, op: str, **values: Any) -> Header:
        return {"op": op, "slot": self.slot, "epoch": self.epoch, **values}

    async def _ask(self, op: str, **values: Any) -> Header:
        header, _ = await self._connection.call(self._header(op, **values))
        return header

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        merge_stderr: bool = True,
        max_output_chars: int = 50_000,
        on_activity: Callable[[float], None] | None = None,
        on_stopped: Callable[[ExecResult], None] | None = None,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run a command in bash, in the state the last one left.

        Cancelling this kills the command with everything it started; `on_stopped` then gets what it had printed. `env`
        holds for this command only. The same `request_id` again returns the recorded outcome and runs nothing.
        `on_activity` gets the elapsed seconds about every 10 s while the command is alive.
        """
        text = command.encode("utf-8", "surrogateescape")
        data = b"" if stdin is None else stdin.encode() if isinstance(stdin, str) else stdin
        header = self._header(
            "exec",
            command=len(text),
            max_chars=max_output_chars,
            merge=merge_stderr,
        )
        if request_id is not None:
            header["rid"] = request_id
        if timeout_s is not None:
            header["timeout_ms"] = max(1, round(timeout_s * 1000))
        if cwd is not None:
            header["cwd"] = cwd
        if env:
            header["env"] = dict(env)
        if stdin is not None:
            header["stdin"] = True
        if on_stopped is not None:
            header["tell_stopped"] = True
        on_event = _events(on_activity, on_stopped) if on_activity or on_stopped else None
        reply, body = await self._connection.call(header, text + data, on_event=on_event)
        return _exec_result(reply, body)

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Content of a regular file, or a part of it. Without `length` more than 64 MiB is refused (EFBIG)."""
        limit = MAX_READ_BYTES + 1 if length is None else length
        header = self._header("read", path=path, offset=offset, length=limit)
        data = b"".join([chunk async for chunk in self._connection.stream(header)])
        if length is None and len(data) == limit:
            message = f"more than {MAX_READ_BYTES} bytes: give a length, or download it"
            raise SandboxFileError(errno.EFBIG, message, path)
        return data

    async def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """Replace a file atomically, making its parents. An existing file keeps its mode unless one is given."""
        content = data.encode() if isinstance(data, str) else data
        header = self._header("write", rid=uuid.uuid4().hex, path=path, size=len(content), mode=mode)
        if len(content) <= INLINE_BYTES:
            await self._connection.call(header, content)
            return
        header["stream"] = True
        await self._connection.call(header, chunks=_pieces(content))

    async def stat(self, path: str) -> FileStat | None:
        """What is at `path`, links not followed; None when nothing is."""
        try:
            header = await self._ask("stat", path=path)
        except SandboxFileError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise
        return _file_stat(header)

    async def list_dir(self, path: str) -> list[tuple[str, FileStat]]:
        """Entries of a directory by name."""
        header = await self._ask("list", path=path)
        return [(entry["name"], _file_stat(entry)) for entry in header["entries"]]

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` a whole tree. Links are removed, not followed."""
        await self._ask("remove", rid=uuid.uuid4().hex, path=path, recursive=recursive)

    async def upload(self, local: Path | str, remote: str) -> None:
        """Copy a local file or tree into the slot. To a path ending in `/`, or to a directory, it goes inside it."""
        source = Path(local)
        into, name = remote, ""
        if not is_tree(source):
            parent, _, name = (await self._inside(remote, source.name)).rpartition("/")
            into = parent or ("/" if remote.startswith("/") else ".")
        chunks = pack_local(source, name)
        await self._connection.call(self._header("unpack", rid=uuid.uuid4().hex, path=into), chunks=chunks)

    async def _inside(self, remote: str, name: str) -> str:
        if not remote.endswith("/"):
            found = await self.stat(remote)
            if found is None or found.kind != "dir":
                return remote
        return f"{remote.rstrip('/')}/{name}"

    async def download(
        self,
        remote: str,
        local: Path | str,
        limits: TreeLimits | None = None,
        *,
        kind: Literal["", "f", "d"] = "",
        links: bool = True,
    ) -> None:
        """Copy a file or tree out of the slot. A file downloaded to an existing directory goes inside it.

        Give `kind` to refuse anything but a file or a tree. Without `links` a link that may lead out of the tree is
        left out: an agent decides where links lead.
        """
        stream = self._connection.stream(self._header("pack", path=remote))
        await unpack_local(stream, Path(local), remote, limits, kind=kind, links=links)

    async def spawn(
        self, command: str, *, pty: bool = False, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a background process, on a terminal of its own when `pty` is set."""
        header = self._header("spawn", rid=uuid.uuid4().hex, pty=pty, cwd=cwd, env=dict(env or {}))
        reply, _ = await self._connection.call(header, command.encode("utf-8", "surrogateescape"))
        return Process(self._connection, self._header, reply["process"], reply["pid"])

    async def processes(self) -> list[Process]:
        """Background processes of this lease, ended ones too."""
        header = await self._ask("processes")
        return [Process(self._connection, self._header, item["process"], item["pid"]) for item in header["processes"]]

    async def forget_state(self) -> None:
        """Commands from now on start in a shell as new as that of the first one. Processes go on, files stay."""
        await self._ask("forget_state")

    async def stop_processes(self) -> int:
        """Kill everything that runs in the slot and keep its files; returns how many processes there were."""
        return int((await self._ask("stop_processes"))["count"])

    async def snapshot(self, *, workspace: bool = False, keep_state: bool = False, stop: bool = False) -> str:
        """Keep the files as they are now, for other leases to start from; returns its id on this host.

        With `workspace` only the working directory is kept: forks have a clean system otherwise. A lease that starts
        from a snapshot has a shell of its own, in the working directory. `keep_state` hands on the folder, variables,
        functions and aliases of this one: whoever ran commands here then decides what later ones mean. `stop` kills
        every process first, as `stop_processes` does.
        """
        kept = {"workspace": workspace, "keep_state": keep_state, "stop": stop}
        header = await self._ask("snapshot", rid=uuid.uuid4().hex, **kept)
        return str(header["snapshot"])

    async def network_log(self) -> list[HostAsked]:
        """Every host that programs of this lease asked the slot's proxy for; empty without network rules."""
        return [HostAsked(**entry) for entry in (await self._ask("network"))["hosts"]]

    async def allow_hosts(self, entries: Sequence[str]) -> None:
        """Replace the list of hosts this lease may reach; its spec must have network rules. Open connections stay."""
        await self._ask("network", allow=list(entries))

    @contextlib.asynccontextmanager
    async def serve(self, path: str, handler: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[None]:
        """Listen on a unix socket in the slot; each line a program sends there is answered by `handler`.

        When the handler raises, the answer is `{"error": ...}` with the kind of the exception; the log has the rest.
        """
        bridge = _Bridge(self._connection, self._header("serve", path=path), handler)
        await bridge.open()
        try:
            yield
        finally:
            await bridge.close()


class _Bridge:
    """One `serve` request for as long as it is open. Lines from programs in the slot are answered concurrently."""

    def __init__(self, connection: Connection, header: Header, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._connection = connection
        self._header = header
        self._handler = handler
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._calls = TaskSet()
        self._task: asyncio.Task[object] | None = None
        self._listening: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Return when the socket in the slot is listening."""
        loop = asyncio.get_running_loop()
        self._listening = loop.create_future()
        self._task = loop.create_task(
            self._connection.call(self._header, on_event=self._on_event, chunks=self._stream())
        )
        racing: list[asyncio.Future[Any]] = [self._listening, self._task]
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.done():
            await self._task

    def _on_event(self, header: Header, body: bytes) -> None:
        if header["ev"] == "listening":
            if self._listening is not None and not self._listening.done():
                self._listening.set_result(None)
        elif header["ev"] == "call":
            self._calls.start(self._answer(header["call"], body))

    async def _answer(self, number: int, line: bytes) -> None:
        """Always answers: the program in the slot waits for it."""
        reply = _failed("the call was cancelled")
        try:
            reply = await self._handler(line.rstrip(b"\n"))
        except Exception as error:  # the details go to the log; the slot learns only the type
            log.exception("the handler of a bridge failed")
            reply = _failed(f"the call failed outside the sandbox: {type(error).__name__}")
        finally:
            self._answers.put_nowait(ANSWER.pack(number, len(reply)) + reply)

    async def _stream(self) -> AsyncIterator[bytes]:
        while (answer := await self._answers.get()) is not None:
            yield answer

    async def close(self) -> None:
        """End the stream; the server closes and removes the socket."""
        self._calls.cancel()
        self._answers.put_nowait(None)
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


def _failed(reason: str) -> bytes:
    return json.dumps({"error": reason}).encode()


def _events(
    on_activity: Callable[[float], None] | None, on_stopped: Callable[[ExecResult], None] | None
) -> Callable[[Header, bytes], None]:
    def on_event(header: Header, body: bytes) -> None:
        if header["ev"] == "alive" and on_activity is not None:
            on_activity(float(header["s"]))
        elif header["ev"] == "stopped" and on_stopped is not None:
            on_stopped(_exec_result(header, body))

    return on_event


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), INLINE_BYTES):
        yield data[start : start + INLINE_BYTES]


def _file_stat(header: Mapping[str, Any]) -> FileStat:
    return FileStat(header["kind"], header["size"], header["mode"], header["mtime_ns"])


def _exec_result(reply: Header, body: bytes) -> ExecResult:
    cut = reply["cut"].get("out") or reply["cut"].get("err")
    return ExecResult(
        exit_code=reply["code"],
        output=body[: reply["out"]].decode(),
        stderr=body[reply["out"] :].decode(),
        timed_out=reply["timed_out"],
        signal=reply["signal"],
        cwd=reply["cwd"],
        duration_s=reply["us"] / 1e6,
        truncation=Truncation(cut["total"], cut["omitted"], cut["log"]) if cut else None,
    )
