"""Hidden tests as data: steps with what they must return or raise. Compared on the host, value by value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.code_tasks.answers import Answer, NoAnswers, Steps, ask
from environments.code_tasks.solver import decode, encode
from environments.scoring.verification import Verdict, VerifierContext

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
        pairs = [
            pair for case, given in zip(self.cases, answers, strict=True) for pair in zip(case, given, strict=True)
        ]
        return Verdict.of([sentence for step, answer in pairs if (sentence := step.failure(answer)) is not None])


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
