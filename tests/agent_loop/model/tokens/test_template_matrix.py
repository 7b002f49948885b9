"""Seventy published templates on real tokenizers: each is exact or refused by name, none is silently wrong."""

from __future__ import annotations

from random import Random

import pytest

from agent_loop.model.tokens.probe import probe_template
from agent_loop.model.tokens.template import ChatTemplate, TemplateRefused
from support import template_table
from support.template_cases import TOKENIZERS, TemplateCase, template_cases
from support.template_play import Play

CONVERSATIONS, TURNS = 3, 6


def bound(case: TemplateCase, family: str | None = None) -> ChatTemplate | None:
    """The template on a tokenizer; None when it is refused for tools."""
    try:
        template = probe_template(case.tokenizer(family), case.source)
    except TemplateRefused:
        return None
    return template if template.traits.tools else None


async def played(template: ChatTemplate, seed: str, conversations: int) -> Play:
    play = Play(template, Random(seed))
    for _ in range(conversations):
        await play.conversation(TURNS)
    return play


@pytest.mark.ci
@pytest.mark.timeout(300)
async def test_at_least_52_templates_are_exact_over_random_conversations_and_none_is_wrong():
    exact, wrong, rerendered = [], {}, 0
    for case in template_cases():
        template = bound(case)
        if template is None:
            continue
        seen = (await played(template, case.name, CONVERSATIONS)).seen
        rerendered += seen.rerendered
        if seen.differences:
            wrong[case.name] = seen.differences[0]
        else:
            exact.append(case.name)
    assert wrong == {}
    assert len(exact) >= 52
    assert rerendered > 200, "the re-rendering oracle was hardly ever asked"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", TOKENIZERS)
async def test_the_verdict_is_the_same_on_every_tokenizer(family):
    for case in template_cases():
        template = bound(case, family)
        if template is not None:
            seen = (await played(template, f"{family} {case.name}", 10)).seen
            assert seen.differences == [], case.name


def test_the_documented_table_is_true():
    assert template_table.written() == template_table.markdown(template_table.rows())


def test_refused_templates_name_their_trait():
    reasons = {}
    for case in template_cases():
        try:
            traits = probe_template(case.tokenizer(), case.source).traits
        except TemplateRefused as refused:
            reasons[case.name] = str(refused)
            continue
        if not traits.tools:
            reasons[case.name] = traits.no_tools_because
    assert len(reasons) <= 13
    assert all(reasons.values())
    assert "functions" in reasons["fireworks-ai-llama-3-firefunction-v2"]
    assert "writes no tool calls" in reasons["microsoft-Phi-3.5-mini-instruct"]


@pytest.mark.parametrize(
    ("name", "trait"),
    [
        ("GLM-4.6", lambda t: t.role_marker_ends == ("<|observation|>", "<|user|>")),
        ("deepseek-ai-DeepSeek-V3.1", lambda t: not t.prompt_after_results),
        ("mistralai-Mistral-Nemo-Instruct-2407", lambda t: t.shape.short_call_ids and not t.prompt_after_results),
        ("Qwen-Qwen2.5-7B-Instruct", lambda t: t.merged_results and t.prefix_stable),
        ("meetkai-functionary-medium-v3.2", lambda t: t.shape.arguments == "string"),
        ("meta-llama-Llama-3.1-8B-Instruct", lambda t: not t.shape.parallel_calls),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", lambda t: t.glue == "whole"),
        ("MiniMax-M2", lambda t: t.starts_in_thinking),
        ("openai-gpt-oss-120b", lambda t: (t.call_end, t.answer_end) == ("<|call|>", "<|end|>")),
        ("Qwen-QwQ-32B", lambda t: not t.prefix_stable),
    ],
)
def test_known_peculiarities_are_found(name, trait):
    case = next(c for c in template_cases() if c.name == name)
    assert trait(probe_template(case.tokenizer(), case.source).traits)
