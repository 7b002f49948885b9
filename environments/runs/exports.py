"""Runs in the formats of others, so that their viewers and trainers open them.

A format is a function from rollouts to files in a folder; `FORMATS` names them. Nothing is guessed: what a format has
no place for goes where it keeps extra data, and a lost rollout stays a lost one.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from agent_loop.model.contract import Message
from agent_loop.model.tokens.message_shape import MessageShape
from agent_loop.records.record import RolloutRecord, SampledCall
from environments.runs.report.view_model import text_of
from environments.runs.selection import Chosen, Takes, read_at
from environments.runs.store import write_whole
from environments.runs.summary import LIMIT_OUTCOMES, summarize_slice
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
    write_parquet,
)

Export = Callable[[Iterable[RolloutRecord], Path, datetime], Iterator[Path]]
"""(rollouts, folder, when the run was written) -> the files, each written when it is given."""
Row = Callable[[RolloutRecord, MessageShape], dict[str, Any]]


@dataclass(frozen=True)
class Format:
    """One way to write a run: as files of its own, or as a file with one row per rollout."""

    says: str
    write: Export | None = None
    row: Row | None = None
    takes: Takes = "all"
    solved: bool = False
    """Whether only solved rollouts are written unless the user asks for others: imitating the rest teaches mistakes."""


def file_name(text: str) -> str:
    """A name that any file system takes; texts that would come out alike stay apart."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:120]
    return plain if plain == text else f"{plain}-{blake2b(text.encode(), digest_size=4).hexdigest()}"


# -- ATIF: Harbor's Agent Trajectory Interchange Format -----------------------------------------------------------

ATIF_VERSION = "ATIF-v1.7"
"""The oldest that has everything used here: Harbor from 0.5 on reads it."""


def write_atif(records: Iterable[RolloutRecord], folder: Path, _written: datetime) -> Iterator[Path]:
    """One trajectory per rollout, with token ids and logprobs of every turn that has them."""
    for record in records:
        path = folder / f"{file_name(record.rollout_id)}.json"
        write_whole(path, orjson.dumps(atif(record), option=orjson.OPT_INDENT_2))
        yield path


def atif(record: RolloutRecord) -> dict[str, Any]:
    """A rollout as an ATIF trajectory."""
    steps = list(_atif_steps(record))
    prompt, sampled = (sum(turn.get(key) or 0 for turn in record.turns) for key in ("prompt_tokens", "sampled_tokens"))
    return {
        "schema_version": ATIF_VERSION,
        "session_id": record.group_id,
        "trajectory_id": record.rollout_id,
        "agent": {
            "name": "hermes-rl",
            "version": version("hermes-rl"),
            "model_name": record.policy or None,
            "tool_definitions": record.tools or None,
        },
        "steps": steps or [{"step_id": 1, "source": "system", "message": record.error or "nothing was sampled"}],
        "final_metrics": {
            "total_prompt_tokens": prompt,
            "total_completion_tokens": sampled,
            "total_steps": max(1, len(steps)),
            "extra": _facts(record),
        },
    }


def _atif_steps(record: RolloutRecord) -> Iterator[dict[str, Any]]:
    """Steps of a conversation; results of tools belong to the step that called them."""
    number = 0
    step: dict[str, Any] | None = None
    for place, message in enumerate(record.messages):
        if message.get("role") == "tool":
            result = {"content": text_of(message.get("content"))}
            called = {call["tool_call_id"] for call in (step or {}).get("tool_calls") or ()}
            if (call_id := str(message.get("tool_call_id"))) in called:
                result["source_call_id"] = call_id
            if step is not None:
                step.setdefault("observation", {"results": []})["results"].append(result)
            continue
        if step is not None:
            yield step
        number += 1
        step = _atif_step(record, place, message, number)
    if step is not None:
        yield step


def _atif_step(record: RolloutRecord, place: int, message: Message, number: int) -> dict[str, Any]:
    role, text = message.get("role"), text_of(message.get("content"))
    if role != "assistant":
        return {"step_id": number, "source": "user" if role == "user" else "system", "message": text}
    turn = record.sampled_by[place] if place < len(record.sampled_by) else None
    step: dict[str, Any] = {"step_id": number, "source": "agent", "message": text}
    if reasoning := text_of(message.get("reasoning_content")):
        step["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        step["tool_calls"] = [_atif_call(call) for call in calls]
    if turn is None:
        return step | {"is_copied_context": True}  # an example of the prompt: not the model's, never trained
    step |= {"llm_call_count": 1}
    if turn < len(record.turns):
        step["metrics"] = _atif_metrics(record.turns[turn], _call(record, turn))
    return step


def _call(record: RolloutRecord, turn: int) -> SampledCall | None:
    return record.sampled_calls[turn] if turn < len(record.sampled_calls) else None


def _atif_metrics(turn: Mapping[str, Any], call: SampledCall | None) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": turn.get("prompt_tokens"),
        "completion_tokens": turn.get("sampled_tokens"),
        "extra": {key: turn.get(key) for key in ("model_s", "tools_s", "finish_reason")},
    }
    if call is not None:
        metrics["prompt_token_ids"], metrics["completion_token_ids"] = call.prompt_ids, call.sampled_ids
        metrics["logprobs"] = call.logprobs
        metrics["extra"]["weights_version"] = call.weights_version
    return metrics


