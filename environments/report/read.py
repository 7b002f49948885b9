"""Reading a rollouts.jsonl for people: a file that a crash cut off in its last line is still worth looking at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agent_loop.records import RolloutRecord


class UnreadableRun(ValueError):
    """The file holds no rollouts; the message names the line and what is wrong with it."""


def find_rollouts(path: Path) -> Path:
    """The file itself, or the rollouts.jsonl of a run's folder."""
    return path / "rollouts.jsonl" if path.is_dir() else path


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """Records one by one; an unfinished last line (no newline) is skipped, any other bad line is an error."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield RolloutRecord.from_json(line)
            except ValueError as error:
                if not line.endswith(b"\n") and number > 1:
                    return
                raise UnreadableRun(f"{path}, line {number}: {error}") from error
