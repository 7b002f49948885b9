"""A template's behaviour is found by rendering probes, whatever the template is called."""

from __future__ import annotations

import pytest

from agent_loop.local_models.standin import chatml_tokenizer
from agent_loop.local_models.standin.chatml import chatml_template
from agent_loop.model.tokens.probe import probe_template
from agent_loop.model.tokens.template import REMEMBERED_PROMPTS, TemplateRefused

TOOLS = [{"type": "function", "function": {"name": "t", "description": "d", "parameters": {}}}]
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "t", "content": "out"}
USER = {"role": "user", "content": "hi"}
START, END, TEXT_END = 1, 2, 0

HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"


def chatml_like(
    assistant: str, tool: str, tail: str = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
):
    return (
        HEAD
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + assistant
        + "{% elif m.role == 'tool' %}"
        + tool
        + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + tail
    )


def probe(template: str, **options):
    return probe_template(chatml_tokenizer(), template, **options)


def test_the_shipped_template_has_plain_traits():
    traits = probe_template(chatml_tokenizer()).traits
    assert (traits.glue, traits.call_end, traits.answer_end) == ("local", "<|im_end|>", "<|im_end|>")
    assert traits.tools
    assert traits.schemas
    assert traits.merged_results
    assert traits.prompt_after_results
    assert traits.prefix_stable
    assert traits.thinking == "kept"
    assert traits.role_marker_ends == ()
    assert not traits.schemas_in_glue


