"""Calls on one sandbox as task authors write them: whole results, byte-exact files, errors as exceptions.

Used for `prepare` (on the slot that a group is forked from) and, through `ToolContext`, for rewards. It satisfies
`environments.verification.VerifierContext`. Nothing here goes through the tools of the model, so nothing is truncated,
redacted or reworded.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.sandboxes import Sandbox
from sandbox_pool.results import ExecResult, FileStat

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
