"""A `VerifierContext` over a plain directory and real bash: what a sandbox offers, without the isolation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat as stat_module
import time
from pathlib import Path

from environments.scoring.verification import CheckTimeout
from sandbox_pool.results import ExecResult, FileStat

BASE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "GIT_CONFIG_NOSYSTEM": "1"}


class LocalContext:
    """Runs everything in `root`; relative paths start there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def create(cls, root: Path) -> LocalContext:
        root.mkdir(parents=True, exist_ok=True)
        return cls(root)

    async def exec(self, command: str, *, timeout_s: float = 60.0, stdin: bytes | None = None) -> ExecResult:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            cwd=self.root,
            env={**BASE_ENV, "HOME": str(self.root)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(stdin or b""), timeout_s)
        except TimeoutError:
            raise CheckTimeout(command) from None
        finally:
            # The session is ours: whatever the command left running goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        code = process.returncode or 0
        return ExecResult(
            exit_code=code if code >= 0 else 128 - code,
            output=output.decode(errors="replace"),
            cwd=str(self.root),
            duration_s=time.monotonic() - started,
        )

    async def read_file(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    async def write_file(self, path: str, data: bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def stat(self, path: str) -> FileStat:
        found = (self.root / path).lstat()
        kinds = {stat_module.S_IFREG: "file", stat_module.S_IFDIR: "dir", stat_module.S_IFLNK: "symlink"}
        kind = kinds.get(stat_module.S_IFMT(found.st_mode), "other")
        return FileStat(kind, found.st_size, stat_module.S_IMODE(found.st_mode), found.st_mtime_ns)

    async def list_dir(self, path: str) -> list[str]:
        return sorted(entry.name for entry in (self.root / path).iterdir())
