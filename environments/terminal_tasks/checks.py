"""Promises about a finished workspace. Each check reads the files themselves and says in one sentence what is wrong.

Only `ScriptPrints` runs anything, and it compares the answer to arguments the agent never saw: replacing a program of
the workspace cannot make a check hold. Archives are read here and never unpacked to disk.
"""

from __future__ import annotations

import gzip
import io
import re
import shlex
import tarfile
import zlib
from dataclasses import dataclass
from typing import Protocol

import orjson

from agent_loop.records.tape import random_name
from environments.scoring.verification import CheckTimeout, VerifierContext, read_or_none, stat_or_none

SHOWN_CHARS = 80
SCRIPT_TIMEOUT_S = 10.0
MAX_ARCHIVE_BYTES = 250_000
"""Packed or not; those that tasks ask for hold a few lines of text."""


class Check(Protocol):
    """One promise that must hold for the task to count as solved."""

    async def failure(self, ctx: VerifierContext) -> str | None:
        """None when the promise holds, else one sentence."""


def show(data: bytes | str) -> str:
    """A short, quoted rendering for a failure sentence."""
    text = data.decode(errors="replace") if isinstance(data, bytes) else data
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


@dataclass(frozen=True)
class FileIs:
    """The file holds this text; blanks at line ends and at the end of the file do not matter unless `exact`."""

    path: str
    text: str
    exact: bool = False

    async def failure(self, ctx: VerifierContext) -> str | None:
        found = await stat_or_none(ctx, self.path)
        data = await read_or_none(ctx, self.path)
        if found is None or found.kind != "file" or data is None:
            return f"{self.path} is not a file"
        same = data == self.text.encode() if self.exact else _loose(data.decode(errors="replace")) == _loose(self.text)
        return None if same else f"{self.path} holds {show(data)} instead of {show(self.text)}"


