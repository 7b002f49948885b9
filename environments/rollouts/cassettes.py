"""Cassettes: a rollout with everything that its model and its slots answered, in one file that can be replayed whole.

    cassettes/ROLLOUT.jsonl.gz
      {"cassette": 1, "rollout_id": ..., "environment": ..., "env": {...}, "item": ...}      what it was told
      {"sent": 0, ...} {"came": 0, ...} {"drawn": ...}                                       see agent_loop.records.tape
      {"record": {...}}                                                                      how it ended

The file is complete in itself: a replay needs the environment's code and the model's tokenizer, and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import inspect
import logging
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import quote

import orjson

import sandbox_pool.errors
from agent_loop.records.record import RolloutRecord
from agent_loop.records.tape import Entry, Replay, Tape, as_bytes, playing
from environments.atropos.packing import ScoredRollout
from environments.config.loader import masked
from environments.errors import UsageError
from environments.runs.store import write_whole
from environments.sandboxes import Pool, Sandbox
from sandbox_pool.client.trees import TreeLimits, pack_local, unpack_local
from sandbox_pool.errors import SandboxError, SandboxFileError
from sandbox_pool.results import ExecResult
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv
    from environments.rollouts.planning import RolloutJob
    from sandbox_pool.client.connection import Connection, Header, OnEvent

log = logging.getLogger(__name__)

VERSION = 1
FOLDER = "cassettes"
OF_ONE_TRY = frozenset({"i", "rid", "slot", "epoch"})
"""Parts of a request to a slot that say which slot, lease and try it was, not what was asked."""
LONGEST_KEPT = 1 << 16
"""Bytes of what was sent into a slot that are kept; of more, a hash is enough to compare."""


@dataclass(frozen=True)
class Cassette:
    """A recorded rollout."""

    about: Mapping[str, Any]
    entries: list[Entry]
    record: RolloutRecord

    @classmethod
    def read(cls, path: Path) -> Cassette:
        """UsageError when it cannot be read, or is not one."""
        try:
            lines = [orjson.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
            about, *entries, last = lines
            if about["cassette"] != VERSION:
                raise UsageError(f"{path} is a cassette of version {about['cassette']}, not {VERSION}")
            return cls(about, entries, RolloutRecord.from_json(orjson.dumps(last["record"])))
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
            raise UsageError(f"{path} is not a cassette: {error}") from error

    def data(self) -> bytes:
        """The file's content."""
        lines = [{"cassette": VERSION, **self.about}, *self.entries, {"record": self.record}]
        return gzip.compress(b"\n".join(orjson.dumps(line) for line in lines), 6, mtime=0)


class Cassettes:
    """The `cassettes` folder of a run that records."""

    def __init__(self, run: Path, env: HermesAgentBaseEnv) -> None:
        self._run = run
        self._env = env

    @staticmethod
    def file(run: Path, rollout_id: str) -> Path:
        """Where the cassette of a rollout is, if it has one."""
        return run / FOLDER / f"{quote(rollout_id, safe='')}.jsonl.gz"

    def taped(self, pool: Pool) -> TapedPool:
        """The pool, with leases that rollouts record."""
        return TapedPool(pool)

    async def recorded(self, job: RolloutJob, run: Callable[[RolloutJob], Awaitable[ScoredRollout]]) -> ScoredRollout:
        """Run a rollout and keep its cassette. A full disk costs the cassette, never the rollout."""
        tape = Tape()
        token = playing.set(tape)
        try:
            rollout = await run(job)
        finally:
            playing.reset(token)
        about = about_rollout(self._env, job)

        def write() -> None:
            path = self.file(self._run, job.rollout_id)
            write_whole(path, Cassette(about, tape.entries, rollout.record).data())

        try:
            await asyncio.to_thread(write)
        except (OSError, UsageError) as error:
            log.warning("the cassette of %s is not kept: %s", job.rollout_id, error)
        return rollout


