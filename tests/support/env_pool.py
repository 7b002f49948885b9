"""A pool of plain directories with the calls that environments use: real bash, no isolation, instant."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import os
import shutil
import signal
import stat as modes
import tarfile
import tempfile
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sandbox_pool.errors import AcquireTimeout, SandboxFileError, SandboxLost
from sandbox_pool.results import ExecResult, FileStat
from sandbox_pool.spec import SandboxSpec


class DirectorySandbox:
    """One directory as a slot; /workspace in paths is the directory itself."""

    isolation = "plain"

    def __init__(self, root: Path, task_id: str, pool: DirectoryPool, spec: SandboxSpec) -> None:
        self.root, self.task_id, self._pool, self.spec = root, task_id, pool, spec
        self.workdir = "/workspace"
        self.lost = False
        self._groups: set[int] = set()

    def _path(self, path: str) -> Path:
        if self.lost:
            raise SandboxLost("the directory went away")
        relative = path.removeprefix("/workspace").lstrip("/") if path.startswith("/workspace") else path
        return self.root / relative

    async def exec(
        self, command: str, *, timeout_s: float | None = None, stdin: bytes | None = None, **_: object
    ) -> ExecResult:
        self._path("")
        self._pool.commands.append((self.task_id, command))
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command.replace("/workspace", str(self.root)),
            cwd=self.root,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": str(self.root)},
        )
        self._groups.add(process.pid)
        try:
            output, _ = await asyncio.wait_for(process.communicate(stdin or b""), timeout_s)
        except (TimeoutError, asyncio.CancelledError) as ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if isinstance(ended, asyncio.CancelledError):
                raise
            return ExecResult(124, "", timed_out=True)
        finally:
            # What a child of the command holds open would else close it after the event loop has ended.
            process._transport.close()  # type: ignore[attr-defined]
        return ExecResult(process.returncode or 0, output.decode("utf-8", "replace"))

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        try:
            data = self._path(path).read_bytes()
            return data[offset:] if length is None else data[offset : offset + length]
        except OSError as error:
            raise SandboxFileError(error.errno, error.strerror, path) from error

    async def write_file(self, path: str, data: bytes, **_: object) -> None:
        self._path(path).parent.mkdir(parents=True, exist_ok=True)
        self._path(path).write_bytes(data)

    async def stat(self, path: str) -> FileStat | None:
        try:
            info = self._path(path).lstat()
        except FileNotFoundError:
            return None
        kinds = {modes.S_IFREG: "file", modes.S_IFDIR: "dir", modes.S_IFLNK: "symlink"}
        kind = kinds.get(modes.S_IFMT(info.st_mode), "other")
        return FileStat(kind, info.st_size, modes.S_IMODE(info.st_mode), info.st_mtime_ns)

    async def list_dir(self, path: str = ".") -> list[tuple[str, FileStat]]:
        names = sorted(entry.name for entry in self._path(path).iterdir())
        return [(name, found) for name in names if (found := await self.stat(f"{path}/{name}"))]

    async def upload(self, local: Path, remote: str) -> None:
        _copy(local, self._path(remote))

    async def download(self, remote: str, local: Path, limits: object = None, **_: object) -> None:
        _copy(self._path(remote), local)

    async def snapshot(self, *, workspace: bool = False, keep_state: bool = False, stop: bool = False) -> str:
        if stop:
            await self.stop_processes()
        if workspace and (self.root.is_symlink() or not self.root.is_dir()):
            raise SandboxFileError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.root))
        name = f"snapshot-{next(self._pool.numbers)}"
        shutil.copytree(self.root, self._pool.home / name, symlinks=True)
        return name

    async def forget_state(self) -> None:
        """Every command has a shell of its own here."""

    async def stop_processes(self) -> int:
        count = len(self._groups)
        for group in self._groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._groups.clear()
        return count


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


class DirectoryPool:
    """Leases directories, at most `slots` at a time; counts everything a test may ask about."""

    def __init__(self, slots: int = 8) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="directory-pool-"))
        self.numbers = itertools.count()
        self.commands: list[tuple[str, str]] = []
        self.leases: list[str] = []
        self.live: dict[str, DirectorySandbox] = {}
        self.refuse: list[str] = []
        """Task ids (or parts of them) whose next lease fails; each entry is used once."""
        self._slots = asyncio.Semaphore(slots)

    def lease(self, task_id: str, spec: SandboxSpec | None = None, timeout_s: float | None = None, **_: object):  # type: ignore[no-untyped-def]
        return self._lease(task_id, None, spec)

    def lease_from(self, snapshot: str, task_id: str, timeout_s: float | None = None, **_: object):  # type: ignore[no-untyped-def]
        return self._lease(task_id, snapshot, None)

    @asynccontextmanager
    async def _lease(
        self, task_id: str, snapshot: str | None, spec: SandboxSpec | None
    ) -> AsyncIterator[DirectorySandbox]:
        for entry in self.refuse:
            if entry in task_id:
                self.refuse.remove(entry)
                raise AcquireTimeout(f"no slot for {task_id}")
        async with self._slots:
            root = self.home / f"slot-{next(self.numbers)}"
            if snapshot is None:
                root.mkdir()
            else:
                shutil.copytree(self.home / snapshot, root, symlinks=True)
            for path, data in (spec.files if spec else {}).items():
                (root / path).write_bytes(data)
            sandbox = DirectorySandbox(root, task_id, self, spec or SandboxSpec())
            self.leases.append(task_id)
            self.live[task_id] = sandbox
            try:
                yield sandbox
            finally:
                del self.live[task_id]
                await sandbox.stop_processes()
                shutil.rmtree(root, ignore_errors=True)

    async def has_snapshot(self, snapshot: str) -> bool:
        return (self.home / snapshot).exists()

    async def download_snapshot(self, snapshot: str, local: Path, limits: object = None) -> None:
        shutil.copytree(self.home / snapshot, local, symlinks=True)

    async def export_snapshot(self, snapshot: str) -> AsyncIterator[bytes]:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            archive.add(self.home / snapshot, ".")
        yield data.getvalue()

    async def import_snapshot(self, chunks: AsyncIterable[bytes], task_id: str, spec: SandboxSpec) -> str:
        name = f"snapshot-{next(self.numbers)}"
        data = b"".join([chunk async for chunk in chunks])
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(self.home / name, filter="tar")
        return name

    async def drop_snapshot(self, snapshot: str) -> None:
        shutil.rmtree(self.home / snapshot, ignore_errors=True)  # as the pool: what is gone is freed

    def close(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

    @property
    def snapshots(self) -> list[str]:
        return [path.name for path in self.home.glob("snapshot-*")]
