"""The recorder: ids are kept, glue is written once, and what failed leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent_loop.local_models.standin import chatml_tokenizer
from agent_loop.local_models.standin.chatml import chatml_template
from agent_loop.local_models.standin.policies import call
from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import ModelUnavailable, Sampling, WeightsSpan
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.model.tokens.template import TemplateRefused
from tool_parsers import Tools, get_parser

TEMPLATE = probe_template(chatml_tokenizer())
START, END = 1, 2
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "t", "description": "d", "parameters": {"type": "object"}}}]


class WholeGlue:
    """A template whose glue depends on all that came before, and what it was asked to write."""

    def __init__(self) -> None:
        self.traits = replace(TEMPLATE.traits, glue="whole")
        self.asked: list[tuple[list[Any], list[Any], list[Any], int | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(TEMPLATE, name)

    def glue_ids(self, history, pending, tools, last_id) -> list[int]:
        self.asked.append((list(history), list(pending), list(tools), last_id))
        return TEMPLATE.glue_ids(history, pending, tools, last_id)


class Spoken:
    """A parser that is told how a turn begins and with which tools."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any, Any]] = []

    def parse(self, text: str, tools: Any = "none", start: Any = "none") -> Any:
        self.told.append((text, tools, start))
        return get_parser("hermes").parse(text, tools=tools, start=start)


class Scripted:
    """A backend that samples given texts; None fails the request."""

    def __init__(self, *texts: str | None, end: Sequence[int] = (END,)) -> None:
        self.texts = list(texts)
        self.end = list(end)
        self.prompts: list[list[int]] = []
        self.stop_ids: list[int] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids, sampling, *, stop_ids=()) -> Generation:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.stop_ids = list(stop_ids)
        text = self.texts.pop(0)
        if text is None:
            raise ModelUnavailable("down")
        ids = TEMPLATE.encode(text) + self.end
        spans = (WeightsSpan("step-3", 0, 1), WeightsSpan("step-4", 1, len(ids)))
        reason = "stop" if self.end else "length"
        return Generation(ids, [-0.5] * len(ids), reason, "step-3", spans, [0.25] * len(ids))

    async def close(self) -> None:
        pass


def result(text: str, number: int = 0):
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


def recorder(backend, **options) -> Recorder:
    return Recorder(backend, TEMPLATE, get_parser("hermes"), **options)


async def test_a_turn_is_parsed_and_counted():
    text = "<think>\nhm\n</think>\n\nLet me see.\n" + call("t", {"a": 1})
    conversation = recorder(Scripted(text)).open(HELLO, TOOLS)
    expected = conversation.prompt_tokens()
    turn = await conversation.sample(Sampling())
    assert (turn.reasoning, turn.content.strip()) == ("hm", "Let me see.")
    assert [(c.name, c.raw_arguments) for c in turn.calls] == [("t", {"a": 1})]
    assert turn.raw_text == text
    assert turn.finish_reason == "stop"
    assert turn.prompt_tokens == expected
    assert turn.sampled_tokens == len(TEMPLATE.encode(text)) + 1


async def test_a_prompt_that_opens_the_thinking_block_makes_the_turn_begin_with_thinking():
    opened = chatml_template().replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")
    template = probe_template(chatml_tokenizer(), opened)
    backend = Scripted("hm\n</think>\n\nanswer")
    turn = await Recorder(backend, template, get_parser("hermes")).open(HELLO, TOOLS).sample(Sampling())
    assert TEMPLATE.decode(backend.prompts[0]).endswith("<think>\n")
    assert (turn.reasoning, turn.content) == ("hm", "answer")


async def test_malformed_markup_is_told_and_not_taken_for_an_answer():
    conversation = recorder(Scripted("<tool_call>\nnot json\n</tool_call>")).open(HELLO, TOOLS)
    turn = await conversation.sample(Sampling())
    assert any(c.error for c in turn.calls)