def _atif_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments, problem = _arguments(function.get("arguments"))
    found = {"tool_call_id": str(call.get("id")), "function_name": str(function.get("name")), "arguments": arguments}
    return found | ({"extra": {"parse_error": problem}} if problem else {})


def _arguments(written: Any) -> tuple[dict[str, Any], str | None]:
    """Arguments as an object; what is not one is kept under one key, with the reason."""
    try:
        value = json.loads(written) if isinstance(written, str) else written
    except ValueError as error:
        return {"arguments": written}, str(error)
    return (value, None) if isinstance(value, dict) else ({"arguments": value}, "not a JSON object")


def _facts(record: RolloutRecord) -> dict[str, Any]:
    return {
        "item_id": record.item_id,
        "environment": record.environment,
        "category": record.category,
        "outcome": record.outcome,
        "trainable": record.trainable,
        "reward": record.score,
        "verifier_score": record.verifier_score,
        "reward_components": record.reward_components,
        "metrics": record.metrics,
        "timing": record.timing,
        "seed": record.seed,
        "error": record.error,
    }


# -- Inspect's log ------------------------------------------------------------------------------------------------

SAMPLE_LIMITS = {
    "max_turns": ("turn", "turns"),
    "max_sampled_tokens": ("token", "sampled_tokens"),
    "length": ("token", "sampled_tokens"),
    "context_overflow": ("context", "prompt_tokens_max"),
}
"""Outcome -> Inspect's name of the limit, and our metric of what it counts."""
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_calls", "stop": "stop"}


def write_inspect(records: Iterable[RolloutRecord], folder: Path, written: datetime) -> Iterator[Path]:
    """One log per policy, which `inspect view --log-dir FOLDER` opens; a rollout is an epoch of its item's sample."""
    policies: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        policies[record.policy or "none"].append(record)
    for policy, own in policies.items():
        stamp = written.strftime("%Y-%m-%dT%H-%M-%S+00-00")
        name = file_name(own[0].environment or "run").replace("_", "-")
        path = folder / f"{stamp}_{name}_{file_name(policy).replace('_', '-')}.json"
        write_whole(path, orjson.dumps(inspect_log(policy, own, written), option=orjson.OPT_INDENT_2))
        yield path


def inspect_log(policy: str, records: Sequence[RolloutRecord], written: datetime) -> dict[str, Any]:
    """The rollouts of one policy as a log of Inspect (version 2)."""
    when = written.isoformat()
    figures = summarize_slice(policy, records)
    epochs: Counter[str] = Counter()
    samples = []
    for record in records:
        epochs[record.item_id] += 1
        samples.append(_inspect_sample(record, epochs[record.item_id]))
    metrics = {"mean": figures.mean_score, "stderr": figures.standard_error}
    score = {
        "name": "verifier",
        "scorer": "verifier",
        "scored_samples": figures.scored,
        "unscored_samples": figures.rollouts - figures.scored,
        "metrics": {name: {"name": name, "value": value} for name, value in metrics.items() if value is not None},
    }
    task = records[0].environment or "hermes-rl"
    run_id = blake2b("\n".join(record.rollout_id for record in records).encode(), digest_size=11).hexdigest()
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": run_id,
            "run_id": run_id,
            "task_id": run_id,
            "created": when,
            "task": task,
            "dataset": {"name": task, "samples": figures.items, "sample_ids": list(epochs)},
            "model": policy,
            "config": {"epochs": max(epochs.values())},
            "packages": {"hermes-rl": version("hermes-rl")},
        },
        "plan": {"name": "hermes-rl", "steps": [{"solver": "hermes-rl"}]},
        "results": {"total_samples": figures.rollouts, "completed_samples": figures.scored, "scores": [score]},
        "stats": {"started_at": when, "completed_at": when},
        "samples": samples,
    }


