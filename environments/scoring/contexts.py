"""`ToolContext`: what `compute_reward(item, result, ctx)` works with.

Every call goes to a *fork*: a fresh slot with the files of the agent's workspace, made on the first call that needs it,
after the agent's processes were stopped. What the agent left in the verifier's own paths is removed there first; tests
are put in afterwards, from the host. `ctx.agent_state` reads what the agent left, untouched.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.sandboxes import Pool, Sandbox
from environments.scoring.frozen import AgentState, FrozenWorkspace
from sandbox_pool.results import ExecResult, FileStat
from sandbox_pool.spec import SandboxSpec

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
        """Run a bash command; the earlier system's shape: output, exit_code, and timed_out beside them."""
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
        """Names in a directory."""
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
        """Remove files and trees; what is not there is no error."""
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


CLEAN_ENVIRONMENT = "export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1; unset PYTHONPATH PYTHONSTARTUP BASH_ENV ENV"
"""Run first in a fork: packages that the agent put beside the workspace must not be picked up."""


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

    async def release_fork(self) -> None:
        """Give the fork back, and the snapshot it came from. The frozen copy is its owner's to remove."""
        await self._stack.aclose()
        if self._frozen.layer is not None:
            layer, self._frozen.layer = self._frozen.layer, None
            await self._pool.drop_snapshot(layer)

    async def close(self) -> None:
        """Give the fork back and remove the frozen copy."""
        try:
            await self.release_fork()
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
