"""Hidden tests: the sandbox is only asked for answers, and they are judged on the host.

What comes back is the solution's word and no more; its signature and its shape are checked before it is compared.
`CaseTests` are data: steps with what they must return or raise. `CodeTests` are code, as HumanEval and its kin write
it, a `check(candidate)` full of asserts: it runs on the host in a limited child process (judge.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import as_file, files
from typing import Any

from agent_loop.records.tape import random_name
from agent_loop.tools.tool import work_out
from environments.code_tasks.solver import decode, encode
from environments.scoring.verification import CheckTimeout, Verdict, VerifierContext, stat_or_none

CPU_S = 5
"""CPU time for all answers of a solution; those of the reference take milliseconds."""

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
    key = random_name(32)
    words = [*shlex.split(python), "-I", "-c", solver_source(), module]
    request = json.dumps({"key": key, "cases": cases}).encode()
    # A wrong solution that never ends is stopped by the CPU time it uses, however busy the machine is. No shell stays
    # that has the descriptors of the process which keeps the answers.
    command = f"ulimit -t {CPU_S}; exec {shlex.join(words)}"
    try:
        result = await ctx.exec(command, timeout_s=timeout_s, stdin=request)
    except CheckTimeout:
        raise NoAnswers(f"{module} takes longer than {timeout_s:g} s") from None
    if result.exit_code != 0:
        raise NoAnswers(f"{module} ends without answers: {_last_line(result.output)}")
    signature, _, body = result.output.partition("\n")
    expected = hmac.new(key.encode(), body.encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        raise NoAnswers(f"the answers of {module} are not those that were given")
    return await work_out(len(body), _shaped, body, cases, module)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:200] if lines else "no output"


def _shaped(data: str, cases: list[Steps], module: str) -> list[list[Answer]]:
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
    return all(isinstance(answer, dict) and _is_one_answer(answer) for answer in given)


def _is_one_answer(answer: Answer) -> bool:
    """Exactly what the solver writes: the solution can write there too, and must not claim two things at once."""
    if answer.keys() == {"returns", "args_after"}:
        return True
    if answer.keys() == {"odd"}:
        return isinstance(answer["odd"], str)
    names = answer.get("raises")
    return (
        answer.keys() == {"raises", "message"}
        and isinstance(answer["message"], str)
        and isinstance(names, list)
        and bool(names)
        and all(isinstance(name, str) for name in names)
    )


UNCHECKED = object()
"""No promise about what a step returns."""


@dataclass(frozen=True)
class Step:
    """One call, construction or attribute of the solution, and what must come of it."""

    op: str
    """call, new or get"""
    target: str
    """A name of the module, or `object.method` of an object that an earlier step bound."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    bind: str | None = None
    returns: Any = UNCHECKED
    args_after: Any = UNCHECKED
    """What the arguments must hold after the call, for calls that may (or may not) change them."""
    raises: str | None = None

    def question(self) -> dict[str, Any]:
        """What the sandbox learns of it."""
        packed = {"args": encode(list(self.args)), "kwargs": encode(dict(self.kwargs))}
        return {"op": self.op, "target": self.target, "bind": self.bind, **packed}

    def failure(self, answer: Answer) -> str | None:
        """None when the answer is right, else one sentence."""
        shown = f"{self.target}({', '.join(map(repr, self.args))[:120]})"
        if self.raises is not None:
            ok = self.raises in answer.get("raises", ())
            return None if ok else f"{shown} does not raise {self.raises}"
        if "returns" not in answer:
            return f"{shown} {_mishap(answer)}"
        return _difference(self.returns, answer["returns"], f"{shown} returns") or _difference(
            self.args_after, answer.get("args_after"), f"{shown} leaves its arguments as"
        )


def _difference(expected: Any, encoded: Any, what: str) -> str | None:
    if expected is UNCHECKED:
        return None
    try:
        found = decode(encoded)
        equal = same(expected, found)
    except (ValueError, RecursionError):
        return f"{what} something unreadable"
    return None if equal else f"{what} {repr(found)[:120]}, not {repr(expected)[:120]}"


def _mishap(answer: Answer) -> str:
    if "odd" in answer:
        return f"returns {str(answer['odd'])[:120]}"
    raised = answer["raises"]
    return f"raises {str(raised[0] if raised else '?')[:60]}: {str(answer.get('message', ''))[:120]}"