def about_rollout(env: HermesAgentBaseEnv, job: RolloutJob) -> dict[str, Any]:
    """What a replay has to know to tell the rollout the same."""
    servers: Sequence[Any] = env.server_configs
    about = {
        "rollout_id": job.rollout_id,
        "group_id": job.group_id,
        "item_id": job.item_id,
        "item": _stored_item(env, job.item),
        "seed": job.sampling.seed,
        "temperature": job.sampling.temperature,
        "prepared": job.snapshot is not None,
        "prepared_network": list(job.prepared_network),
        "mode": env.rollouts.mode,
        "model_context": env.model_context,
        "made_with": version("hermes-rl"),
        **_class_and_folder(type(env)),
        "env": masked(env.config),
        "openai": [masked(server) for server in servers],
    }
    plain: dict[str, Any] = orjson.loads(orjson.dumps(about, default=str))
    return plain


def _class_and_folder(kind: type) -> dict[str, str]:
    """Where the environment's class is. One that was run as a program is found again as a module of its folder."""
    file = Path(inspect.getfile(kind)).resolve()
    module = file.stem if kind.__module__ == "__main__" else kind.__module__
    return {"class": f"{module}:{kind.__qualname__}", "folder": str(file.parents[module.count(".")])}


def _stored_item(env: HermesAgentBaseEnv, item: Any) -> Any:
    """The item as plain JSON, or None when it has no such form: a replay then asks the environment for it."""
    try:
        return orjson.loads(orjson.dumps(env.item_to_json(item)))
    except (UsageError, TypeError):
        return None