async def test_the_next_prompt_is_everything_before_plus_the_glue():
    backend = Scripted(call("t", {}), "done")
    conversation = recorder(backend).open(HELLO, TOOLS)
    await conversation.sample(Sampling())
    conversation.append([result("out")])
    await conversation.sample(Sampling())
    first, second = backend.prompts
    sampled = [*TEMPLATE.encode(call("t", {})), END]
    assert second[: len(first) + len(sampled)] == first + sampled
    glue = TEMPLATE.decode(second[len(first) + len(sampled) :])
    assert glue == "\n<|im_start|>user\n<tool_response>\nout\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


async def test_results_appended_one_by_one_are_merged_like_results_appended_together():
    prompts = []
    for batches in ([[result("a"), result("b", 1)]], [[result("a")], [result("b", 1)]]):
        backend = Scripted(call("t", {}) + call("t", {}), "done")
        conversation = recorder(backend).open(HELLO, TOOLS)
        await conversation.sample(Sampling())
        for batch in batches:
            conversation.append(batch)
            conversation.prompt_tokens()
        await conversation.sample(Sampling())
        prompts.append(backend.prompts[-1])
    assert prompts[0] == prompts[1]


async def test_a_failed_request_can_be_made_again_and_sends_the_same_prompt():
    backend = Scripted(call("t", {}), None, None, "done")
    conversation = recorder(backend).open(HELLO, TOOLS)
    await conversation.sample(Sampling())
    conversation.append([result("out")])
    for _ in range(2):
        with pytest.raises(ModelUnavailable):
            await conversation.sample(Sampling())
    await conversation.sample(Sampling())
    assert backend.prompts[1] == backend.prompts[2] == backend.prompts[3]
    assert len(conversation.sampled_calls()) == 2


async def test_a_turn_cut_short_gets_its_end_from_the_glue_and_it_is_not_trained():
    backend = Scripted("half a sen", "done", end=())
    conversation = recorder(backend).open(HELLO, TOOLS)
    turn = await conversation.sample(Sampling())
    assert (turn.finish_reason, turn.raw_text) == ("length", "half a sen")
    conversation.append([{"role": "user", "content": "go on"}])
    await conversation.sample(Sampling())
    (segment,) = conversation.segments()
    end = len(backend.prompts[0]) + len(TEMPLATE.encode("half a sen"))
    assert segment.tokens[end] == END
    assert segment.masks[end] == -100


async def test_a_turn_without_a_token_is_a_turn():
    conversation = recorder(Scripted("", end=())).open(HELLO, [])
    turn = await conversation.sample(Sampling())
    assert (turn.raw_text, turn.sampled_tokens) == ("", 0)


async def test_restart_opens_a_segment_and_no_token_is_trained_twice():
    backend = Scripted("one", "two", "three")
    conversation = recorder(backend).open(HELLO, TOOLS)
    await conversation.sample(Sampling())
    conversation.append([{"role": "user", "content": "more"}])
    await conversation.sample(Sampling())
    view = [*HELLO, {"role": "assistant", "content": "two"}, {"role": "user", "content": "again"}]
    conversation.restart(view)
    await conversation.sample(Sampling())
    segments = conversation.segments()
    trained = [TEMPLATE.decode([t for t in s.masks if t != -100]) for s in segments]
    assert trained == ["one<|im_end|>two<|im_end|>", "three<|im_end|>"]
    assert backend.prompts[-1] == TEMPLATE.prompt_ids(view, TOOLS)
    assert [c.segment for c in conversation.sampled_calls()] == [0, 0, 1]


async def test_a_view_that_is_never_sampled_leaves_no_segment():
    conversation = recorder(Scripted("one")).open(HELLO, TOOLS)
    conversation.append([{"role": "user", "content": "and"}])
    conversation.restart(HELLO)
    await conversation.sample(Sampling())
    assert len(conversation.segments()) == 1


async def test_messages_before_the_first_turn_lengthen_the_prompt():
    backend = Scripted("one")
    conversation = recorder(backend).open(HELLO, [])
    conversation.append([{"role": "user", "content": "wait"}])
    await conversation.sample(Sampling())
    assert backend.prompts == [TEMPLATE.prompt_ids([*HELLO, {"role": "user", "content": "wait"}], [])]


async def test_there_must_be_something_to_answer():
    conversation = recorder(Scripted("one", "two")).open(HELLO, [])
    await conversation.sample(Sampling())
    with pytest.raises(ValueError, match="nothing to answer"):
        await conversation.sample(Sampling())


