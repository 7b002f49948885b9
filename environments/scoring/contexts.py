"""`ToolContext`: what `compute_reward(item, result, ctx)` works with, and the frozen workspace below it.

The agent's processes are stopped before its workspace is copied to the host, and only the workspace is copied. Every
call of a verifier goes to a *fork*: a fresh slot with those files, made on the first call that needs it. Whatever the
agent did to bash, python or the home directory outside the workspace is not there. What it left in the verifier's own
paths is removed first; tests are put in afterwards, from the host. `ctx.agent_state` reads what the agent left,
untouched. The slot of the rollout can be given back before another is asked for, so rollouts never hold one slot while
they wait for a second.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shlex
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from environments.sandboxes import Pool, Sandbox
from sandbox_pool.owned_folders import make_owned_folder
from sandbox_pool.results import ExecResult, FileStat
from sandbox_pool.server.host_files import remove_tree
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

CallTool = Callable[[Sandbox, str, dict[str, Any]], Awaitable[str]]
"""Runs one tool of the model on a sandbox and gives the text that the model would read."""

EXEC_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class SearchHit:
    """One line that matched."""

    path: str
    line: int
    text: str


class SandboxContext:
    """Async calls on a sandbox. Relative paths start at the workspace."""

    def __init__(self, sandbox: Sandbox, call_tool: CallTool | None = None) -> None:
        self._sandbox = sandbox
        self._call_tool = call_tool

    async def sandbox(self) -> Sandbox:
        """The sandbox that the calls go to."""
        return self._sandbox

    async def exec(self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S) -> ExecResult:
        """Run a bash command; `output` is whole, however long."""
        sandbox = await self.sandbox()
        result = await sandbox.exec(command, timeout_s=timeout_s)
        if result.truncation is None:
            return result
        whole = await sandbox.read_file(result.truncation.log_path)
        values = {**vars(result), "output": whole.decode("utf-8", "replace"), "truncation": None}
        return ExecResult(**values)

    async def terminal(self, command: str, timeout: float = EXEC_TIMEOUT_S) -> dict[str, Any]:
        """Run a bash command; hermes-agent's shape (output, exit_code), and timed_out."""
        result = await self.exec(command, timeout_s=timeout)
        return {"output": result.output, "exit_code": result.exit_code, "timed_out": result.timed_out}

    async def read_file(self, path: str) -> bytes:
        """Whole content; OSError when it cannot be read."""
        return await (await self.sandbox()).read_file(path)

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Create or replace a file, with its parent directories."""
        await (await self.sandbox()).write_file(path, data.encode() if isinstance(data, str) else data)

    async def stat(self, path: str) -> FileStat:
        """What is there, without following a symlink; OSError when nothing is."""
        found = await (await self.sandbox()).stat(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    async def list_dir(self, path: str = ".") -> Sequence[str]:
        return [name for name, _ in await (await self.sandbox()).list_dir(path)]

    async def upload_file(self, local: str | Path, remote: str) -> None:
        """Copy a host file into the sandbox, byte for byte."""
        await (await self.sandbox()).upload(_existing(local, file=True), remote)

    async def upload_dir(self, local: str | Path, remote: str) -> None:
        """Copy a host directory into the sandbox."""
        await (await self.sandbox()).upload(_existing(local, file=False), remote)

    async def download_file(self, remote: str, local: str | Path) -> None:
        """Copy a file out of the sandbox, byte for byte."""
        await (await self.sandbox()).download(remote, Path(local))

    async def download_dir(self, remote: str, local: str | Path) -> None:
        """Copy a directory out of the sandbox."""
        await (await self.sandbox()).download(remote, Path(local))

    async def search(self, pattern: str, path: str = ".") -> list[SearchHit]:
        """Every line below `path` that matches an extended regular expression."""
        command = f"grep -rnIEZ -e {shlex.quote(pattern)} -- {shlex.quote(path)}"
        result = await self.exec(command)
        if result.exit_code > 1:
            raise ValueError(f"search for {pattern!r} failed: {result.output.strip()[:200]}")
        return [_hit(line) for line in result.output.splitlines() if "\0" in line]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run one of the model's tools as the model would; its JSON result, or {"output": text}."""
        if self._call_tool is None:
            raise RuntimeError("this environment has no tools")
        text = await self._call_tool(await self.sandbox(), name, arguments)
        try:
            answer = json.loads(text)
        except ValueError:
            return {"output": text}
        return answer if isinstance(answer, dict) else {"output": text}

    async def remove(self, *paths: str) -> None:
        """Remove files and trees; missing ones are fine."""
        if paths:
            result = await self.exec("rm -rf -- " + " ".join(map(shlex.quote, paths)))
            if result.exit_code != 0:
                raise OSError(f"could not remove {', '.join(paths)}: {result.output.strip()[:200]}")


def _existing(path: str | Path, file: bool) -> Path:
    local = Path(path)
    if not (local.is_file() if file else local.is_dir()):
        raise FileNotFoundError(f"there is no {'file' if file else 'directory'} {local} on the host")
    return local


def _hit(line: str) -> SearchHit:
    path, rest = line.split("\0", 1)
    number, text = rest.split(":", 1)
    return SearchHit(path, int(number), text)


MAX_LINKS = 40