def _loose(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


@dataclass(frozen=True)
class LinesAre:
    """The file holds exactly these lines, in any order; a leading `./` of a path does not matter."""

    path: str
    lines: tuple[str, ...]

    async def failure(self, ctx: VerifierContext) -> str | None:
        data = await read_or_none(ctx, self.path)
        if data is None:
            return f"{self.path} is not a file"
        found = sorted(
            line.strip().removeprefix("./") for line in data.decode(errors="replace").splitlines() if line.strip()
        )
        return None if found == sorted(self.lines) else f"{self.path} lists {show(', '.join(found))}"


@dataclass(frozen=True)
class NumberIs:
    """The file holds this number alone, or as `wc` prints it, followed by one file name."""

    path: str
    value: int

    async def failure(self, ctx: VerifierContext) -> str | None:
        data = await read_or_none(ctx, self.path)
        if data is None:
            return f"{self.path} is not a file"
        if re.fullmatch(rf"\s*{self.value}(\s+\S+)?\s*", data.decode(errors="replace")):
            return None
        return f"{self.path} holds {show(data)} instead of {self.value}"


@dataclass(frozen=True)
class JsonIs:
    """The file parses as JSON equal to this text's value."""

    path: str
    text: str

    async def failure(self, ctx: VerifierContext) -> str | None:
        data = await read_or_none(ctx, self.path)
        try:
            found = orjson.loads(data or b"")
        except orjson.JSONDecodeError as error:
            return f"{self.path} is not JSON: {error}"
        return None if found == orjson.loads(self.text) else f"{self.path} holds {show(data or b'')}"


@dataclass(frozen=True)
class JsonLinesAre:
    """Each line of the file parses as JSON, equal to these values in this order."""

    path: str
    lines: tuple[str, ...]

    async def failure(self, ctx: VerifierContext) -> str | None:
        data = await read_or_none(ctx, self.path)
        try:
            found = [orjson.loads(line) for line in (data or b"").splitlines() if line.strip()]
        except orjson.JSONDecodeError as error:
            return f"{self.path} has a line that is not JSON: {error}"
        return (
            None if found == [orjson.loads(line) for line in self.lines] else f"{self.path} holds {show(data or b'')}"
        )


@dataclass(frozen=True)
class KindIs:
    """The path is a file, a dir or a symlink."""

    path: str
    kind: str

    async def failure(self, ctx: VerifierContext) -> str | None:
        found = await stat_or_none(ctx, self.path)
        return None if found is not None and found.kind == self.kind else f"{self.path} is not a {self.kind}"


@dataclass(frozen=True)
class Missing:
    """Nothing is at the path."""

    path: str

    async def failure(self, ctx: VerifierContext) -> str | None:
        return None if await stat_or_none(ctx, self.path) is None else f"{self.path} is still there"


@dataclass(frozen=True)
class ModeIs:
    """The permission bits are exactly these, or, with `mask`, these among the masked ones."""

    path: str
    mode: int
    mask: int = 0o777

    async def failure(self, ctx: VerifierContext) -> str | None:
        found = await stat_or_none(ctx, self.path)
        if found is None:
            return f"{self.path} is missing"
        bits = found.mode & self.mask
        return None if bits == self.mode else f"{self.path} has mode {bits:o} instead of {self.mode:o}"


@dataclass(frozen=True)
class EntriesAre:
    """The directory holds exactly these names (not recursive)."""

    path: str
    names: tuple[str, ...]

    async def failure(self, ctx: VerifierContext) -> str | None:
        try:
            found = sorted(await ctx.list_dir(self.path))
        except OSError:
            return f"{self.path} is not a directory"
        return None if found == sorted(self.names) else f"{self.path} holds {show(', '.join(found))}"


@dataclass(frozen=True)
class LinkFollows:
    """The path is a symlink, and what is written to the target is read through it."""

    link: str
    target: str

    async def failure(self, ctx: VerifierContext) -> str | None:
        found = await stat_or_none(ctx, self.link)
        if found is None or found.kind != "symlink":
            return f"{self.link} is not a symlink"
        if await stat_or_none(ctx, self.target) is None:
            return f"{self.target} is missing"
        mark = random_name(16).encode()
        await ctx.write_file(self.target, mark)
        return None if await read_or_none(ctx, self.link) == mark else f"{self.link} does not lead to {self.target}"


@dataclass(frozen=True)
class ScriptPrints:
    """Run on arguments the agent never saw, the script prints this."""

    script: str
    arguments: tuple[str, ...]
    printed: str
    exit_code: int = 0
    direct: bool = False
    """Start the file itself (it must be executable) instead of giving it to bash."""

    async def failure(self, ctx: VerifierContext) -> str | None:
        start = f"./{self.script}" if self.direct else f"bash {shlex.quote(self.script)}"
        command = " ".join([start, *map(shlex.quote, self.arguments)])
        try:
            result = await ctx.exec(command, timeout_s=SCRIPT_TIMEOUT_S)
        except CheckTimeout:
            return f"`{command}` takes longer than {SCRIPT_TIMEOUT_S:g} s"
        if result.exit_code != self.exit_code:
            return f"`{command}` exits {result.exit_code} instead of {self.exit_code}"
        if _loose(result.output) != _loose(self.printed):
            return f"`{command}` prints {show(result.output)} instead of {show(self.printed)}"
        return None


@dataclass(frozen=True)
class GzipHolds:
    """The file is gzip data of exactly this text."""

    path: str
    text: str

    async def failure(self, ctx: VerifierContext) -> str | None:
        data = await read_or_none(ctx, self.path)
        if data is None:
            return f"{self.path} is not a file"
        try:
            found = _unzipped(data)
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
        data = await read_or_none(ctx, self.path)
        if data is None:
            return f"{self.path} is not a file"
        try:
            found = _members(_unzipped(data) if self.compressed else data)
        except Exception:  # noqa: BLE001 - tarfile raises anything at all about bytes that were made for that
            return f"{self.path} is not a {'gzip-compressed ' if self.compressed else ''}tar archive"
        wanted = {name: text.encode() for name, text in self.files}
        return None if found == wanted else f"{self.path} holds {show(', '.join(sorted(found)))}"


def _unzipped(data: bytes) -> bytes:
    """A little data may unpack to very much, and takes its time on the way."""
    with gzip.GzipFile(fileobj=io.BytesIO(_within_limit(data))) as unpacked:
        return _within_limit(unpacked.read(MAX_ARCHIVE_BYTES + 1))


def _within_limit(data: bytes) -> bytes:
    if len(data) > MAX_ARCHIVE_BYTES:
        raise OSError("larger than anything that a task packs")
    return data


def _members(data: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    left = MAX_ARCHIVE_BYTES
    with tarfile.open(fileobj=io.BytesIO(_within_limit(data)), mode="r:") as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                found[member.name.removeprefix("./")] = content = stream.read(left)
                left -= len(content)
    return found
