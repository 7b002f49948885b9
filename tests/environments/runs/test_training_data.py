"""Rows for trainers: what is in them, and that the published chat templates render them as the model wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_loop.local_models.standin import StandIn
from agent_loop.local_models.standin.policies import wild
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.contract import Message, Segment
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.message_shape import MessageShape
from agent_loop.model.tokens.probe import probe_template
from agent_loop.model.tokens.template import TemplateRefused
from agent_loop.records.record import RolloutRecord
from environments.runs.exports import FORMATS
from environments.runs.training_data import (
    AS_OBJECTS,
    chatml_row,
    openai_row,
    openenv_row,
    parquet_row,
    sharegpt_row,
    trl_pair,
    trl_row,
    write_lines,
    write_sft,
)
from support.env_records import record
from support.records import make_record
from support.template_cases import TemplateCase, template_cases
from support.token_records import tokenized
from support.tokens_rollouts import Rollout
from tool_parsers import get_parser

COMMAND = 'grep -c "a\\tb" \'über\'.txt && echo "{done}"'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "terminal",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "the command"}},
                "required": ["command"],
            },
        },
    }
]
STRINGLY = {"meetkai-functionary-medium-v3.2"}
NINE_LETTERS = {"Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"}


def solved(calls: int = 1, reasoning: bool = True) -> RolloutRecord:
    """A rollout with calls whose arguments have everything that escapes go wrong on."""
    own = make_record(turns=3, statuses=("ok",) * calls)
    for message in own.messages:
        if not reasoning:
            message.pop("reasoning_content", None)
        elif message.get("tool_calls"):
            message["content"] = ""  # gpt-oss' template refuses turns that think, speak and call
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps({"command": COMMAND})
    own.tools = TOOLS
    own.sampled_by = [None, None, 0, *[None] * calls, 1, *[None] * calls, 2]
    return own


def test_process_writes_solved_rollouts_with_arguments_as_objects(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "terminal", "parameters": {}}}]
    good = record("g", 0, messages=messages, tools=tools, score=0.9, verifier_score=1.0)
    others = [
        record("g", 1, score=1.1, verifier_score=0.2),
        record("g", 2, score=None, verifier_score=None),
        record("g", 3, score=1.0, verifier_score=1.0, trainable=False),
        record("g", 4, score=1.0, verifier_score=1.0, hack="the tests were changed"),
    ]
    path = tmp_path / "sft.jsonl"
    assert write_sft([good, *others], path) == 1
    [example] = map(json.loads, path.read_text().splitlines())
    assert example["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
    del example["messages"]
    assert example == {"id": "g/0", "tools": tools, "score": 0.9, "item_id": "item-g"}


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    assert write_lines(path, [{"a": 1}, {"a": 2}]) == 2

    def breaks() -> Any:
        yield {"a": 3}
        raise ValueError("the source is damaged")

    with pytest.raises(ValueError, match="damaged"):
        write_lines(path, breaks())
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2]
    assert [own.name for own in tmp_path.iterdir()] == ["train.jsonl"]


def test_examples_of_the_prompt_have_no_weight() -> None:
    own = make_record(turns=2)
    own.messages[1:1] = [{"role": "user", "content": "example"}, {"role": "assistant", "content": "shown before"}]
    own.sampled_by = [None, None, None, None, 0, None, 1]
    said = [m for m in openai_row(own, AS_OBJECTS)["messages"] if m["role"] == "assistant"]
    assert [m.get("weight") for m in said] == [0, None, None]


def test_a_preference_begins_with_what_both_were_given() -> None:
    better, worse = solved(), make_record(sample=1, turns=2, verifier_score=0.0)
    worse.sampled_by = [None, None, 0, None, 1]
    pair = trl_pair(better, worse, AS_OBJECTS)
    assert [m["role"] for m in pair["prompt"]] == ["system", "user"]
    assert [m["role"] for m in pair["chosen"]] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [m["role"] for m in pair["rejected"]] == ["assistant", "tool", "assistant"]
    assert pair["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"command": COMMAND}


def test_sharegpt_has_calls_results_and_thinking_in_tags() -> None:
    system, task, first, results, *_ = sharegpt_row(solved(calls=2), AS_OBJECTS)["conversations"]
    assert [turn["from"] for turn in (system, task, first, results)] == ["system", "human", "gpt", "tool"]
    assert '"function": {"name": "terminal", ' in system["value"].split("<tools>\n")[1]
    assert first["value"].startswith("<think>\nThe file is small.\n</think>\n")
    written = first["value"].split("<tool_call>\n")[1].split("\n</tool_call>")[0]
    assert json.loads(written) == {"name": "terminal", "arguments": {"command": COMMAND}}
    assert (first["value"].count("<tool_call>"), results["value"].count("<tool_response>")) == (2, 2)


def test_traces_and_tables_hold_the_exact_tokens() -> None:
    own = tokenized(make_record(turns=3))
    turns = openenv_row(own, AS_OBJECTS)["turns"]
    for turn, call in zip(turns, own.sampled_calls, strict=True):
        assert turn["prompt_token_ids"] + turn["completion_token_ids"] == call.prompt_ids + call.sampled_ids
        assert sum(turn["loss_mask"]) == len(call.sampled_ids) == len(turn["per_token_logps"])
    assert len({turn["node_id"] for turn in turns}) == 3
    own.segments = [Segment([1, 2, 3], [-100, 2, 3], [1.0, -0.5, -0.25])]
    row = parquet_row(own, AS_OBJECTS)
    assert (row["tokens"], row["mask"], row["logprobs"]) == ([[1, 2, 3]], [[0, 1, 1]], [[0.0, -0.5, -0.25]])


async def test_a_trace_goes_on_within_a_segment_and_nowhere_else() -> None:
    """What TRL and others make rows of: a prompt that does not continue the last call begins another."""
    async with StandIn(wild, seed=3) as standin:
        backend = VllmBackend(standin.url, model="standin")
        recorder = Recorder(backend, probe_template(standin.tokenizer), get_parser("hermes"))
        records = []
        for number in range(30):
            rollout = Rollout(recorder, Random(f"trace {number}"), context_tokens=450)
            await rollout.play(6)
            records.append(rollout.record(f"r{number}"))
        await backend.close()
    for own in records:
        rows: list[list[int]] = []
        for turn in openenv_row(own, AS_OBJECTS)["turns"]:
            prompt, sampled = turn["prompt_token_ids"], turn["completion_token_ids"]
            if not rows or prompt[: len(rows[-1])] != rows[-1]:
                rows.append([])
            rows[-1] = prompt + sampled
        assert rows == [segment.tokens for segment in own.segments]
    assert sum(len(own.segments) > 1 for own in records) > 5


# -- rendered by the templates of models --------------------------------------------------------------------------


def shape_of(case: TemplateCase) -> MessageShape | None:
    """What `--tokenizer` finds; None for a template that has no tools."""
    try:
        traits = probe_template(case.tokenizer(), case.source).traits
    except TemplateRefused:
        return None
    return traits.shape if traits.tools else None


def rendered(case: TemplateCase, messages: list[Message], tools: Any) -> str:
    found = case.tokenizer().apply_chat_template(messages, tools=tools, chat_template=case.source, tokenize=False)
    return str(found)


def conversations_of(own: RolloutRecord, shape: MessageShape) -> dict[str, list[Message]]:
    """The conversation as each export holds it; those of text and tokens have tests of their own."""
    rows = {
        "openai": openai_row(own, shape)["messages"],
        "trl": trl_row(own, shape)["messages"],
        "parquet": json.loads(parquet_row(own, shape)["messages"]),
    }
    pair = trl_pair(own, own, shape)
    assert pair["chosen"] == pair["rejected"]
    text = {"sharegpt", "chatml", "openenv"}
    assert set(rows) == {name for name, form in FORMATS.items() if form.row} - text, "a format that nothing renders"
    return rows | {"trl pairs": pair["prompt"] + pair["chosen"]}


def written_commands(text: str) -> int:
    """How often the command stands there, as it is or as JSON writes it once; what is escaped twice does not count."""
    once = json.dumps(COMMAND, ensure_ascii=False)[1:-1]
    pythonic = repr(COMMAND)[1:-1]
    return max(text.count(form) for form in (COMMAND, once, json.dumps(COMMAND)[1:-1], pythonic))


def problem(case: TemplateCase, messages: list[Message], tools: Any, commands: int) -> str:
    """Why a conversation does not come out as it is, or nothing."""
    try:
        found = written_commands(rendered(case, messages, tools))
    except Exception as error:  # noqa: BLE001 - a template raises whatever it likes
        return f"{type(error).__name__}: {error}"
    return "" if found == commands else f"{found} of {commands} commands"


@pytest.mark.ci
@pytest.mark.timeout(240)
def test_every_export_is_rendered_by_all_published_templates_with_tools() -> None:
    problems, plain, templates = {}, set(), 0
    roles = {"system": "system", "human": "user", "gpt": "assistant", "tool": "user"}
    tagged = [
        {"role": roles[turn["from"]], "content": turn["value"]}
        for turn in sharegpt_row(solved(reasoning=False), AS_OBJECTS)["conversations"]
    ]
    for case in template_cases():
        shape = shape_of(case)
        if shape is None:
            continue
        templates += 1
        for name, messages in conversations_of(solved(calls=2), shape).items():
            problems[case.name, name] = problem(case, messages, TOOLS, commands=4)
        problems[case.name, "sharegpt"] = problem(case, tagged, [], commands=2)
        if problem(case, trl_row(solved(), AS_OBJECTS)["messages"], TOOLS, commands=2):
            plain.add(case.name)
    assert {place: said for place, said in problems.items() if said} == {}
    assert plain == STRINGLY | NINE_LETTERS, "what needs --tokenizer"
    assert templates >= 57


def test_chatml_is_the_text_that_qwen25_renders() -> None:
    case = next(own for own in template_cases() if own.name == "Qwen-Qwen2.5-7B-Instruct")
    for calls in (1, 3):
        own = solved(calls, reasoning=False)
        assert chatml_row(own, AS_OBJECTS)["text"] == rendered(case, trl_row(own, AS_OBJECTS)["messages"], own.tools)
