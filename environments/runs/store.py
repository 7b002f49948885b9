"""A run on disk: `rollouts.jsonl`, and `groups.jsonl`, which says which groups are whole.

The lines of a group are written and flushed first, its line in `groups.jsonl` after them. Opening a run again therefore
finds every finished group, and drops what a crash left of an unfinished one. One process at a time may write a run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Self

import orjson

from agent_loop.records.record import RolloutRecord
from environments.errors import UsageError, writing


class RunInUse(UsageError):
    """Another process writes this run."""


class RunDiffers(UsageError):
    """The directory holds a run of another configuration."""


class RunStore:
    """One run directory, open for appending. Use as a context manager."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume: bool = True) -> None:
        self.directory = directory
        self.rollouts_path = directory / "rollouts.jsonl"
        self._groups_path = directory / "groups.jsonl"
        self._config_path = directory / "config.json"
        self._config = orjson.loads(orjson.dumps(config, default=str))
        self._resume = resume
        self._finished: dict[int, str] = {}
        self._rollouts: FileIO | None = None
        self._groups: FileIO | None = None
        self._lock: int | None = None
        self._made = False

    @property
    def finished(self) -> Mapping[int, str]:
        """Index of each whole group -> the id of its item."""
        return self._finished

    def __enter__(self) -> Self:
        self._made = not self.directory.exists()
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self.directory / ".lock")
        try:
            if not self._resume:
                self._clear()
            self._check_whose()
            self._check_config()
            self._finished = {entry["index"]: entry["item_id"] for entry in self._complete_groups()}
            self._drop_unfinished()
            # Unbuffered: what a full disk refused must not be written by `close`, or fail there again.
            self._rollouts = self.rollouts_path.open("ab", buffering=0)
            self._groups = self._groups_path.open("ab", buffering=0)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and let others write; safe to call twice. A folder made here goes when nothing was stored."""
        for file in (self._rollouts, self._groups):
            if file is not None:
                file.close()
        self._rollouts = self._groups = None
        if self._lock is not None:
            if self._made and not (self.rollouts_path.exists() and self.rollouts_path.stat().st_size):
                shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def add_group(self, index: int, item_id: str, records: Sequence[RolloutRecord], complete: bool = True) -> None:
        """Store a group; on return it survives a crash. An incomplete one is kept for the summary, and tried again by
        the next start. Blocking: call it in a thread."""
        if self._rollouts is None or self._groups is None:
            raise RuntimeError("RunStore is used inside `with`")
        _append(self._rollouts, b"".join(record.to_json() + b"\n" for record in records), self.rollouts_path)
        ids = sorted({record.group_id for record in records})
        entry = {"index": index, "item_id": item_id, "ids": ids, "complete": complete}
        _append(self._groups, orjson.dumps(entry) + b"\n", self._groups_path)
        if complete:
            self._finished[index] = item_id

    def records(self) -> Iterator[RolloutRecord]:
        """Every stored rollout, in the order of writing."""
        if self.rollouts_path.exists():
            with self.rollouts_path.open("rb") as lines:
                for line in lines:
                    yield RolloutRecord.from_json(line)

    def _complete_groups(self) -> list[dict[str, Any]]:
        return [entry for entry in whole_lines(self._groups_path) if entry["complete"]]

    def _clear(self) -> None:
        for path in (self.rollouts_path, self._groups_path, self._config_path):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.directory / "workspaces", ignore_errors=True)

    def _check_whose(self) -> None:
        """RunDiffers for rollouts that no run of this kind wrote: they would be taken for an unfinished group's."""
        if self.rollouts_path.exists() and self.rollouts_path.stat().st_size and not self._config_path.exists():
            raise RunDiffers(
                f"{self.rollouts_path} was not written by process or evaluate: choose another --out, or --fresh to "
                "replace it"
            )

    def _check_config(self) -> None:
        keep_config(self._config_path, self._config, check=bool(self._complete_groups()))

    def _drop_unfinished(self) -> None:
        """Keep the lines of whole groups only; a torn last line goes too."""
        complete = self._complete_groups()
        whole = {group_id for entry in complete for group_id in entry["ids"]}
        _rewrite(self._groups_path, [orjson.dumps(entry) for entry in complete])
        kept = [line for line in _raw_lines(self.rollouts_path) if _group_id(line) in whole]
        _rewrite(self.rollouts_path, kept)


def keep_config(path: Path, config: Mapping[str, Any], check: bool) -> None:
    """Store what a run is made with; with `check`, RunDiffers when another was stored there before."""
    plain = orjson.loads(orjson.dumps(config, default=str))
    if check and path.exists() and (changed := _first_difference(_whole_object(path), plain)):
        raise RunDiffers(f"{path.parent} holds a run with another {changed}: choose another --out, or --fresh")
    write_whole(path, orjson.dumps(plain, option=orjson.OPT_INDENT_2))


def append_bytes(path: Path, data: bytes) -> None:
    """Append in one write, so that lines of several writers do not mix; makes the folder.

    What a full disk or a crash tore off before becomes a line of its own: it must not take the next one with it.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # while another writes, the last byte there is one in the middle of a line
            if (size := file.seek(0, os.SEEK_END)) and os.pread(file.fileno(), 1, size - 1) != b"\n":
                data = b"\n" + data
            _write_all(file, data)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file at once: a reader, or a crash, never sees half of it. Makes the folder."""
    part = path.with_suffix(".part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def locked(path: Path) -> int:
    """Lock a file for this process; closing the descriptor unlocks it. RunInUse when another process has it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise RunInUse(f"{path.parent} is being written by another process") from error
    return descriptor


def _append(file: FileIO, data: bytes, path: Path) -> None:
    with writing(path):
        _write_all(file, data)
        os.fsync(file.fileno())


def _write_all(file: FileIO, data: bytes) -> None:
    """One write where the disk has room: a nearly full one takes a part, and the next write then says why."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _raw_lines(path: Path) -> list[bytes]:
    """Lines that end in a newline; what a crash tore off is left out."""
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    return [line for line in whole if line]


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without a torn last one."""
    try:
        return [orjson.loads(line) for line in _raw_lines(path)]
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path} is damaged: {error}: start over with --fresh") from error


def _whole_object(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path} is damaged: {error}: start over with --fresh") from error


def _group_id(line: bytes) -> Any:
    try:
        return orjson.loads(line).get("group_id")
    except orjson.JSONDecodeError:
        return None


def _rewrite(path: Path, lines: list[bytes]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    if not (path.exists() and path.read_bytes() == content):
        write_whole(path, content)


def _first_difference(stored: Any, current: Any, path: str = "") -> str | None:
    if isinstance(stored, dict) and isinstance(current, dict):
        for key in sorted(stored.keys() | current.keys()):
            inner = f"{path}.{key}" if path else str(key)
            if found := _first_difference(stored.get(key), current.get(key), inner):
                return found
        return None
    return None if stored == current else f"{path} ({stored!r}, now {current!r})"