def test_a_stop_token_that_opens_the_next_message_is_written_once():
    template = probe(
        HEAD
        + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
        + CALLS
        + "{% elif m.role == 'tool' %}<|endoftext|>{{ m.content }}"
        + "{% else %}<|im_end|>{{ m.content }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert set(template.traits.role_marker_ends) == {"<|endoftext|>", "<|im_end|>"}
    after_marker = template.glue_ids([], [RESULT], TOOLS, TEXT_END)
    after_other_stop = template.glue_ids([], [RESULT], TOOLS, END)
    cut_short = template.glue_ids([], [RESULT], TOOLS, 77)
    assert TEXT_END not in after_marker
    assert after_other_stop == cut_short == [TEXT_END, *after_marker]


def test_another_stop_token_takes_the_place_of_the_turns_own_end():
    template = probe_template(chatml_tokenizer(), stop_ids=[TEXT_END])
    assert template.glue_ids([], [RESULT], TOOLS, TEXT_END) == template.glue_ids([], [RESULT], TOOLS, END)


def test_a_turn_cut_short_gets_its_end_written():
    template = probe_template(chatml_tokenizer())
    ended = template.glue_ids([], [RESULT], TOOLS, END)
    assert template.glue_ids([], [RESULT], TOOLS, 77) == [END, *ended]
    assert template.glue_ids([], [RESULT], TOOLS, None) == [END, *ended]


def test_a_missing_generation_prompt_after_results_is_seen():
    traits = probe(
        chatml_like(
            "<|im_start|>assistant\n{{ m.content }}" + CALLS + "<|im_end|>\n",
            "<tool_response>{{ m.content }}</tool_response>",
            "{% if add_generation_prompt and messages[-1].role == 'user' %}<|im_start|>assistant\n{% endif %}",
        )
    ).traits
    assert not traits.prompt_after_results
    assert not traits.merged_results


def test_arguments_wanted_as_text_are_given_as_text():
    traits = probe(
        chatml_like(
            "<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.arguments.strip() }}{% endfor %}<|im_end|>\n",
            "<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        )
    ).traits
    assert traits.shape.arguments == "string"


def test_a_template_that_takes_one_call_per_turn_still_continues_several_results():
    template = probe(
        chatml_like(
            "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
            "<|im_start|>assistant\n{{ m.content }}" + CALLS + "<|im_end|>\n",
            "<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        )
    )
    assert not template.traits.shape.parallel_calls
    text = template.decode(template.glue_ids([], [RESULT, RESULT | {"content": "two"}], TOOLS, END))
    assert text.count("<|im_start|>tool") == 2


def test_glue_that_depends_on_earlier_turns_is_worked_out_from_all_of_them():
    template = probe(
        chatml_like(
            "<|im_start|>assistant\n{{ m.content }}" + CALLS + "<|im_end|>\n",
            "<|im_start|>tool {{ loop.index }}\n{{ m.content }}<|im_end|>\n",
        )
    )
    assert template.traits.glue == "whole"
    first = template.decode(template.glue_ids([USER], [RESULT], TOOLS, END))
    later = template.decode(template.glue_ids([USER] * 5, [RESULT], TOOLS, END))
    assert "tool 3" in first
    assert "tool 7" in later


def test_schemas_that_results_are_written_by_are_rendered_with_every_turn():
    said = "<|im_start|>tool of {{ tools | length }}\n{{ m.content }}<|im_end|>\n"
    template = probe(chatml_like("<|im_start|>assistant\n{{ m.content }}" + CALLS + "<|im_end|>\n", said))
    assert (template.traits.glue, template.traits.schemas_in_glue) == ("local", True)
    glue = template.decode(template.glue_ids([], [RESULT], [*TOOLS, *TOOLS], END))
    assert "tool of 2\nout" in glue


def test_a_prompt_that_many_rollouts_share_is_rendered_once_and_each_has_its_own():
    template = probe_template(chatml_tokenizer())
    one, other = (template.prompt_ids([USER], TOOLS) for _ in range(2))
    one.append(START)
    assert template.prompt_ids([USER], TOOLS) == other == one[:-1]
    assert template.prompt_ids([USER], []) != other
    prompts = [[{"role": "user", "content": f"task {number}"}] for number in range(3 * REMEMBERED_PROMPTS)]
    fresh = probe_template(chatml_tokenizer())
    for messages in prompts:
        assert template.prompt_ids(messages, TOOLS) == fresh.encode(fresh.prompt_text(messages, TOOLS))


def test_stripped_thinking_and_unstable_rendering_are_told():
    last_only = "{% if m.reasoning_content and not loop.last and messages[loop.index0 + 1].role == 'tool' "
    last_only += "and loop.index0 + 2 >= messages | length %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    traits = probe(
        chatml_like(
            "<|im_start|>assistant\n" + last_only + "{{ m.content }}" + CALLS + "<|im_end|>\n",
            "<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        )
    ).traits
    assert traits.thinking == "stripped"
    assert not traits.prefix_stable


def test_a_prompt_that_opens_the_thinking_block_is_told():
    traits = probe(
        chatml_template().replace(
            "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
        )
    ).traits
    assert traits.starts_in_thinking


def test_call_ids_that_must_be_short_are_shortened():
    short = (
        "{% if m.tool_calls and m.tool_calls[0].id | length != 9 %}{{ raise_exception('ids are 9 long') }}{% endif %}"
    )
    template = probe(
        chatml_like(
            short + "<|im_start|>assistant\n{{ m.content }}" + CALLS + "<|im_end|>\n",
            "<|im_start|>tool {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>\n",
        )
    )
    result = RESULT | {"tool_call_id": "call_of_any_length"}
    assert "out" in template.decode(template.glue_ids([], [result], TOOLS, END))


@pytest.mark.parametrize(
    ("assistant", "tool", "trait"),
    [
        ("<|im_start|>assistant\n{{ m.content }}<|im_end|>\n", "{{ m.content }}", "writes no tool calls"),
        ("<|im_start|>assistant\n{{ m.content }}" + CALLS + "<|im_end|>\n", "", "writes no tool results"),
        (
            "{% if m.tool_calls %}{{ raise_exception('no tools, please') }}{% endif %}{{ m.content }}<|im_end|>",
            "",
            "no tools, please",
        ),
    ],
)
def test_a_template_without_tools_is_refused_with_tools_and_names_why(assistant, tool, trait):
    template = probe(chatml_like(assistant, tool))
    assert not template.traits.tools
    with pytest.raises(TemplateRefused, match=trait):
        template.prompt_ids([USER], TOOLS)
    assert template.glue_ids([], [USER], [], END)


def test_a_template_that_writes_no_schemas_says_where_they_belong():
    template = probe(
        chatml_like(
            "<|im_start|>assistant\n{{ m.content }}" + CALLS + "<|im_end|>\n",
            "<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        ).removeprefix(HEAD)
    )
    assert template.traits.tools
    with pytest.raises(TemplateRefused, match="put them into the system prompt"):
        template.prompt_ids([USER], TOOLS)


def test_a_template_whose_turns_end_in_no_token_is_refused():
    with pytest.raises(TemplateRefused, match="no special token"):
        probe("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}")


def test_a_template_that_loses_what_follows_is_refused():
    lossy = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    with pytest.raises(TemplateRefused, match="loses content"):
        probe(lossy + "<|im_start|>")


def test_a_template_with_a_fault_of_its_own_is_refused_in_its_own_words():
    with pytest.raises(TemplateRefused, match="functions"):
        probe("{{ functions.x }}")
