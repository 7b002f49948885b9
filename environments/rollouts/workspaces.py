"""Frozen workspaces of a run on disk, so that another reward can judge them later (`hermes-rl rescore`).

A workspace is kept as the stream in which hosts hand snapshots to each other, compressed. Nothing that an agent made is
unpacked on this machine: the stream goes back into a slot, whose server reads it with the same limits as any other.
What is larger than the limits is left out and counted; it never ends a rollout.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

from environments.config.settings import WorkspaceSettings
from environments.errors import UsageError
from environments.sandboxes import Pool
from environments.scoring.contexts import FrozenWorkspace
from sandbox_pool.errors import ProtocolError, SandboxError
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

MIB = 1 << 20
MOST_UNPACKED = 64
"""Times the limit of a file: a workspace that unpacks to more is left out, so that a few bytes never fill a host."""
READ_BYTES = 1 << 18


class KeptWorkspaces:
    """The `workspaces` folder of a run."""

    def __init__(self, folder: Path, settings: WorkspaceSettings) -> None:
        self._folder = folder
        self._largest = int(settings.max_mb * MIB)
        self._room = int(settings.total_mb * MIB) - sum(file.stat().st_size for file in folder.glob("*.gz"))
        self.left_out = 0

    def _file(self, rollout_id: str, number: int) -> Path:
        return self._folder / f"{quote(rollout_id, safe='')}.{number}.gz"

    def has(self, rollout_id: str) -> bool:
        """Whether the workspace of this rollout was kept."""
        return self._file(rollout_id, 0).exists()

    async def keep(self, rollout_id: str, frozen: FrozenWorkspace) -> None:
        """Store what a rollout left. A fault, or a limit, leaves this one out."""
        try:
            for number, stream in enumerate(frozen.exported()):
                if not await self._write(self._file(rollout_id, number), stream):
                    self._file(rollout_id, 0).unlink(missing_ok=True)
                    self._leave_out(rollout_id, "it is larger than env.workspaces allows")
                    return
        except (OSError, SandboxError) as error:
            self._leave_out(rollout_id, str(error))

    def _leave_out(self, rollout_id: str, why: str) -> None:
        self.left_out += 1
        log.warning("the workspace of %s is not kept: %s", rollout_id, why)

    async def _write(self, path: Path, stream: AsyncIterator[bytes]) -> bool:
        packer, unpacked, packed = zlib.compressobj(1, wbits=31), 0, 0
        part = path.with_suffix(".part")
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                async for chunk in stream:
                    data = await asyncio.to_thread(packer.compress, chunk)
                    unpacked, packed = unpacked + len(chunk), packed + len(data)
                    if packed > min(self._largest, self._room) or unpacked > self._largest * MOST_UNPACKED:
                        return False
                    await asyncio.to_thread(file.write, data)
                data = packer.flush()
                file.write(data)
            part.replace(path)
            self._room -= packed + len(data)
            return True
        finally:
            part.unlink(missing_ok=True)

    async def restored(self, rollout_id: str, pool: Pool, spec: SandboxSpec, whole_layer: bool) -> FrozenWorkspace:
        """The workspace in a pool again; UsageError when the file is damaged. Close it as any other."""
        workdir = spec.workdir
        if workdir is None:  # the image names it
            async with pool.lease(f"{rollout_id}/restore", spec) as sandbox:
                workdir = sandbox.workdir
        frozen = FrozenWorkspace(pool, workdir)
        try:
            for number in range(1 + whole_layer):
                chunks = self._read(self._file(rollout_id, number))
                await frozen.bring_in(chunks, f"{rollout_id}/restore", spec)
        except ProtocolError as error:
            await frozen.close()
            raise UsageError(f"the workspace of {rollout_id} is damaged: {error}") from error
        except BaseException:
            await frozen.close()
            raise
        return frozen

    async def _read(self, path: Path) -> AsyncIterator[bytes]:
        unpacker, unpacked = zlib.decompressobj(wbits=31), 0
        try:
            with path.open("rb") as file:
                while data := await asyncio.to_thread(file.read, READ_BYTES):
                    while data:
                        chunk = await asyncio.to_thread(unpacker.decompress, data, MIB)
                        data, unpacked = unpacker.unconsumed_tail, unpacked + len(chunk)
                        if unpacked > self._largest * MOST_UNPACKED:
                            raise UsageError(f"{path} unpacks to more than env.workspaces.max_mb allows")
                        yield chunk
            if not unpacker.eof:
                raise UsageError(f"{path} is damaged: it ends too soon")
        except zlib.error as error:
            raise UsageError(f"{path} is damaged: {error}") from error
