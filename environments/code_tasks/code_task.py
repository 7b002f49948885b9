"""One coding task: a file to write or mend, and hidden tests whose expected values never enter the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from environments.scoring.verification import Verdict, VerifierContext


class HiddenTests(Protocol):
    """Tests that only ask the sandbox for answers and judge them on the host."""

    async def verify(self, ctx: VerifierContext, module: str, *, python: str, timeout_s: float) -> Verdict:
        """Full score when every test passes."""


@dataclass(frozen=True)
class CodeTask:
    """A task as an environment hands it out."""

    id: str
    """`code:<source>:<name>`"""
    kind: str
    """write or fix"""
    category: str
    level: int
    split: str
    prompt: str
    files: tuple[tuple[str, str], ...]
    module: str
    """The file that the hidden tests import, relative to the workspace."""
    tests: HiddenTests
    solution: tuple[str, ...]
    """Shell commands of an oracle."""
    python: str = "python3"
    """The interpreter of the sandbox."""
    timeout_s: float = 30.0

    async def prepare(self, ctx: VerifierContext) -> None:
        """Lay the task out in an empty workspace."""
        for path, text in self.files:
            await ctx.write_file(path, text.encode())

    async def verify(self, ctx: VerifierContext) -> Verdict:
        """Judge the workspace: 1.0 when all hidden tests pass, else 0.0."""
        return await self.tests.verify(ctx, self.module, python=self.python, timeout_s=self.timeout_s)
