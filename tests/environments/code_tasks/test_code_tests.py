"""Test code of datasets: recorded on the reference, replayed on answers, never run beside the model's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.code_tasks.hidden_tests import BadTests, CodeTests
from environments.scoring.verification import Verdict
from support.local_context import LocalContext

DOUBLE = "def double(x):\n    return 2 * x\n"


async def verdict(tests: CodeTests, solution: str, root: Path) -> Verdict:
    ctx = LocalContext(root)
    await ctx.write_file("s.py", solution.encode())
    return await tests.verify(ctx, "s.py", python="python3", timeout_s=20)


async def test_a_check_function_is_called_once_whether_or_not_the_tests_call_it(tmp_path: Path) -> None:
    body = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate('a') == 'aa'\n"
    for test in (body, body + "check(double)\n"):
        tests = CodeTests(DOUBLE, test, "double")
        assert len(await tests.record()) == 2
        assert await verdict(tests, DOUBLE, tmp_path) == Verdict(1.0)
        wrong = await verdict(tests, "def double(x):\n    return x + 2\n", tmp_path)
        assert wrong.score == 0.0
        assert "TypeError" in wrong.failures[0]


async def test_questions_that_depend_on_answers_are_asked_too(tmp_path: Path) -> None:
    """Any divisor is right, so the second question differs between right solutions."""
    reference = "def divisor(n):\n    return 2 if n % 2 == 0 else n\n"
    test = "def check(c):\n    d = c(12)\n    assert 12 % d == 0\n    e = c(d)\n    assert d % e == 0\n"
    tests = CodeTests(reference, test, "divisor")
    assert await verdict(tests, "def divisor(n):\n    return n // 2 if n % 2 == 0 else 1\n", tmp_path) == Verdict(1.0)
    assert (await verdict(tests, "def divisor(n):\n    return 5\n", tmp_path)).score == 0.0


async def test_random_inputs_are_the_same_for_reference_and_solution(tmp_path: Path) -> None:
    reference = "import random\ndef pick(n):\n    random.random()\n    return n\n"
    body = "    for _ in range(5):\n        n = random.randint(0, 10**9)\n        assert c(n) == n\n"
    test = f"import random\ndef check(c):\n{body}"
    tests = CodeTests(reference, test, "pick", seed=3)
    assert await tests.record() == await tests.record()
    assert await verdict(tests, "def pick(n):\n    return n\n", tmp_path) == Verdict(1.0)


async def test_tests_can_expect_exceptions(tmp_path: Path) -> None:
    reference = "def root(x):\n    if x < 0:\n        raise ValueError(x)\n    return x ** 0.5\n"
    test = "def check(c):\n    try:\n        c(-1)\n    except ValueError:\n        return\n    assert False\n"
    tests = CodeTests(reference, test, "root")
    mine = "class Mine(ValueError): pass\ndef root(x):\n    raise Mine('no')\n"
    assert await verdict(tests, mine, tmp_path) == Verdict(1.0)
    assert (await verdict(tests, "def root(x):\n    raise KeyError(x)\n", tmp_path)).score == 0.0
    assert (await verdict(tests, "def root(x):\n    return 1\n", tmp_path)).score == 0.0


async def test_an_answer_that_exhausts_the_judge_is_wrong_and_hurts_nobody(tmp_path: Path) -> None:
    test = "def check(c):\n    assert len('x' * c(3)) == 6\n"
    greedy = "def double(x):\n    return 10**13\n"
    assert (await verdict(CodeTests(DOUBLE, test, "double"), greedy, tmp_path)).score == 0.0


async def test_a_solution_cannot_stop_the_tests_by_what_it_raises(tmp_path: Path) -> None:
    test = "def check(c):\n    assert c(1) == 2\n"
    tests = CodeTests(DOUBLE, test, "double")
    for name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException"):
        assert (await verdict(tests, f"def double(x):\n    raise {name}(0)\n", tmp_path)).score == 0.0


@pytest.mark.parametrize(
    ("reference", "test", "sentence"),
    [
        (DOUBLE, "def check(c):\n    pass\n", "never call it"),
        (DOUBLE, "def check(c):\n    assert c(1) == 3\n", "AssertionError"),
        ("def double(x:\n", "def check(c):\n    c(1)\n", "SyntaxError"),
        (DOUBLE, "import os\nos._exit(3)\n", "do not run"),
    ],
)
async def test_tests_that_fail_their_own_reference_are_a_fault_not_a_score(
    reference: str, test: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(BadTests, match=sentence):
        await verdict(CodeTests(reference, test, "double"), DOUBLE, tmp_path)


async def test_the_judge_can_write_no_file(tmp_path: Path) -> None:
    target = tmp_path / "written"
    test = f"def check(c):\n    c(1)\n    with open({str(target)!r}, 'w') as f: f.write('x' * 100)\n"
    with pytest.raises(BadTests):
        await CodeTests(DOUBLE, test, "double").record()
    assert not target.exists() or target.stat().st_size == 0
