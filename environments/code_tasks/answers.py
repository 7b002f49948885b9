"""Ask a solution in the sandbox for its answers. What comes back is not trusted: only its shape is taken as given."""

from __future__ import annotations

import json
import secrets
import shlex
from functools import cache
from importlib.resources import files
from typing import Any

from environments.scoring.verification import VerifierContext, read_or_none, stat_or_none

MAX_ANSWER_BYTES = 20_000_000

Steps = list[dict[str, Any]]
Answer = dict[str, Any]


class NoAnswers(Exception):
    """The solution gave no usable answers; the message is the failure sentence."""


@cache
def solver_source() -> str:
    """The program that is put into the sandbox."""
    return (files("environments.code_tasks") / "solver.py").read_text("utf-8")


async def ask(
    ctx: VerifierContext, module: str, cases: list[Steps], *, python: str, timeout_s: float
) -> list[list[Answer]]:
    """Answers to all cases, checked for their shape only; raises NoAnswers."""
    if await stat_or_none(ctx, module) is None:
        raise NoAnswers(f"{module} is missing")
    folder = f".verify-{secrets.token_hex(8)}"  # nobody can have put anything there before
    await ctx.write_file(f"{folder}/solver.py", solver_source().encode())
    await ctx.write_file(f"{folder}/inputs.json", json.dumps(cases).encode())
    words = [
        *shlex.split(python),
        "-I",
        f"{folder}/solver.py",
        module,
        f"{folder}/inputs.json",
        f"{folder}/outputs.json",
    ]
    result = await ctx.exec(shlex.join(words), timeout_s=timeout_s)
    if result.timed_out:
        raise NoAnswers(f"{module} takes longer than {timeout_s:g} s")
    found = await stat_or_none(ctx, f"{folder}/outputs.json")
    if found is None:
        raise NoAnswers(f"{module} ends without answers (exit {result.exit_code}): {_last_line(result.output)}")
    if found.kind != "file" or found.size > MAX_ANSWER_BYTES:
        raise NoAnswers(f"{module} answers with more than {MAX_ANSWER_BYTES} bytes")
    return _shaped(await read_or_none(ctx, f"{folder}/outputs.json") or b"", cases, module)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:200] if lines else "no output"


def _shaped(data: bytes, cases: list[Steps], module: str) -> list[list[Answer]]:
    try:
        answers = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NoAnswers(f"{module} leaves answers that are not JSON") from error
    fits = isinstance(answers, list) and len(answers) == len(cases)
    if not fits or not all(_fits(given, steps) for given, steps in zip(answers, cases, strict=True)):
        raise NoAnswers(f"{module} leaves answers to other questions")
    return list(answers)


def _fits(given: Any, steps: Steps) -> bool:
    if not isinstance(given, list) or len(given) != len(steps):
        return False
    return all(
        isinstance(answer, dict) and ("returns" in answer or "odd" in answer or isinstance(answer.get("raises"), list))
        for answer in given
    )