async def test_assistant_turns_cannot_be_slipped_in():
    conversation = recorder(Scripted("one")).open(HELLO, [])
    await conversation.sample(Sampling())
    with pytest.raises(ValueError, match="sampled, not appended"):
        conversation.append([{"role": "assistant", "content": "I never said that"}])


async def test_the_state_has_the_shape_of_a_managed_server():
    conversation = recorder(Scripted("one")).open(HELLO, [])
    await conversation.sample(Sampling())
    (node,) = conversation.state()()["nodes"]
    (segment,) = conversation.segments()
    assert node["tokens"] == segment.tokens
    assert node["masked_tokens"] == segment.masks
    assert node["logprobs"] == segment.logprobs
    assert node["full_text"] == TEMPLATE.decode(segment.tokens)
    assert node["metadata"] == {"finish_reason": "stop"}


async def test_all_that_is_known_of_a_call_is_stored(monkeypatch):
    times = iter([100.0, 102.5])
    monkeypatch.setattr("agent_loop.model.recorder.time.monotonic", lambda: next(times, 0.0))
    conversation = recorder(Scripted("one")).open(HELLO, [])
    await conversation.sample(Sampling(temperature=0.7))
    (called,) = conversation.sampled_calls()
    tokens = len(called.sampled_ids)
    assert (called.weights_version, called.finish_reason, called.duration_s) == ("step-3", "stop", 2.5)
    assert called.weights_spans == [WeightsSpan("step-3", 0, 1), WeightsSpan("step-4", 1, tokens)]
    assert (called.entropies, called.logprobs) == ([0.25] * tokens, [-0.5] * tokens)
    assert called.temperature == 0.7


async def test_the_temperature_that_the_server_was_sent_is_stored():
    backend = Scripted("one")
    conversation = recorder(backend).open(HELLO, [])
    hot = Sampling(temperature=1.0, extra_body={"temperature": 2.0})
    await conversation.sample(hot)
    assert math.isclose(conversation.sampled_calls()[0].temperature or 0, 2.0)
    assert backend.samplings == [hot]


async def test_a_tape_is_told_only_what_a_request_adds_to_the_last(monkeypatch):
    told = []

    async def exchange(after, ids, sampling, ask):
        told.append((after, list(ids), sampling))
        return await ask()

    monkeypatch.setattr("agent_loop.model.recorder.generated", exchange)
    backend, sampling = Scripted("one", "two"), Sampling(seed=3)
    conversation = recorder(backend).open(HELLO, [])
    await conversation.sample(sampling)
    conversation.append([{"role": "user", "content": "more"}])
    await conversation.sample(sampling)
    before = len(backend.prompts[0]) + len(TEMPLATE.encode("one")) + 1
    assert told == [(0, backend.prompts[0], sampling), (before, backend.prompts[1][before:], sampling)]


async def test_the_next_prompt_is_counted_before_it_is_sent():
    backend = Scripted("one", "two")
    conversation = recorder(backend).open(HELLO, [])
    await conversation.sample(Sampling())
    assert conversation.prompt_tokens() == len(conversation.segments()[0].tokens)
    conversation.append([{"role": "user", "content": "more"}])
    counted = conversation.prompt_tokens()
    await conversation.sample(Sampling())
    assert counted == len(backend.prompts[1])


async def test_the_parser_is_told_the_tools_and_whether_the_turn_begins_in_thought():
    opened = chatml_template().replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")
    for template, start in ((TEMPLATE, "content"), (probe_template(chatml_tokenizer(), opened), "reasoning")):
        parser = Spoken()
        await Recorder(Scripted("one"), template, parser).open(HELLO, TOOLS).sample(Sampling())
        ((text, tools, begins),) = parser.told
        assert (text, tools, begins) == ("one", Tools.of(TOOLS), start)


async def test_text_behind_a_call_is_content_on_a_line_of_its_own():
    conversation = recorder(Scripted(f"before{call('t', {})}after")).open(HELLO, TOOLS)
    turn = await conversation.sample(Sampling())
    assert turn.content.split("\n") == ["before", "after"]


