"""Plain data that calls on a sandbox return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Truncation:
    """Output was longer than the cap: what is left out, and where in the slot the whole of it is."""

    total_chars: int
    omitted_chars: int
    log_path: str


@dataclass(frozen=True)
class ExecResult:
    """Outcome of one command. Nothing in it was read from what the command printed except `output` and `stderr`."""

    exit_code: int
    """As bash gives it; 124 after a timeout, 126 for a bad working directory, 128 + n after signal n."""
    output: str
    """stdout and stderr in order, or stdout alone when they were asked for separately."""
    stderr: str = ""
    timed_out: bool = False
    signal: int | None = None
    cwd: str = ""
    """Working directory after the command: the next command starts there."""
    duration_s: float = 0.0
    truncation: Truncation | None = None


@dataclass(frozen=True)
class FileStat:
    """What `stat` tells of a path in the slot; symlinks are not followed."""

    kind: str
    """file, dir, symlink or other"""
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class LogChunk:
    """Part of a background process's rolling log."""

    data: str
    offset: int
    """Byte offset of `data` in all the process ever wrote."""
    next_offset: int
    dropped: int
    """Bytes before `offset` that were asked for but have rolled out of the log."""


@dataclass(frozen=True)
class HostAsked:
    """A host that programs in a slot asked the slot's proxy for, one entry per port and result."""

    host: str
    port: int
    allowed: bool
    reason: str
    """Why it was refused: not allowed, not public, unknown name, unreachable, over the limit; empty when it was not."""
    count: int
    sent_bytes: int
    received_bytes: int