def _inspect_sample(record: RolloutRecord, epoch: int) -> dict[str, Any]:
    messages = [_inspect_message(record, place) for place in range(len(record.messages))]
    given = next((place for place, call in enumerate(record.sampled_by) if call is not None), len(messages))
    last = next((m for m in reversed(messages[given:]) if m["role"] == "assistant"), None)
    sample: dict[str, Any] = {
        "id": record.item_id,
        "epoch": epoch,
        "input": messages[:given],
        "target": "",
        "messages": messages,
        "output": _inspect_output(record, last),
        "metadata": {"rollout_id": record.rollout_id, "group_id": record.group_id, **_facts(record)},
        "total_time": record.timing.get("total_s"),
        "working_time": record.timing.get("total_s", 0.0) - record.timing.get("acquire_s", 0.0),
        "turn_count": len(record.turns),
        "uuid": blake2b(record.rollout_id.encode(), digest_size=11).hexdigest(),
    }
    if record.verifier_score is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in record.reward_components.items())
        sample["scores"] = {"verifier": {"value": record.verifier_score, "explanation": parts or None}}
    if not record.trainable:
        said = f"{record.outcome}: {record.error or 'no reason given'}"
        sample["error"] = {"message": said, "traceback": "", "traceback_ansi": ""}
    elif record.outcome in LIMIT_OUTCOMES:
        kind, usage = SAMPLE_LIMITS.get(record.outcome, ("custom", "tool_calls_attempted"))
        # What was used when it ended: the record does not have the limit itself.
        sample["limit"] = {"type": kind, "limit": record.metrics.get(usage, 0.0), "reason": record.outcome}
    return sample


def _inspect_output(record: RolloutRecord, last: dict[str, Any] | None) -> dict[str, Any]:
    prompt, sampled = (sum(turn.get(key) or 0 for turn in record.turns) for key in ("prompt_tokens", "sampled_tokens"))
    usage = {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
    if last is None:
        return {"model": record.policy, "choices": [], "usage": usage}
    reason = STOP_REASONS.get(str(record.turns[-1].get("finish_reason")), "unknown") if record.turns else "unknown"
    return {"model": record.policy, "choices": [{"message": last, "stop_reason": reason}], "usage": usage}


def _inspect_message(record: RolloutRecord, place: int) -> dict[str, Any]:
    message = record.messages[place]
    role = {"developer": "system"}.get(str(message.get("role")), str(message.get("role")))
    text = text_of(message.get("content"))
    found: dict[str, Any] = {"id": f"{record.rollout_id}#{place}", "role": role, "content": text}
    if role == "tool":
        found["tool_call_id"] = message.get("tool_call_id")
        found["function"] = message.get("name") or _called_name(record, str(message.get("tool_call_id")))
    elif role == "assistant":
        sampled = place < len(record.sampled_by) and record.sampled_by[place] is not None
        found |= {"source": "generate" if sampled else "input", "model": record.policy}
        if reasoning := text_of(message.get("reasoning_content")):
            found["content"] = [{"type": "reasoning", "reasoning": reasoning}, {"type": "text", "text": text}]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [_inspect_call(call) for call in calls]
    else:
        found["source"] = "input"
    return found


def _called_name(record: RolloutRecord, call_id: str) -> str | None:
    return next((str(call.get("name")) for call in record.tool_calls if call.get("call_id") == call_id), None)


def _inspect_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments, problem = _arguments(function.get("arguments"))
    found = {"id": str(call.get("id")), "function": str(function.get("name")), "arguments": arguments}
    return found | {"type": "function", "parse_error": problem}


FORMATS: dict[str, Format] = {
    "openai": Format("conversations in OpenAI's chat format", row=openai_row, takes="trainable", solved=True),
    "sharegpt": Format(
        "conversations of human, gpt and tool, calls in Hermes' tags", row=sharegpt_row, takes="trainable", solved=True
    ),
    "chatml": Format("conversations as ChatML text", row=chatml_row, takes="trainable", solved=True),
    "trl": Format("conversations for TRL, or its preference pairs", row=trl_row, takes="trainable", solved=True),
    "parquet": Format("a table with facts, conversations and tokens", row=parquet_row, takes="trainable"),
    "openenv": Format("OpenEnv's training traces, with token ids and logprobs", row=openenv_row, takes="tokens"),
    "atif": Format("Harbor's trajectories, one file per rollout, with token ids and logprobs", write_atif),
    "inspect": Format("logs of Inspect, one per policy, for `inspect view`", write_inspect),
}


def export_run(source: Path, chosen: Chosen, name: str, folder: Path, shape: MessageShape = AS_OBJECTS) -> list[Path]:
    """Write what was chosen of a file in a format; the files."""
    own = FORMATS[name]
    records = read_at(source, chosen.places)
    if own.write is not None:
        written = datetime.fromtimestamp(int(source.stat().st_mtime), UTC)
        return list(own.write(records, folder, written))
    if own.row is None:
        raise ValueError(f"format {name} has no way to write")
    path = folder / ("train.parquet" if name == "parquet" else "train.jsonl")
    if chosen.pairs:
        both = read_at(source, (place for pair in chosen.pairs for place in pair))
        write_lines(path, (trl_pair(better, worse, shape) for better, worse in zip(both, both, strict=True)))
    else:
        rows = (own.row(record, shape) for record in records)
        (write_parquet if name == "parquet" else write_lines)(path, rows)
    return [path]
