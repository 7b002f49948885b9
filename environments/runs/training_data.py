"""Rollouts as rows that trainers read: conversations, text, preferences, and token sequences.

Arguments of calls are objects, because most chat templates write them out themselves: JSON text would be escaped once
more, or refused. Rows are written one by one; what is written replaces the old file only when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from agent_loop.model.contract import Message, ToolSchema
from agent_loop.model.tokens.ledger import MASKED
from agent_loop.model.tokens.message_shape import MessageShape, shape_messages
from agent_loop.records.record import RolloutRecord
from environments.errors import UsageError, writing
from environments.runs.report.view_model import text_of
from environments.runs.selection import Rules, given_messages

AS_OBJECTS = MessageShape()
"""Arguments as objects, thinking under `reasoning_content`, the rest as it was stored: what most templates take."""
ROWS_AT_ONCE = 200
"""Rollouts in a row group of Parquet: what a reader loads at a time."""


def write_sft(records: Iterable[RolloutRecord], path: Path, solved_at: float = 1.0) -> int:
    """Write the solved rollouts as conversations; how many.

    The verifier decides what is solved: shaping ranks rollouts, and may take points from one that is right.
    """
    solved = Rules(takes="trainable", min_score=solved_at)
    return write_lines(path, (openai_row(r, AS_OBJECTS) for r in records if solved.refusal(r) is None))


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON Lines; how many."""
    count = 0
    with _replacing(path) as out:
        for count, row in enumerate(rows, 1):  # noqa: B007 - the last number is the count
            out.write(orjson.dumps(row) + b"\n")
    return count


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    part = path.with_suffix(".part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as out:
                yield out
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


# -- conversations ------------------------------------------------------------------------------------------------


def openai_row(record: RolloutRecord, shape: MessageShape) -> dict[str, Any]:
    """OpenAI's chat format, and whose it was. An assistant message that the model did not sample has weight 0."""
    sampled = list(record.sampled_by) + [None] * (len(record.messages) - len(record.sampled_by))
    known = any(call is not None for call in sampled)
    messages = [
        message | {"weight": 0} if known and call is None and message.get("role") == "assistant" else message
        for message, call in zip(record.messages, sampled, strict=False)
    ]
    return {
        "id": record.rollout_id,
        "messages": shape_messages(messages, shape),
        "tools": record.tools,
        "score": record.score,
        "item_id": record.item_id,
    }


def trl_row(record: RolloutRecord, shape: MessageShape) -> dict[str, Any]:
    """TRL's conversational format: no other columns, since TRL takes their names for its own."""
    return {"messages": shape_messages(record.messages, shape), "tools": record.tools}


def trl_pair(better: RolloutRecord, worse: RolloutRecord, shape: MessageShape) -> dict[str, Any]:
    """TRL's preference format: two ways to go on from the same messages."""
    given = len(given_messages(better))
    return {
        "prompt": shape_messages(better.messages[:given], shape),
        "chosen": shape_messages(better.messages[given:], shape),
        "rejected": shape_messages(worse.messages[given:], shape),
        "tools": better.tools,
    }


# -- text, as Hermes and Qwen2.5 write it -------------------------------------------------------------------------

TOOLS_HEAD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
TOOLS_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
SHAREGPT_ROLES = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def sharegpt_row(record: RolloutRecord, _shape: MessageShape) -> dict[str, Any]:
    """ShareGPT with Hermes' tags: tools in the system turn, calls in `gpt` turns, results in `tool` turns."""
    turns = [{"from": SHAREGPT_ROLES.get(role, "human"), "value": text} for role, text in tagged_turns(record)]
    return {"id": record.rollout_id, "conversations": turns, "score": record.score, "item_id": record.item_id}


def chatml_row(record: RolloutRecord, _shape: MessageShape) -> dict[str, Any]:
    """The whole conversation as one ChatML text."""
    turns = [("user" if role == "tool" else role, text) for role, text in tagged_turns(record)]
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    return {"id": record.rollout_id, "text": text, "score": record.score, "item_id": record.item_id}


def tagged_turns(record: RolloutRecord) -> Iterator[tuple[str, str]]:
    """(role, text) of each turn, with calls, results and thinking in tags; results that follow each other are one."""
    messages = shape_messages(record.messages, AS_OBJECTS)
    system = text_of(messages[0].get("content")) if messages and messages[0].get("role") == "system" else ""
    if tools := _tools_text(record.tools):
        system = f"{system}\n\n{tools}" if system else tools
    if system:
        yield "system", system
    results: list[str] = []
    for message in messages[1:] if messages and messages[0].get("role") == "system" else messages:
        role, text = str(message.get("role")), text_of(message.get("content"))
        if role == "tool":
            results.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        if results:
            yield "tool", "\n".join(results)
            results = []
        yield role, _assistant_text(message, text) if role == "assistant" else text
    if results:
        yield "tool", "\n".join(results)


def _tools_text(tools: Sequence[ToolSchema]) -> str:
    return TOOLS_HEAD + "\n".join(_json(tool) for tool in tools) + TOOLS_TAIL if tools else ""


def _assistant_text(message: Message, text: str) -> str:
    reasoning = text_of(message.get("reasoning_content"))
    parts = [f"<think>\n{reasoning}\n</think>\n"] if reasoning else []
    parts += [text] if text else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        written = f'{{"name": {_json(function.get("name"))}, "arguments": {_json(function["arguments"])}}}'
        parts.append(f"<tool_call>\n{written}\n</tool_call>")
    return "\n".join(parts)


def _json(value: Any) -> str:
    """As transformers' `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)


# -- tokens -------------------------------------------------------------------------------------------------------


def openenv_row(record: RolloutRecord, _shape: MessageShape) -> dict[str, Any]:
    """OpenEnv's TrainingTrace, one turn for each call of the model."""
    about = {key: getattr(record, key) for key in ("rollout_id", "group_id", "item_id", "outcome", "score")}
    turns = [
        {
            "node_id": (node := f"{record.rollout_id}:{number}"),
            "prompt_token_ids": call.prompt_ids,
            "completion_token_ids": call.sampled_ids,
            "per_token_logps": call.logprobs,
            "loss_mask": [0] * len(call.prompt_ids) + [1] * len(call.sampled_ids),
            "metadata": about | {"node_id": node, "weights_version": call.weights_version},
        }
        for number, call in enumerate(record.sampled_calls)
    ]
    return {"schema_version": 1, "turns": turns}


def parquet_row(record: RolloutRecord, shape: MessageShape) -> dict[str, Any]:
    """Facts, the conversation, and one token sequence per segment.

    Messages and tools are JSON text: as nested columns every call would get the keys of all other calls, as nulls.
    """
    row = {key: getattr(record, key) for key in PARQUET_FACTS}
    masks = [[int(value != MASKED) for value in segment.masks] for segment in record.segments]
    return row | {
        "turns": len(record.turns),
        "messages": orjson.dumps(shape_messages(record.messages, shape)).decode(),
        "tools": orjson.dumps(record.tools).decode(),
        "tokens": [segment.tokens for segment in record.segments],
        "mask": masks,
        "logprobs": [
            [value if kept else 0.0 for value, kept in zip(segment.logprobs, mask, strict=True)]
            for segment, mask in zip(record.segments, masks, strict=True)
        ],
    }


PARQUET_FACTS = {
    "rollout_id": "string",
    "group_id": "string",
    "item_id": "string",
    "environment": "string",
    "category": "string",
    "policy": "string",
    "outcome": "string",
    "score": "double",
    "verifier_score": "double",
}
"""Column -> type in Arrow."""


def pyarrow() -> tuple[Any, Any]:
    """The package and its part for Parquet; UsageError when it is not installed."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError("--to parquet needs the package pyarrow: pip install 'hermes-rl[parquet]'") from error


def write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows of `parquet_row`, a row group at a time; how many."""
    arrow, parquet = pyarrow()
    lists = {"tokens": "int32", "mask": "int8", "logprobs": "double"}
    columns = {name: arrow.type_for_alias(kind) for name, kind in PARQUET_FACTS.items()}
    columns |= {"turns": arrow.int32(), "messages": arrow.string(), "tools": arrow.string()}
    columns |= {name: arrow.list_(arrow.list_(arrow.type_for_alias(kind))) for name, kind in lists.items()}
    schema = arrow.schema(list(columns.items()))
    count, left = 0, iter(rows)
    with _replacing(path) as out, parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        while part := list(islice(left, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(part, schema=schema))
            count += len(part)
    return count
