"""The workspace as the agent left it: taken out of the slot once, read from the host, put into clean slots.

The agent's processes are stopped before the copy is made, and only the workspace is copied. A verifier therefore runs
on the system of a fresh slot: whatever the agent did to bash, python or the home directory outside the workspace is
not there. The slot of the rollout can be given back before another is asked for, so rollouts never hold one slot while
they wait for a second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from environments.sandboxes import Sandbox
from sandbox_pool.owned_folders import make_owned_folder
from sandbox_pool.results import FileStat
from sandbox_pool.server.host_files import remove_tree

log = logging.getLogger(__name__)
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

    Symlinks are followed inside the workspace only: where they lead is decided by the agent, and the host's files are
    none of its business.
    """

    def __init__(self, root: Path, workdir: str) -> None:
        self._root = root
        self._workdir = PurePosixPath(workdir)

    async def read_file(self, path: str) -> bytes:
        """Whole content of a file; OSError when there is none."""
        return await asyncio.to_thread(self._read, path)

    async def stat(self, path: str) -> FileStat:
        """What is there, without following a symlink at the end; OSError when nothing is."""
        return await asyncio.to_thread(self._stat, path)

    async def list_dir(self, path: str = ".") -> Sequence[str]:
        """Names in a directory, sorted; OSError when it is none."""
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
