"""Runs on the host, in a child process with limits: a dataset's own test code, with the solution's answers as data.

`record` runs the tests on the reference solution and notes every call they make; `replay` runs them again with the
answers that came back from the sandbox. The tests (code that the user chose, as trusted as the environment) run here;
the model's code never does. Expected values and reference solutions therefore never enter the sandbox.
"""

from __future__ import annotations

import ast
import builtins
import copy
import json
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

CPU_S = 20
MEMORY_BYTES = 2 * 1024**3


class Diverged(BaseException):
    """The tests ask for a call that has no answer yet. Not an Exception: no test may catch it."""


class NoSuchError(Exception):
    """Stands for an exception class that only the solution knows."""


def candidate_recording(
    reference: Callable[..., Any], calls: list[Any], encode: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The reference solution, noting its arguments; it may not disturb the tests' random numbers."""

    def candidate(*args: Any, **kwargs: Any) -> Any:
        calls.append({"args": encode(list(args)), "kwargs": encode(kwargs)})
        state = random.getstate()
        try:
            return reference(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        finally:
            random.setstate(state)

    return candidate


def candidate_replaying(
    request: dict[str, Any], encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Gives the stored answers, in order, as long as the tests ask what was asked."""
    asked, answers = request["calls"], request["answers"]
    made: list[Any] = []

    def candidate(*args: Any, **kwargs: Any) -> Any:
        call = {"args": encode(list(args)), "kwargs": encode(kwargs)}
        place = len(made)
        made.append(call)
        if place >= len(answers) or asked[place] != call:
            raise Diverged(made)
        return _give(answers[place], decode)

    return candidate


def _give(answer: dict[str, Any], decode: Callable[[Any], Any]) -> Any:
    if "returns" in answer:
        return decode(answer["returns"])
    if "odd" in answer:
        raise TypeError(f"the solution returns {answer['odd']}")
    for name in answer["raises"]:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(answer.get("message", ""))
    raise NoSuchError(answer.get("message", ""))


def run_tests(space: dict[str, Any], request: dict[str, Any], candidate: Callable[..., Any]) -> None:
    """Execute the test code; a `check` that it only defines is called with the candidate."""
    random.seed(request["seed"])
    space[request["entry_point"]] = candidate
    exec(compile(request["test"], "<tests>", "exec"), space)
    if "check" in space and not _calls_check(request["test"]):
        space["check"](candidate)


def _calls_check(test: str) -> bool:
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "check"
        for node in ast.parse(test).body
    )


def answer_request(
    request: dict[str, Any], encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> dict[str, Any]:
    """One of {"calls"}, {"passed"}, {"failed": sentence}, {"need": calls}."""
    space: dict[str, Any] = {"__name__": "reference"}
    exec(compile(request["reference"], "<reference>", "exec"), space)
    if request["mode"] == "record":
        calls: list[Any] = []
        run_tests(space, request, candidate_recording(space[request["entry_point"]], calls, encode))
        return {"calls": calls}
    try:
        run_tests(space, request, candidate_replaying(request, encode, decode))
    except Diverged as divergence:
        return {"need": divergence.args[0]}
    except Exception as error:  # noqa: BLE001 - whatever the tests raise is their verdict on the answers
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"passed": True}


def main() -> None:
    """Answer the request on stdin with one JSON object on stdout; what the tests print goes to stderr."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    request = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    codec: dict[str, Any] = {"__name__": "codec"}
    exec(compile(request["codec"], "<codec>", "exec"), codec)
    json.dump(answer_request(request, codec["encode"], codec["decode"]), out)
    out.flush()


if __name__ == "__main__":
    main()