class FrozenWorkspace:
    """A copy of a workspace on the host. `close` removes it."""

    def __init__(self, directory: Path, workdir: str) -> None:
        self._directory = directory
        self.layer: str | None = None
        """Snapshot of the slot's whole writable layer, when that was asked for."""
        self.files = directory / "workspace"
        self.agent_state = AgentState(self.files, workdir)

    @classmethod
    async def take(cls, sandbox: Sandbox, whole_layer: bool = False) -> FrozenWorkspace:
        """Stop the agent's processes and copy its workspace; with `whole_layer` keep everything else it wrote too."""
        await sandbox.stop_processes()
        directory = await asyncio.to_thread(make_owned_folder, "frozen-")
        frozen = cls(directory, sandbox.workdir)
        try:
            await sandbox.download(sandbox.workdir, frozen.files)
            if whole_layer:
                frozen.layer = await sandbox.snapshot()
        except BaseException:
            await frozen.close()
            raise
        return frozen

    async def put_into(self, sandbox: Sandbox) -> None:
        """Lay the workspace out in a fresh slot."""
        await sandbox.upload(self.files, sandbox.workdir)

    async def close(self) -> None:
        """Remove the copy from the host."""
        if problems := await asyncio.to_thread(remove_tree, self._directory):
            log.warning("a copy of a workspace stays until this process ends: %s", "; ".join(problems))


class AgentState:
    """Reads the workspace as the agent left it, whatever a verifier has done since in its own copy.

    Symlinks are followed inside the workspace only: the agent decides where they lead, and it must not
    reach the host's files.
    """

    def __init__(self, root: Path, workdir: str) -> None:
        self._root = root
        self._workdir = PurePosixPath(workdir)

    async def read_file(self, path: str) -> bytes:
        """Whole content of a file; OSError when it is missing."""
        return await asyncio.to_thread(self._read, path)

    async def stat(self, path: str) -> FileStat:
        """What is there, without following a symlink at the end; OSError when nothing is."""
        return await asyncio.to_thread(self._stat, path)

    async def list_dir(self, path: str = ".") -> Sequence[str]:
        """Names in a directory, sorted; OSError when it is not a directory."""
        return await asyncio.to_thread(lambda: sorted(e.name for e in self._resolve(path, follow=True).iterdir()))

    def _read(self, path: str) -> bytes:
        real = self._resolve(path, follow=True)
        if not stat.S_ISREG(os.lstat(real).st_mode):
            raise OSError(errno.EISDIR if real.is_dir() else errno.EINVAL, "not a regular file", path)
        return real.read_bytes()

    def _stat(self, path: str) -> FileStat:
        info = os.lstat(self._resolve(path, follow=False))
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}
        return FileStat(
            kind=kinds.get(stat.S_IFMT(info.st_mode), "other"),
            size=info.st_size,
            mode=stat.S_IMODE(info.st_mode),
            mtime_ns=info.st_mtime_ns,
        )

    def _resolve(self, path: str, follow: bool) -> Path:
        """The host path of a workspace path, every symlink on the way resolved as if the workspace were alone."""
        todo = list(reversed(self._inside(PurePosixPath(path), path)))
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = done[:-1]
                continue
            here = self._root.joinpath(*done, part)
            if here.is_symlink() and (todo or follow):
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, "too many levels of symbolic links", path)
                target = PurePosixPath(here.readlink())
                if target.is_absolute():
                    done = []
                todo += reversed(self._inside(target, path) if target.is_absolute() else target.parts)
                continue
            done.append(part)
        return self._root.joinpath(*done)

    def _inside(self, path: PurePosixPath, asked: str) -> list[str]:
        if path.is_absolute():
            if not path.is_relative_to(self._workdir):
                raise OSError(errno.ENOENT, f"outside the workspace {self._workdir}", asked)
            path = path.relative_to(self._workdir)
        return [part for part in path.parts if part != "."]


CLEAN_ENVIRONMENT = "export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1; unset PYTHONPATH PYTHONSTARTUP BASH_ENV ENV"
"""Run first in a fork: packages that the agent installed for its user must not be picked up."""


class ToolContext(SandboxContext):
    """A frozen workspace and the fork that verification runs in. Owned by the environment, which closes it."""

    def __init__(
        self,
        frozen: FrozenWorkspace,
        pool: Pool,
        spec: SandboxSpec,
        task_id: str,
        verifier_paths: Sequence[str] = (),
        call_tool: CallTool | None = None,
    ) -> None:
        self._frozen = frozen
        self._pool = pool
        self._spec = spec
        self._task_id = task_id
        self._verifier_paths = tuple(verifier_paths)
        self._call_tool = call_tool
        self._stack = AsyncExitStack()
        self._fork: Sandbox | None = None
        self._making = asyncio.Lock()

    @property
    def task_id(self) -> str:
        """The rollout this context belongs to."""
        return self._task_id

    @property
    def agent_state(self) -> AgentState:
        """The workspace as the agent left it, read-only."""
        return self._frozen.agent_state

    async def sandbox(self) -> Sandbox:
        """The fork, made on first use."""
        async with self._making:
            if self._fork is None:
                self._fork = await self._make_fork()
            return self._fork

    async def put_tests(self, files: Mapping[str, bytes | str]) -> None:
        """Write files from the host over whatever the agent had at these paths, a directory or a symlink included."""
        await self.remove(*files)
        for path, data in files.items():
            await self.write_file(path, data)

    async def close(self) -> None:
        """Give back the fork and the snapshot it came from, and remove the frozen copy."""
        try:
            await self._stack.aclose()
            if self._frozen.layer is not None:
                layer, self._frozen.layer = self._frozen.layer, None
                await self._pool.drop_snapshot(layer)
        finally:
            await self._frozen.close()

    async def _make_fork(self) -> Sandbox:
        task_id = f"{self._task_id}/verify"
        if self._frozen.layer is not None:
            fork = await self._stack.enter_async_context(self._pool.lease_from(self._frozen.layer, task_id))
        else:
            fork = await self._stack.enter_async_context(self._pool.lease(task_id, self._spec))
            await self._frozen.put_into(fork)
        context = SandboxContext(fork)
        await context.exec(CLEAN_ENVIRONMENT)
        await context.remove(*self._verifier_paths)
        return fork
