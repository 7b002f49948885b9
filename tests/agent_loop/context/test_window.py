"""Truncation: the view fits or overflows, the head stays, pairs go together, and nothing depends on chance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.context.strategies import (
    DropOldest,
    ShortenOldResults,
    ShortenRecent,
    build_view,
    estimate,
    estimate_tools,
    head_length,
)
from agent_loop.context.window import ContextOverflow, ContextPolicy, ContextWindow
from agent_loop.model.contract import Message, ModelTurn, ToolSchema
from support.loop_servers import ScriptedConversation, ScriptedServer, assert_paired, says, tool


def pair(number: int, results: Sequence[str]) -> list[Message]:
    """An assistant message with one call per result, and the results."""
    ids = [f"c{number}-{i}" for i in range(len(results))]
    made = [{"id": i, "type": "function", "function": {"name": "terminal", "arguments": "{}"}} for i in ids]
    replies = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in zip(ids, results, strict=True)]
    return [{"role": "assistant", "content": f"step {number}", "tool_calls": made}, *replies]


def history(turns: int, chars: int = 2000) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": "sys"}, {"role": "user", "content": "task"}]
    for number in range(turns):
        messages += pair(number, ["x" * chars])
    return messages


class Counting(ScriptedServer):
    """A server with an exact counter (one token per character), which remembers what it was asked to count."""

    def __init__(self) -> None:
        super().__init__(says("a summary"), repeat=True)
        self.counted: list[int] = []

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int | None:
        self.counted.append(len(messages))
        return sum(len(json.dumps(message)) for message in messages) + len(json.dumps(list(tools)))


async def fit(messages: list[Message], server: ScriptedServer | None = None, **policy: Any) -> Any:
    """Truncate a conversation once; the report (or None) and the view the conversation then has."""
    server = server or ScriptedServer()
    conversation = ScriptedConversation(server, messages)
    window = ContextWindow(ContextPolicy(**policy), server, conversation, [tool()], messages)
    report = await window.fit()
    return report, conversation.view


async def test_a_prompt_that_fits_is_left_alone():
    report, view = await fit(history(3), max_tokens=100_000)
    assert report is None
    assert view == history(3)


async def test_old_results_are_shortened_before_anything_is_dropped():
    messages = history(10)
    report, view = await fit(messages, max_tokens=4500, low_water=0.8)
    assert report["dropped_messages"] == 0
    assert report["shortened_results"] > 0
    assert len(view) == len(messages)
    assert len(view[3]["content"]) < 700
    assert view[-1] == messages[-1]


async def test_oldest_pairs_are_dropped_together_when_shortening_is_not_enough():
    messages = history(40, chars=500)
    report, view = await fit(messages, max_tokens=3000)
    assert report["dropped_messages"] > 0
    assert report["dropped_messages"] % 2 == 0
    assert view[:2] == messages[:2]
    assert view[2:] == messages[2 + report["dropped_messages"] :]
    assert_paired(view)


async def test_truncation_goes_down_to_the_low_water_mark_so_that_it_is_rare():
    messages = history(2)
    server = ScriptedServer()
    conversation = ScriptedConversation(server, messages)
    window = ContextWindow(ContextPolicy(max_tokens=8000, low_water=0.5), server, conversation, [], messages)
    truncated = 0
    for number in range(60):
        added = pair(number + 100, ["y" * 1000])
        conversation.append(added)
        window.append(added)
        truncated += await window.fit() is not None
        assert window.size() <= 8000
    assert 0 < truncated <= 6


async def test_the_protected_part_shrinks_its_results_when_it_is_too_long_by_itself():
    messages = history(0) + pair(0, ["x" * 100_000] * 4)
    report, view = await fit(messages, max_tokens=5000)
    assert report["shortened_results"] == 4
    assert_paired(view)
    assert sum(map(estimate, view)) + estimate_tools([tool()]) <= 5000


async def test_what_cannot_be_made_to_fit_is_an_overflow():
    messages = [{"role": "user", "content": "x" * 100_000}, *pair(0, ["ok"])]
    with pytest.raises(ContextOverflow, match="allowed"):
        await fit(messages, max_tokens=2000)


async def test_tool_schemas_count():
    messages = history(1, chars=10)
    base = sum(map(estimate, messages))
    with pytest.raises(ContextOverflow):
        await fit(messages, max_tokens=base + 5)


def test_list_content_and_images_count():
    parts = [{"type": "text", "text": "x" * 400}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    assert estimate({"role": "user", "content": parts}) > 1000
    assert estimate({"role": "user", "content": [{"type": "text", "text": "x" * 400}]}) >= 100


async def test_the_tokenizer_decides_when_there_is_one():
    messages = history(10, chars=2000)
    report, view = await fit(messages, Counting(), max_tokens=9000)
    assert report["tokens_before"] > 20_000
    assert report["tokens_after"] == sum(len(json.dumps(m)) for m in view) + len(json.dumps([tool()]))
    assert report["tokens_after"] <= 9000


async def test_a_turn_counts_only_what_it_added():
    server = Counting()
    messages = history(2, chars=100)
    conversation = ScriptedConversation(server, messages)
    window = ContextWindow(ContextPolicy(max_tokens=10_000_000), server, conversation, [], messages)
    for number in range(50):
        added = pair(number, ["y" * 100])
        window.append(added)
        await window.fit()
    assert server.counted == [len(messages)] + [2] * 50


async def test_the_servers_own_prompt_length_replaces_the_estimate():
    messages = history(1)
    server = ScriptedServer()
    window = ContextWindow(
        ContextPolicy(max_tokens=10**6), server, ScriptedConversation(server, messages), [], messages
    )
    window.sampled(ModelTurn("ok", prompt_tokens=12_345, sampled_tokens=5), {"role": "assistant", "content": "ok"})
    assert window.size() == 12_350


@pytest.mark.parametrize(
    ("roles", "head"),
    [
        (["system", "user", "assistant"], 2),
        (["user", "assistant", "tool"], 1),
        (["system", "system", "user"], 3),
        (["assistant", "user"], 0),
        (["system", "assistant"], 1),
        ([], 0),
    ],
)
def test_the_head_is_whatever_leads_up_to_the_first_user_message(roles, head):
    assert head_length([{"role": role, "content": ""} for role in roles]) == head


def test_protection_is_rounded_up_to_whole_units():
    view = build_view(history(0) + pair(0, ["a"] * 10) + pair(1, ["b"]), 2, 3, 0)
    assert view.recent == 2
    assert len(view.units[0].messages) == 11


def test_policies_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="low_water"):
        ContextPolicy(low_water=0)
    with pytest.raises(ValueError, match="max_context_tokens"):
        ContextPolicy(max_tokens=0)


RESULTS = st.lists(st.integers(0, 4000), min_size=1, max_size=4)
STEP = st.tuples(st.booleans(), RESULTS)


def _build(steps: list[tuple[bool, list[int]]], system: bool) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": "s" * 50}] if system else []
    messages.append({"role": "user", "content": "the task"})
    for number, (follow_up, sizes) in enumerate(steps):
        messages += pair(number, [json.dumps({"output": "x" * size}) for size in sizes])
        if follow_up:
            messages.append({"role": "user", "content": f"follow up {number}"})
    return messages


@given(
    steps=st.lists(STEP, max_size=15),
    system=st.booleans(),
    limit=st.integers(50, 6000),
    exact=st.booleans(),
    keep_recent=st.integers(0, 8),
    drop_only=st.booleans(),
)
async def test_a_view_fits_or_overflows_and_keeps_head_pairs_and_order(
    steps, system, limit, exact, keep_recent, drop_only
):
    messages = _build(steps, system)
    strategies = (DropOldest(),) if drop_only else (ShortenOldResults(), DropOldest(), ShortenRecent())
    policy: dict[str, Any] = {"max_tokens": limit, "keep_recent": keep_recent, "strategies": strategies}

    def server() -> ScriptedServer:
        return Counting() if exact else ScriptedServer()

    before = json.dumps(messages)
    try:
        report, view = await fit(messages, server(), **policy)
    except ContextOverflow:
        with pytest.raises(ContextOverflow):
            await fit(messages, server(), **policy)
        return
    assert json.dumps(messages) == before, "the trajectory itself is never edited"
    assert (report, view) == await fit(messages, server(), **policy), "the same input gives the same view"
    counted = server().count_tokens(view, [tool()])
    size = sum(map(estimate, view)) + estimate_tools([tool()]) if counted is None else counted
    assert size <= limit
    head = head_length(messages)
    assert view[:head] == messages[:head]
    assert_paired(view)
    dropped = len(messages) - len(view)
    kept = messages[head + dropped :]
    assert [m["role"] for m in view[head:]] == [m["role"] for m in kept]
    for now, original in zip(view[head:], kept, strict=True):
        if now["role"] == "tool":
            json.loads(now["content"])
        else:
            assert now == original
