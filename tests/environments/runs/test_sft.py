"""The SFT export holds what was solved, with its tool calls, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from environments.runs.store import export_sft
from support.env_records import record


def test_only_good_trainable_rollouts_are_exported_with_calls_and_tools(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "terminal", "parameters": {}}}]
    good = record("g", 0, messages=messages, tools=tools, score=0.9, verifier_score=1.0)
    others = [
        record("g", 1, score=1.1, verifier_score=0.2),
        record("g", 2, score=None, verifier_score=None),
        record("g", 3, score=1.0, verifier_score=1.0, trainable=False),
    ]
    path = tmp_path / "sft.jsonl"
    assert export_sft([good, *others], path) == 1
    [example] = map(json.loads, path.read_text().splitlines())
    assert example == {"id": "g/0", "messages": messages, "tools": tools, "score": 0.9, "item_id": "item-g"}
