"""One terminal task: what is laid out, what is asked, what must hold afterwards, and one way to get there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from environments.scoring.verification import SetupFailed, Verdict, VerifierContext
from environments.terminal_tasks.checks import Check, FileIs


@dataclass(frozen=True)
class TerminalTask:
    """A task as an environment hands it out. The same id always means the same task."""

    id: str
    """`terminal:<split>:<kind>:<seed>`"""
    kind: str
    category: str
    level: int
    """0 (one short command) to 4 (several steps with a trap)."""
    split: str
    held_out_kind: bool
    """Training never sees this kind in any wording."""
    prompt: str
    files: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    """Shell commands that finish the set-up after the files are written."""
    checks: tuple[Check, ...]
    solution: tuple[str, ...]
    """Shell commands of an oracle, run one after another from the workspace."""

    async def prepare(self, ctx: VerifierContext) -> None:
        """Lay the task out in an empty workspace; raises SetupFailed with the command that went wrong."""
        for path, text in self.files:
            await ctx.write_file(path, text.encode())
        for command in self.commands:
            # In a subshell: a sandbox keeps the working directory and options of one command for the next.
            result = await ctx.exec(f"(\n{command}\n)")
            if result.exit_code != 0:
                raise SetupFailed(f"{self.id}: `{command}` exits {result.exit_code}: {result.output.strip()[:200]}")

    async def verify(self, ctx: VerifierContext) -> Verdict:
        """1.0 when every check holds, else 0.0 with the failures by name."""
        failures = [await check.failure(ctx) for check in self.checks]
        return Verdict.of([sentence for sentence in failures if sentence is not None])


@dataclass(frozen=True)
class Plan:
    """What a kind makes of one seed; the wording is added from the data files."""

    asks: dict[str, Any]
    """Values for the placeholders of the wording."""
    checks: tuple[Check, ...]
    solution: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    may_change: tuple[str, ...] = ()
    """Set-up files that the task is allowed to touch; all others must stay as they were, to the byte."""

    def all_checks(self) -> tuple[Check, ...]:
        """The kind's own checks, after those that nothing else was touched."""
        kept = (FileIs(path, text, exact=True) for path, text in self.files.items() if path not in self.may_change)
        return (*kept, *self.checks)