def same(expected: Any, found: Any) -> bool:
    """Equal in value and in kind of container; floats up to rounding, and 1 is neither True nor 1.5."""
    if isinstance(expected, float) or isinstance(found, float):
        return _is_number(expected) and _is_number(found) and math.isclose(expected, found, rel_tol=1e-9, abs_tol=1e-9)
    if type(expected) is not type(found):
        return False
    if isinstance(expected, list | tuple):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(same(value, found[key]) for key, value in expected.items())
    return bool(expected == found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class CaseTests:
    """A list of cases; each case plays its steps on fresh objects."""

    cases: tuple[tuple[Step, ...], ...]

    async def verify(self, ctx: VerifierContext, module: str, *, python: str, timeout_s: float) -> Verdict:
        """Full score when every step of every case is right."""
        questions: list[Steps] = [[step.question() for step in case] for case in self.cases]
        try:
            answers = await ask(ctx, module, questions, python=python, timeout_s=timeout_s)
        except NoAnswers as error:
            return Verdict.of([str(error)])
        return Verdict.of(await asyncio.to_thread(self._failures, answers))

    def _failures(self, answers: list[list[Answer]]) -> list[str]:
        pairs = [
            pair for case, given in zip(self.cases, answers, strict=True) for pair in zip(case, given, strict=True)
        ]
        return [sentence for step, answer in pairs if (sentence := step.failure(answer)) is not None]

    def contradicted(self) -> CaseTests | None:
        """With one case twice, the second time with another result; None when no case checks a result."""
        for case in self.cases:
            if case[-1].returns is not UNCHECKED:
                other = replace(case[-1], returns=["not", case[-1].returns])
                return CaseTests((*self.cases, (*case[:-1], other)))
        return None


def parse_cases(data: Sequence[Mapping[str, Any]]) -> tuple[tuple[Step, ...], ...]:
    """Cases as they stand in a problem file; ValueError names what is wrong."""
    return tuple(tuple(map(parse_step, case.get("steps", [case]))) for case in data)


def parse_step(data: Mapping[str, Any]) -> Step:
    """One step: exactly one of call, new, get, and at most one of returns, raises."""
    if unknown := sorted(set(data) - {"call", "new", "get", "args", "kwargs", "as", "returns", "args_after", "raises"}):
        raise ValueError(f"unknown key {unknown[0]!r} in a test step")
    (op, *more) = [key for key in ("call", "new", "get") if key in data] or [""]
    if more or not op:
        raise ValueError("a test step has exactly one of call, new, get")
    if "returns" in data and "raises" in data:
        raise ValueError("a test step has returns or raises, not both")
    return Step(
        op,
        data[op],
        tuple(data.get("args", ())),
        data.get("kwargs", {}),
        data.get("as"),
        data.get("returns", UNCHECKED),
        data.get("args_after", UNCHECKED),
        data.get("raises"),
    )


JUDGE_TIMEOUT_S = 300.0
"""Far above the CPU time that a judge may take: only tests that wait for something reach it."""
MAX_ROUNDS = 20
MAX_RECORDED = 2000


class BadTests(RuntimeError):
    """The tests cannot be run, or not on their own reference solution: a fault of the dataset, never a score."""


class JudgeDied(Exception):
    """The tests ended their process or used up its limits."""


@dataclass(frozen=True)
class CodeTests:
    """A reference solution and test code for it."""

    reference: str
    test: str
    entry_point: str
    seed: int = 0
    """For tests that draw random numbers."""

    async def verify(self, ctx: VerifierContext, module: str, *, python: str, timeout_s: float) -> Verdict:
        """Full score when the test code passes on the solution's answers."""
        calls = await self.record()
        for _ in range(MAX_ROUNDS):
            try:
                answers = await ask(
                    ctx, module, [self._question(call) for call in calls], python=python, timeout_s=timeout_s
                )
            except NoAnswers as error:
                return Verdict.of([str(error)])
            try:
                ruling = await self._judge(
                    {"mode": "replay", "calls": calls, "answers": [given[0] for given in answers]}
                )
            except (JudgeDied, RecursionError) as error:
                # The reference's answers pass within the limits, so these answers are not right.
                return Verdict.of([str(error)])
            if "need" not in ruling:
                return Verdict.of([str(ruling["failed"])] if "failed" in ruling else [])
            # The answers led the tests to other questions than the reference's answers did: ask those too.
            calls = ruling["need"]
        return Verdict.of([f"the tests still have new questions after {MAX_ROUNDS} rounds"])

    async def record(self) -> list[dict[str, Any]]:
        """The calls that the tests make; raises BadTests when they make none or fail on the reference."""
        if self not in _RECORDED:
            try:
                calls: list[dict[str, Any]] = (await self._judge({"mode": "record"}))["calls"]
            except JudgeDied as error:
                raise BadTests(str(error)) from error
            if not calls:
                raise BadTests(f"the tests of {self.entry_point} never call it")
            if len(_RECORDED) >= MAX_RECORDED:
                _RECORDED.clear()
            _RECORDED[self] = calls
        return _RECORDED[self]

    def _question(self, call: dict[str, Any]) -> Steps:
        return [{"op": "call", "target": self.entry_point, "bind": None, **call}]

    async def _judge(self, request: dict[str, Any]) -> dict[str, Any]:
        request |= {"reference": self.reference, "test": self.test, "entry_point": self.entry_point, "seed": self.seed}
        request["codec"] = solver_source()
        with as_file(files("environments.code_tasks") / "judge.py") as judge, tempfile.TemporaryDirectory() as empty:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(judge),
                cwd=empty,
                env={},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(json.dumps(request).encode()), JUDGE_TIMEOUT_S)
            except TimeoutError as error:
                # With answers of the reference they ended: what makes them wait is in these.
                fault = JudgeDied if request["mode"] == "replay" else BadTests
                raise fault(f"the tests of {self.entry_point} take longer than {JUDGE_TIMEOUT_S:g} s") from error
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode != 0:
            lines = err.decode(errors="replace").strip().splitlines() or ["no message"]
            raise JudgeDied(f"the tests of {self.entry_point} do not run: {lines[-1][:200]}")
        ruling: dict[str, Any] = json.loads(out)
        return ruling


_RECORDED: dict[CodeTests, list[dict[str, Any]]] = {}
"""Calls recorded before, since many rollouts share their tests. Tests are frozen, so entries never go stale."""