class TapedPool:
    """A pool whose leases are on the tape of the rollout that takes them. In a replay there is no pool behind it."""

    def __init__(self, pool: Pool | None, exec_timeout_s: float | None = None) -> None:
        """`exec_timeout_s` is what the pool gives commands that name no timeout, for a replay."""
        self._pool = pool
        self._exec_timeout_s = exec_timeout_s

    def lease(
        self,
        task_id: str,
        spec: SandboxSpec | None = None,
        timeout_s: float | None = None,
        *,
        ttl_s: float | None = None,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """As `Pool.lease`."""
        asked = {"task_id": task_id, "spec": None if spec is None else _spec(spec)}
        return self._lease(asked, lambda pool: pool.lease(task_id, spec, timeout_s, ttl_s=ttl_s))

    def lease_from(
        self, snapshot: str, task_id: str, timeout_s: float | None = None, *, ttl_s: float | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """As `Pool.lease_from`."""
        asked = {"task_id": task_id, "from": "a snapshot"}
        return self._lease(asked, lambda pool: pool.lease_from(snapshot, task_id, timeout_s, ttl_s=ttl_s))

    @asynccontextmanager
    async def _lease(
        self, asked: Mapping[str, Any], take: Callable[[Pool], AbstractAsyncContextManager[Sandbox]]
    ) -> AsyncIterator[Sandbox]:
        tape = playing.get()
        if isinstance(tape, Replay):
            yield await self._replayed(tape, asked)
            return
        if tape is None:
            async with take(self._real()) as sandbox:
                yield sandbox
            return
        number = tape.sent("lease", asked)
        request = take(self._real())
        with _errors_on(tape, number):
            sandbox = await request.__aenter__()
        try:
            facts = {"isolation": sandbox.isolation, "workdir": sandbox.workdir, "spec": _spec(sandbox.spec)}
            tape.came(number, "reply", value=facts)
            sandbox._connection = cast("Connection", _RecordedConnection(tape, sandbox._connection, number))
            yield sandbox
        finally:
            await request.__aexit__(None, None, None)

    async def _replayed(self, tape: Replay, asked: Mapping[str, Any]) -> Sandbox:
        number = tape.sent("lease", asked)
        entry = await tape.arrived(number)
        if entry["what"] == "error":
            raise _error(entry["error"])
        facts = entry["value"]
        return _ReplayedSandbox(
            cast("Connection", _ReplayedConnection(tape, number)),
            0,
            number,
            task_id=str(asked["task_id"]),
            spec=SandboxSpec.model_validate(facts["spec"]),
            isolation=facts["isolation"],
            workdir=facts["workdir"],
        ).with_timeout(self._exec_timeout_s)

    async def download_snapshot(self, snapshot: str, local: Path, limits: TreeLimits | None = None) -> None:
        """As `Pool.download_snapshot`; the tape has the tree as it was written here."""
        tape = playing.get()
        if tape is None:
            await self._real().download_snapshot(snapshot, local, limits)
            return
        number = tape.sent("download_snapshot", {})
        if isinstance(tape, Replay):
            await unpack_local(_pieces(tape, number), local, "the workspace", limits)
            return
        with _errors_on(tape, number):
            await self._real().download_snapshot(snapshot, local, limits)
        async for chunk in pack_local(local, ""):
            tape.came(number, "data", body=chunk)
        tape.came(number, "reply")

    async def has_snapshot(self, snapshot: str) -> bool:
        """As `Pool.has_snapshot`; asked between rollouts."""
        return await self._real().has_snapshot(snapshot)

    def export_snapshot(self, snapshot: str) -> AsyncIterator[bytes]:
        """As `Pool.export_snapshot`; not on the tape, because no rollout reads it."""
        return self._real().export_snapshot(snapshot)

    def add_snapshot(self, file: BinaryIO, spec: SandboxSpec) -> str:
        """As `Pool.add_snapshot`."""
        return self._real().add_snapshot(file, spec)

    async def import_snapshot(self, chunks: AsyncIterable[bytes], task_id: str, spec: SandboxSpec) -> str:
        """As `Pool.import_snapshot`."""
        return await self._real().import_snapshot(chunks, task_id, spec)

    async def drop_snapshot(self, snapshot: str) -> None:
        """As `Pool.drop_snapshot`; a replay has none to drop."""
        if self._pool is not None:
            await self._pool.drop_snapshot(snapshot)

    def _real(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("a replay has no slots")
        return self._pool


class _ReplayedSandbox(Sandbox):
    """A sandbox whose connection leads to a tape."""

    _exec_timeout_s: float | None = None

    def with_timeout(self, exec_timeout_s: float | None) -> _ReplayedSandbox:
        """For commands that name no timeout."""
        self._exec_timeout_s = exec_timeout_s
        return self

    async def exec(self, command: str, *, timeout_s: float | None = None, **options: Any) -> ExecResult:
        """As a lease does it."""
        return await super().exec(
            command, timeout_s=self._exec_timeout_s if timeout_s is None else timeout_s, **options
        )


class _RecordedConnection:
    """A lease's connection, with what passes put on the tape."""

    def __init__(self, tape: Tape, connection: Connection, lease: int) -> None:
        self._tape = tape
        self._connection = connection
        self._lease = lease

    async def call(
        self,
        header: Header,
        body: bytes = b"",
        *,
        on_event: OnEvent | None = None,
        chunks: AsyncIterable[bytes] | None = None,
    ) -> tuple[Header, bytes]:
        """As `Connection.call`."""
        tape = self._tape
        asked, sent = _asked(self._lease, header, body), _Sent()
        number = tape.sent("slot", asked)

        def event(told: Header, data: bytes) -> None:
            tape.came(number, "event", header=_plain(told), body=data)
            if on_event is not None:
                on_event(told, data)

        async def passed(source: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
            async for chunk in source:
                if header["op"] == "serve":  # answers to a program in the slot: their place on the tape counts
                    tape.sent("answer", {"to": number, "body": chunk})
                else:
                    sent.add(chunk)
                yield chunk

        with _errors_on(tape, number):
            reply, data = await self._connection.call(
                header, body, on_event=event, chunks=None if chunks is None else passed(chunks)
            )
        if sent.size:
            tape.sent("stream", {"to": number, **sent.facts()})
        tape.came(number, "reply", header=_plain(reply), body=data)
        return reply, data

    async def stream(self, header: Header) -> AsyncIterator[bytes]:
        """As `Connection.stream`."""
        tape, number = self._tape, self._tape.sent("slot", _asked(self._lease, header, b""))
        with _errors_on(tape, number):
            async for chunk in self._connection.stream(header):
                tape.came(number, "data", body=chunk)
                yield chunk
        tape.came(number, "reply")


class _ReplayedConnection:
    """What a tape has for one lease."""

    def __init__(self, tape: Replay, lease: int) -> None:
        self._tape = tape
        self._lease = lease

    async def call(
        self,
        header: Header,
        body: bytes = b"",
        *,
        on_event: OnEvent | None = None,
        chunks: AsyncIterable[bytes] | None = None,
    ) -> tuple[Header, bytes]:
        """As `Connection.call`."""
        tape = self._tape
        number = tape.sent("slot", _asked(self._lease, header, body))
        sender = asyncio.ensure_future(self._send(header, number, chunks)) if chunks is not None else None
        try:
            while (entry := await tape.arrived(number))["what"] == "event":
                if on_event is not None:
                    on_event(entry["header"], as_bytes(entry["body"]))
        finally:
            if sender is not None:
                sender.cancel()
                await asyncio.wait([sender])
        if entry["what"] == "error":
            raise _error(entry["error"])
        return entry["header"], as_bytes(entry["body"])

    async def _send(self, header: Header, number: int, chunks: AsyncIterable[bytes]) -> None:
        sent = _Sent()
        async for chunk in chunks:
            if header["op"] == "serve":
                self._tape.sent("answer", {"to": number, "body": chunk})
            else:
                sent.add(chunk)
        if sent.size:
            self._tape.sent("stream", {"to": number, **sent.facts()})

    async def stream(self, header: Header) -> AsyncIterator[bytes]:
        """As `Connection.stream`."""
        number = self._tape.sent("slot", _asked(self._lease, header, b""))
        async for chunk in _pieces(self._tape, number):
            yield chunk


async def _pieces(tape: Replay, number: int) -> AsyncIterator[bytes]:
    while (entry := await tape.arrived(number))["what"] == "data":
        yield as_bytes(entry["body"])
    if entry["what"] == "error":
        raise _error(entry["error"])


@dataclass
class _Sent:
    """A stream into a slot: what it was is compared by its hash."""

    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self.digest.update(chunk)

    def facts(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}


def _asked(lease: int, header: Header, body: bytes) -> dict[str, Any]:
    kept: dict[str, Any] = {"body": body} if len(body) <= LONGEST_KEPT else {"sha256": hashlib.sha256(body).hexdigest()}
    return {"lease": lease, **{key: value for key, value in header.items() if key not in OF_ONE_TRY}, **kept}


def _plain(header: Header) -> dict[str, Any]:
    return {key: value for key, value in header.items() if key != "i"}


def _spec(spec: SandboxSpec) -> Any:
    return orjson.loads(orjson.dumps(masked(spec), default=str))


class _errors_on:
    """Put the fault of a slot on the tape, and let it pass."""

    def __init__(self, tape: Tape, number: int) -> None:
        self._tape = tape
        self._number = number

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SandboxError):
            stored: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
            if isinstance(error, SandboxFileError):
                stored |= {"message": error.strerror, "errno": error.errno, "path": error.filename}
            self._tape.came(self._number, "error", error=stored)


def _error(stored: Mapping[str, Any]) -> SandboxError:
    if stored["kind"] == SandboxFileError.__name__:
        return SandboxFileError(stored["errno"] or errno.EIO, stored["message"], stored["path"])
    kind = getattr(sandbox_pool.errors, stored["kind"], SandboxError)
    return cast("SandboxError", kind(stored["message"]))
