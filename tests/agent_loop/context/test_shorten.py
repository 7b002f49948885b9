"""Shortening: within the limit, head and tail kept, JSON stays JSON."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.context.result_budget import MAX_PARSED_CHARS, MIN_CHARS, level, shorten


def test_text_that_fits_is_returned_as_it_is():
    assert shorten("x" * 400, 400) == "x" * 400


def test_plain_text_keeps_head_and_tail_and_says_what_is_missing():
    text = "start" + "x" * 10_000 + "end"
    short = shorten(text, 1000, "/tmp/whole.txt")
    assert short.startswith("start")
    assert short.endswith("end")
    assert "/tmp/whole.txt" in short
    assert f"of {len(text)} characters left out" in short
    assert len(short) <= 1000


def test_json_keeps_its_structure_and_loses_the_middle_of_long_strings():
    text = json.dumps({"output": "a" * 50_000 + "z", "exit_code": 3, "error": None})
    short = json.loads(shorten(text, 2000, "/r/1"))
    assert short["exit_code"] == 3
    assert short["error"] is None
    assert short["output"].startswith("aaa")
    assert short["output"].endswith("z")
    assert "/r/1" in short["truncated"]


def test_json_that_is_long_by_structure_alone_is_wrapped():
    text = json.dumps({"matches": [[i, i] for i in range(10_000)]})
    short = shorten(text, 1000, "/r/1")
    assert len(short) <= 1000
    assert set(json.loads(short)) == {"truncated", "head", "tail"}


def test_short_strings_survive_when_one_is_huge():
    text = json.dumps({"path": "/workspace/a.txt", "content": "x" * 100_000})
    assert json.loads(shorten(text, 5000))["path"] == "/workspace/a.txt"


def test_huge_json_is_not_parsed_but_stays_valid():
    text = '{"output": "' + "x" * MAX_PARSED_CHARS + '"}'
    short = shorten(text, 10_000)
    assert len(short) <= 10_000
    assert json.loads(short)["head"].startswith('{"output"')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=2000) | st.text(alphabet='"\\\n\x00é😀', max_size=800),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=10), inner, max_size=6),
    max_leaves=20,
)


@given(data=st.dictionaries(st.text(max_size=10), JSON, max_size=6), limit=st.integers(0, 4000))
def test_valid_json_in_is_valid_json_out_and_within_the_limit(data, limit):
    short = shorten(json.dumps(data, ensure_ascii=False), limit, "/results/x.txt")
    assert isinstance(json.loads(short), dict)
    assert len(short) <= max(limit, MIN_CHARS)


@given(text=st.text(max_size=3000), limit=st.integers(0, 3000))
def test_any_text_fits_and_shortening_again_changes_nothing(text, limit):
    short = shorten(text, limit)
    assert len(short) <= max(limit, MIN_CHARS)
    assert shorten(short, limit) == short


@given(lengths=st.lists(st.integers(0, 1000), max_size=20), total=st.integers(0, 5000))
def test_level_is_the_greatest_cap_that_fits(lengths, total):
    ordered = sorted(lengths, reverse=True)
    cap = level(ordered, total)
    assert sum(min(length, cap) for length in lengths) <= total
    if ordered and cap < ordered[0]:
        assert sum(min(length, cap + 1) for length in lengths) > total
