"""Hidden tests as code, the way HumanEval and its kin write them: a `check(candidate)` full of asserts.

The tests run on the host in a limited child process (judge.py) and ask the sandbox only for answers to calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

from environments.code_tasks.answers import NoAnswers, Steps, ask, solver_source
from environments.scoring.verification import Verdict, VerifierContext

JUDGE_TIMEOUT_S = 60.0
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
                raise BadTests(f"the tests of {self.entry_point} take longer than {JUDGE_TIMEOUT_S:g} s") from error
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
