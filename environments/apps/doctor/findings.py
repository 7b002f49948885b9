"""The shape of a finding, and the one helper that asks programs for their version."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "limited", "missing", "broken"]
"""`limited`: works at a lower level. `missing`: optional and not there. `broken`: the main job cannot run."""

ANSWER_WITHIN_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    status: Status
    detail: str
    fix: str = ""


async def ask(*argv: str) -> tuple[int, str] | None:
    """Exit code and first line of a program's answer; None when it is not installed or does not answer in time."""
    if shutil.which(argv[0]) is None:
        return None
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), ANSWER_WITHIN_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    lines = output.decode(errors="replace").strip().splitlines()
    return process.returncode or 0, lines[0] if lines else ""
