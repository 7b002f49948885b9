"""Results are valid JSON and valid UTF-8, whatever is in them."""

import json

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tools.output import dump

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text(alphabet="a\ud800\udfff\x00é\n"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(values)
def test_every_value_becomes_json_that_can_be_sent(value):
    text = dump(value)
    json.loads(text.encode("utf-8"))


@given(st.dictionaries(st.text(), st.text(alphabet=st.characters(blacklist_categories=("Cs",)))))
def test_ordinary_values_come_back_as_they_were(value):
    assert json.loads(dump(value)) == value


def test_text_stays_readable():
    assert dump({"a": "é\n漢"}) == '{"a": "é\\n漢"}'


def test_numbers_that_json_does_not_have_become_null():
    assert json.loads(dump({"a": float("nan"), "b": [float("inf")]})) == {"a": None, "b": [None]}


def test_lone_surrogates_are_replaced():
    assert json.loads(dump({"a": "x\ud800y"})) == {"a": "x?y"}
