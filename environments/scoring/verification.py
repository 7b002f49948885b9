"""What a verifier may do with a finished workspace, and what it answers.

The context stands for a *frozen copy* of the agent's workspace: the agent's processes are gone and nothing a verifier
does there reaches the original. Relative paths start at the workspace. Faults of the infrastructure are exceptions of
other kinds than OSError (`sandbox_pool.errors`) and must never be turned into a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox_pool.results import ExecResult, FileStat


class VerifierContext(Protocol):
    """The five calls that task set-up and verification are written in."""

    async def exec(self, command: str, *, timeout_s: float = 60.0, stdin: bytes | None = None) -> ExecResult:
        """Run a bash command in the workspace; raises CheckTimeout when it takes longer."""

    async def read_file(self, path: str) -> bytes:
        """Whole content, byte-exact, following symlinks; OSError when it cannot be read."""

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its parent directories."""

    async def stat(self, path: str) -> FileStat:
        """What is there, without following a symlink; OSError when the path does not exist."""

    async def list_dir(self, path: str) -> Sequence[str]:
        """Names in a directory; OSError when it is not a directory."""


@dataclass(frozen=True)
class Verdict:
    """A verifier's answer."""

    score: float
    failures: tuple[str, ...] = ()
    """One sentence for each promise that does not hold; empty when the score is 1."""
    reasons: tuple[str, ...] = ()
    """Why a judge decided so, one for each vote."""
    agreement: float | None = None
    """Of a judge's votes: 1 less the mean difference between two of them; None with a single one."""

    @classmethod
    def of(cls, failures: Sequence[str]) -> Verdict:
        """Full score without failures, none with any."""
        return cls(score=0.0 if failures else 1.0, failures=tuple(failures))


class AgentFault(Exception):
    """The agent destroyed what it was to be judged by. It ends as `agent_fault`, with a score of 0."""


class CheckTimeout(TimeoutError):
    """A command of a check took longer than it may. What the agent left decides that, so it counts as `agent_fault`."""


class SetupFailed(RuntimeError):
    """A task could not be laid out in its workspace: a fault of the task or the machine, never of the agent."""


async def stat_or_none(ctx: VerifierContext, path: str) -> FileStat | None:
    """Stat of a path, or None when nothing is there."""
    try:
        return await ctx.stat(path)
    except OSError:
        return None


async def read_or_none(ctx: VerifierContext, path: str) -> bytes | None:
    """Content of a file, or None when there is no readable file."""
    try:
        return await ctx.read_file(path)
    except OSError:
        return None
