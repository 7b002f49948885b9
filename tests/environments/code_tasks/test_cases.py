from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.code_tasks.hidden_tests import CaseTests, NoAnswers, Step, _shaped, parse_step, same
from environments.code_tasks.solver import MAX_DEPTH, NotPlain, decode, encode
from environments.scoring.verification import Verdict

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(PLAIN)
def test_plain_data_survives_the_way_there_and_back(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert found == value
    assert type(found) is type(value)
    assert same(value, found)


@pytest.mark.parametrize("value", [object(), len, (i for i in ()), [object()], {"a": {1: type}}])
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode(value)


def test_endless_nesting_is_refused_on_both_ways() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotPlain, match="deep"):
        encode(loop)
    deep: Any = 1
    for _ in range(3 * MAX_DEPTH):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        decode(deep)


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_decoding_strange_data_gives_a_value_or_a_value_error(data: Any) -> None:
    with contextlib.suppress(ValueError):
        decode(data)


@pytest.mark.parametrize(
    ("expected", "found", "equal"),
    [
        (1, 1, True),
        (1, True, False),
        (0, False, False),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (1.0, 1.1, False),
        ([1], (1,), False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"a": True}, False),
        ({1, 2}, {2, 1}, True),
        ("1", 1, False),
        (None, False, False),
        (10**30, 10**30 + 1, False),
        (math.inf, math.inf, True),
    ],
)
def test_equality_knows_kinds_and_rounding(expected: Any, found: Any, equal: bool) -> None:
    assert same(expected, found) is equal


@pytest.mark.parametrize(
    ("step", "answer", "sentence"),
    [
        ({"call": "f", "returns": 1}, {"returns": 1}, None),
        ({"call": "f", "returns": 1}, {"returns": 2}, "returns 2, not 1"),
        ({"call": "f", "returns": None}, {"returns": 0}, "not None"),
        ({"call": "f"}, {"returns": 5}, None),
        ({"call": "f"}, {"raises": ["KeyError"], "message": "k"}, "raises KeyError: k"),
        ({"call": "f", "raises": "ValueError"}, {"raises": ["Mine", "ValueError", "Exception"]}, None),
        ({"call": "f", "raises": "ValueError"}, {"returns": None}, "does not raise ValueError"),
        ({"call": "f", "returns": 1}, {"odd": "a value of type g"}, "returns a value of type g"),
        ({"call": "f", "returns": 1}, {"returns": {"t": "nope", "v": 1}}, "unreadable"),
        ({"call": "f", "args": [[1]], "args_after": [[2]]}, {"returns": None, "args_after": [[2]]}, None),
        ({"call": "f", "args": [[1]], "args_after": [[1]]}, {"returns": None, "args_after": [[2]]}, "leaves its arg"),
        ({"call": "f", "args_after": [[1]]}, {"returns": None}, "leaves its arguments"),
    ],
)
def test_an_answer_is_right_or_the_failure_says_why(step: dict, answer: dict, sentence: str | None) -> None:
    failure = parse_step(step).failure(answer)
    assert failure is None if sentence is None else sentence in (failure or "")


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ({"call": "f", "new": "g"}, "exactly one"),
        ({"args": []}, "exactly one"),
        ({"call": "f", "returns": 1, "raises": "E"}, "not both"),
        ({"call": "f", "return": 1}, "unknown key 'return'"),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(step: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_step(step)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"[[]]",
        b"[[1]]",
        b'[[{"raises": "E"}]]',
        b'[[{"raises": [], "message": ""}]]',
        b'[[{"raises": [1], "message": ""}]]',
        b'[[{"returns": 1}]]',
        b'[[{"returns": 1, "args_after": [], "raises": ["ValueError"], "message": ""}]]',
        b'[[{"returns": 1, "args_after": [], "odd": "x"}]]',
        b'[[{"returns": 1}, {"returns": 1}]]',
        b"[" * 100_000,
    ],
)
def test_answers_of_another_shape_are_no_answers(data: bytes) -> None:
    with pytest.raises(NoAnswers):
        _shaped(data.decode(), [[{"op": "call"}]], "m.py")


async def test_a_missing_module_is_named(tmp_path: Any) -> None:
    from support.local_context import LocalContext

    tests = CaseTests(((Step("call", "f"),),))
    verdict = await tests.verify(LocalContext(tmp_path), "m.py", python="python3", timeout_s=5)
    assert verdict == Verdict(0.0, ("m.py is missing",))