async def test_what_the_ids_stand_for_is_known_without_a_tokenizer():
    conversation = recorder(Scripted("one")).open(HELLO, [])
    await conversation.sample(Sampling())
    (segment,) = conversation.segments()
    pieces = conversation.pieces()
    assert set(pieces) == {str(token) for token in segment.tokens}
    assert pieces[str(END)] == "<|im_end|>"


async def test_glue_that_depends_on_everything_gets_the_whole_conversation():
    template = WholeGlue()
    called = "<think>\nhm\n</think>\n\nLet me see.\n" + call("t", {"a": 1}) + call("u", {})
    backend = Scripted(called, call("t", {}), "well", "done")
    conversation = Recorder(backend, template, get_parser("hermes")).open(HELLO, TOOLS)
    first = await conversation.sample(Sampling())
    unnamed = {"role": "tool", "content": "of what?"}
    conversation.append([result("out"), result("named", 1) | {"name": "own"}, unnamed])
    await conversation.sample(Sampling())
    conversation.append([{"role": "user", "content": "no result"}, {"role": "tool", "content": "late"}])
    await conversation.sample(Sampling())
    conversation.append([{"role": "user", "content": "go on"}])
    await conversation.sample(Sampling())

    def made(number: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}

    results = [result("out") | {"name": "t"}, result("named", 1) | {"name": "own"}, unnamed]
    calls = [made("c0", "t", {"a": 1}), made("c1", "own", {}), made("call_2", "tool", {})]
    told = {"role": "assistant", "content": first.content, "reasoning_content": "hm", "tool_calls": calls}
    late = [{"role": "user", "content": "no result"}, {"role": "tool", "content": "late"}]
    answered = {"role": "assistant", "content": "", "tool_calls": [made("call_0", "tool", {})]}
    assert template.asked == [
        (HELLO, results, TOOLS, END),
        ([*HELLO, told, *results], late, TOOLS, END),
        ([*HELLO, told, *results, answered, *late], [{"role": "user", "content": "go on"}], TOOLS, END),
    ]


async def test_stop_tokens_that_the_caller_named_are_sent():
    backend = Scripted("one")
    template = probe_template(chatml_tokenizer(), stop_ids=[0])
    conversation = Recorder(backend, template, get_parser("hermes")).open(HELLO, [])
    await conversation.sample(Sampling())
    assert backend.stop_ids == [0]


async def test_schemas_can_be_kept_out_of_the_template():
    backend = Scripted(call("t", {}))
    server = recorder(backend, write_tools=False)
    conversation = server.open(HELLO, TOOLS)
    turn = await conversation.sample(Sampling())
    assert backend.prompts == [TEMPLATE.prompt_ids(HELLO, [])]
    assert turn.calls[0].name == "t"
    assert server.count_tokens(HELLO, TOOLS) == len(backend.prompts[0])


def test_a_prompt_is_counted_exactly():
    assert recorder(Scripted()).count_tokens(HELLO, TOOLS) == len(TEMPLATE.prompt_ids(HELLO, TOOLS))


def test_a_template_without_tools_is_refused_when_a_conversation_with_tools_is_opened():
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
    server = Recorder(Scripted(), probe_template(chatml_tokenizer(), plain), get_parser("hermes"))
    with pytest.raises(TemplateRefused, match="writes no tool calls"):
        server.open(HELLO, TOOLS)


def test_remembered_ids_are_those_of_the_text_and_nobody_can_change_them(monkeypatch):
    from agent_loop.local_models.standin import chatml_tokenizer
    from agent_loop.model.tokens import template as module
    from agent_loop.model.tokens.probe import probe_template

    monkeypatch.setattr(module, "REMEMBERED_TEXTS", 2)
    template = probe_template(chatml_tokenizer())
    texts = ["one result", "another result", "a third", "one result", "x" * (module.LONGEST_REMEMBERED + 1)]
    for text in texts:
        ids = template.encode(text)
        assert ids == chatml_tokenizer().encode(text, add_special_tokens=False)
        ids.append(-1)
        assert template.encode(text) == ids[:-1]
    assert list(template._encoded) == ["a third", "one result"]
