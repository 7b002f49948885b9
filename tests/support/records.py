"""Synthetic but realistic rollout records: a small terminal agent with good, sloppy and unlucky days."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from agent_loop.model.contract import Message, Segment
from agent_loop.records.record import RolloutRecord, SampledCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "terminal",
            "description": "Run a bash command in the sandbox.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
CATEGORIES = ("files", "text", "git", "logs")
POLICIES = ("smollm2-135m", "scripted-good", "scripted-sloppy")
LOST = {
    "sandbox_lost": "SandboxLost: the host of the slot went away",
    "api_error": "ModelUnavailable: 503 from the model server after 4 tries",
    "deadline": "the rollout took longer than 120 s",
}


def call_record(turn: int, number: int, status: str = "ok", **changes: Any) -> dict[str, Any]:
    """One entry of `RolloutRecord.tool_calls`, as the loop writes it."""
    return {
        "turn": turn,
        "call_id": f"call_{turn}_{number}",
        "name": "terminal",
        "raw_arguments": '{"command": "ls -la"}',
        "arguments": {"command": "ls -la"},
        "status": status,
        "schema_valid": status in ("ok", "error", "timeout"),
        "repairs": [],
        "duplicate": False,
        "duration_s": 0.04,
        "exit_code": 0 if status == "ok" else None,
        "result_chars": 120,
        "stored_path": None,
        "error": None if status == "ok" else "arguments must be a JSON object",
        "parent": None,
        "metadata": {},
        **changes,
    }


def make_record(
    *,
    item: int = 0,
    sample: int = 0,
    verifier_score: float | None = 1.0,
    outcome: str = "finished",
    policy: str = POLICIES[0],
    category: str = CATEGORIES[0],
    turns: int = 2,
    statuses: tuple[str, ...] = ("ok",),
    **changes: Any,
) -> RolloutRecord:
    """One rollout: `turns` turns of which all but the last call a tool with the given statuses."""
    trainable = outcome not in LOST
    calls = [call_record(t, n, s) for t in range(1, turns) for n, s in enumerate(statuses)]
    record = RolloutRecord(
        rollout_id=f"{policy}-{item}-{sample}",
        group_id=f"{policy}-g{item}",
        environment="terminal_tasks",
        item_id=f"terminal:train:kind{item}:{item}",
        outcome=outcome,
        trainable=trainable,
        messages=conversation(item, turns, calls),
        tools=TOOLS,
        score=verifier_score if trainable else None,
        verifier_score=verifier_score if trainable else None,
        reward_components={"verifier": verifier_score or 0.0, "unknown_tools": 0.0} if trainable else {},
        category=category,
        policy=policy,
        seed=item,
        has_tokens=True,
        segments=[Segment([1, 2, 3, 4], [-100, -100, 3, 4], [1.0, 1.0, -0.5, -0.1])],
        sampled_calls=[SampledCall(0, [1, 2], [3, 4], [-0.5, -0.1], "stop", 0.8)],
        turns=[turn_record(t, turns) for t in range(1, turns + 1)],
        tool_calls=calls,
        metrics=call_totals(calls) | {"turns": float(turns), "sampled_tokens": 40.0 * turns, "model_retries": 0.0},
        timing={
            "model_s": 0.8 * turns,
            "tools_s": 0.05 * turns,
            "acquire_s": 0.2,
            "verify_s": 0.1,
            "total_s": turns + 0.5,
        },
        isolation="namespaces",
        error=LOST.get(outcome),
    )
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def turn_record(turn: int, turns: int) -> dict[str, Any]:
    return {
        "turn": turn,
        "model_s": 0.8,
        "tools_s": 0.05 if turn < turns else 0.0,
        "prompt_tokens": 300 + 60 * turn,
        "sampled_tokens": 40,
        "finish_reason": "tool_calls" if turn < turns else "stop",
        "content_chars": 80,
        "reasoning_chars": 0,
        "tool_calls": 1 if turn < turns else 0,
        "malformed": 0,
        "retries": 0,
        "parallel": False,
    }


def conversation(item: int, turns: int, calls: list[dict[str, Any]]) -> list[Message]:
    """Messages that fit the calls: system, task, then assistant and tool by turns."""
    messages: list[Message] = [
        {"role": "system", "content": "You are a shell agent. Use the terminal tool."},
        {"role": "user", "content": f"Sort the lines of notes{item}.txt into sorted{item}.txt."},
    ]
    for turn in range(1, turns):
        mine = [call for call in calls if call["turn"] == turn]
        wire = [
            {
                "id": call["call_id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in mine
        ]
        thought = f"Step {turn}: look at what is there before sorting."
        messages.append(
            {"role": "assistant", "content": thought, "reasoning_content": "The file is small.", "tool_calls": wire}
        )
        for call in mine:
            body = "total 8\n-rw-r--r-- 1 agent agent 31 notes.txt\n" if call["status"] == "ok" else call["error"]
            messages.append({"role": "tool", "tool_call_id": call["call_id"], "name": "terminal", "content": body})
    messages.append({"role": "assistant", "content": f"Done: sorted{item}.txt holds the sorted lines."})
    return messages


def call_totals(calls: list[dict[str, Any]]) -> dict[str, float]:
    """The metrics that summaries add up."""
    names = {
        "executed_ok": "ok",
        "exec_error": "error",
        "invalid": "invalid",
        "unknown": "unknown",
        "malformed": "malformed",
    }
    counts = {f"tool_calls_{name}": float(sum(c["status"] == s for c in calls)) for name, s in names.items()}
    valid = float(sum(c["schema_valid"] for c in calls))
    return counts | {
        "tool_calls_attempted": float(len(calls)),
        "tool_calls_schema_valid": valid,
        "tool_calls_repaired": float(sum(bool(c["repairs"]) for c in calls)),
        "tool_calls_duplicate": float(sum(c["duplicate"] for c in calls)),
        "tool_calls_timeout": 0.0,
        "valid_rate": valid / len(calls) if calls else 1.0,
    }


def make_run(items: int = 12, samples: int = 4, seed: int = 0) -> list[RolloutRecord]:
    """A whole run of three policies, with repairs, unknown tools, truncations and lost rollouts among them."""
    chance = random.Random(seed)
    rate = {"smollm2-135m": 0.25, "scripted-good": 0.95, "scripted-sloppy": 0.5}
    records = []
    for policy in POLICIES:
        for item in range(items):
            for sample in range(samples):
                outcome = chance.choices(["finished", "max_turns", "length", *LOST], [80, 6, 4, 4, 3, 3])[0]
                solved = float(outcome == "finished" and chance.random() < rate[policy])
                statuses = tuple(
                    chance.choices(["ok", "error", "invalid", "unknown"], [8, 2, 1, 1], k=chance.choice([1, 1, 2]))
                )
                record = make_record(
                    item=item,
                    sample=sample,
                    verifier_score=solved,
                    outcome=outcome,
                    policy=policy,
                    category=CATEGORIES[item % len(CATEGORIES)],
                    turns=chance.randint(1, 6),
                    statuses=statuses,
                )
                decorate(record, chance)
                records.append(record)
    return records


def decorate(record: RolloutRecord, chance: random.Random) -> None:
    """Add what only some rollouts have: repairs, truncations, shaping, long results."""
    if record.tool_calls and chance.random() < 0.3:
        record.tool_calls[0]["repairs"] = ["trailing_comma", "single_quotes"]
        record.metrics["tool_calls_repaired"] = 1.0
        record.reward_components["repaired_calls"] = -0.1
        if record.score is not None:
            record.score -= 0.1
    if len(record.turns) > 3 and chance.random() < 0.4:
        record.truncations = [
            {
                "turn": 3,
                "strategy": "shorten",
                "shortened": 2,
                "dropped": 0,
                "tokens_before": 4200,
                "tokens_after": 1800,
            }
        ]
    if record.tool_calls and chance.random() < 0.2:
        record.tool_calls[-1]["stored_path"] = "/tmp/results/call.txt"
        record.tool_calls[-1]["result_chars"] = 183_000
    for message in record.messages:
        if message["role"] == "tool" and chance.random() < 0.1:
            message["content"] = "\n".join(f"line {n} of a long listing" for n in range(200))


def write_run(path: Path, records: list[RolloutRecord]) -> Path:
    """The records as a rollouts.jsonl."""
    path.write_bytes(b"".join(record.to_json() + b"\n" for record in records))
    return path
