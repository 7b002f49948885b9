"""Promises about archives and compressed files, read here and never unpacked to disk."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from dataclasses import dataclass

from environments.scoring.verification import VerifierContext, read_or_none
from environments.terminal_tasks.checks import show

MAX_UNPACKED_BYTES = 10_000_000


@dataclass(frozen=True)
class GzipHolds:
    """The file is gzip data of exactly this text."""

    path: str
    text: str

    async def failure(self, ctx: VerifierContext) -> str | None:
        """None when the unpacked data is the text."""
        data = await read_or_none(ctx, self.path)
        if data is None:
            return f"{self.path} is not a file"
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
                found = unpacked.read(MAX_UNPACKED_BYTES)
        except (OSError, EOFError, zlib.error):
            return f"{self.path} is not gzip data"
        return None if found == self.text.encode() else f"{self.path} unpacks to {show(found)}"


@dataclass(frozen=True)
class TarHolds:
    """The file is a tar archive whose regular files are exactly these; a leading `./` of a name does not matter."""

    path: str
    files: tuple[tuple[str, str], ...]
    compressed: bool

    async def failure(self, ctx: VerifierContext) -> str | None:
        """None when the archive holds exactly the files."""
        data = await read_or_none(ctx, self.path)
        if data is None:
            return f"{self.path} is not a file"
        try:
            found = _members(data, "r:gz" if self.compressed else "r:")
        except (tarfile.TarError, OSError, EOFError, zlib.error):
            return f"{self.path} is not a {'gzip-compressed ' if self.compressed else ''}tar archive"
        wanted = {name: text.encode() for name, text in self.files}
        return None if found == wanted else f"{self.path} holds {show(', '.join(sorted(found)))}"


def _members(data: bytes, mode: str) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode=mode) as archive:  # type: ignore[call-overload]
        for member in archive:
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                found[member.name.removeprefix("./")] = stream.read(MAX_UNPACKED_BYTES)
    return found
