"""transformers' `response_template` as a source of formats."""

from __future__ import annotations

from typing import Any

import pytest

from tool_parsers import get_parser
from tool_parsers.response_template import UnsupportedTemplate

HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}


def fallbacks() -> list[dict[str, Any]]:
    serving = pytest.importorskip("transformers.cli.serving.utils")
    found = getattr(serving, "_RESPONSE_TEMPLATE_FALLBACKS", None)
    if not found:
        pytest.skip("this transformers has no built-in response templates")
    return list(found.values())


def test_a_template_becomes_a_parser() -> None:
    text = '<think>hm</think>Hi\n<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call><|im_end|>'
    result = get_parser(response_template=HERMES).parse(text)
    assert (result.reasoning, result.content, result.trailing) == ("hm", "Hi", "")
    assert result.calls[0].arguments == {"a": "</tool_call>"}


def test_a_broken_call_does_not_lose_the_message() -> None:
    result = get_parser(response_template=HERMES).parse(
        'Hi<tool_call>{bad}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    assert [call.name for call in result.good_calls] == ["g"]
    assert result.errors


def test_keys_of_the_call_object_come_from_the_transform() -> None:
    template = {
        "fields": {
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{params}"}},
            }
        }
    }
    text = '<|START_ACTION|>[{"tool": "f", "params": {"a": 1}}]<|END_ACTION|>'
    assert get_parser(response_template=template).parse(text).calls[0].arguments == {"a": 1}


def test_the_templates_built_into_transformers_are_read() -> None:
    hermes, xml, gemma = (get_parser(response_template=template) for template in fallbacks())
    assert hermes.parse('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>').calls[0].arguments == {"a": 1}
    text = "<tool_call>\n<function=f>\n<parameter=a>\n x </parameter> \n</parameter>\n</function>\n</tool_call>"
    assert xml.parse(text).calls[0].arguments == {"a": " x </parameter> "}
    call = '<|tool_call>call:f{a:<|"|>x<tool_call|>y<|"|>,b:[1,{c:true}]}<tool_call|>'
    assert gemma.parse(call).calls[0].arguments == {"a": "x<tool_call|>y", "b": [1, {"c": True}]}
    assert not gemma.parse('<|tool_call>call:f{a:<|"|>x').calls[0].ok


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fields": {}}, "fields"),
        ({"fields": {"tool_calls": {"open": "<a>", "close": "</a>", "content": "kv-lines"}}}, "kv-lines"),
        ({"fields": {"tool_calls": {"open": "<a>", "close_pattern": "</a+>", "content": "json"}}}, "plain marker"),
        ({"fields": {"thinking": {"close": "</a>"}}}, "open"),
        ({"fields": {"tool_calls": {"open": "<a>", "close": "</a>", "content": "xml-inline"}}}, "xml-inline"),
    ],
)
def test_what_cannot_be_expressed_is_refused_when_loaded(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedTemplate, match=said):
        get_parser(response_template={**HERMES, **change})
