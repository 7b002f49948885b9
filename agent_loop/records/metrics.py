"""Counts and rates of a rollout, ready for a reward; from the records alone, so that `verify` can compute them again.

Sums that always hold, over the calls the model wrote itself:

    tool_calls_attempted = ok + exec_error + invalid + unknown + malformed + skipped + cancelled + lost
    tool_calls_exec_error = error + timeout         (ran and failed)
    tool_calls_schema_valid <= attempted            (ran or not, the call fitted its schema as written)

Calls made from inside a script (execute_code) are counted apart as `nested_calls`. Rates are over attempted calls.
Without calls they are 0.0, except `valid_rate` and `ok_rate`, which are then 1.0: nothing was wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.outcome import Outcome
from agent_loop.records.record import TurnRecord
from agent_loop.turn.tool_call import ToolCallRecord, ToolStatus

_COUNTED_ALONE = (
    ToolStatus.INVALID,
    ToolStatus.UNKNOWN,
    ToolStatus.MALFORMED,
    ToolStatus.SKIPPED,
    ToolStatus.CANCELLED,
    ToolStatus.LOST,
)


def rollout_metrics(
    turns: Sequence[TurnRecord], calls: Sequence[ToolCallRecord], outcome: Outcome, truncations: int = 0
) -> dict[str, float]:
    """All metrics of a rollout."""
    metrics = call_metrics([vars(call) for call in calls])
    metrics |= {
        "finished_naturally": float(outcome is Outcome.FINISHED),
        "turns": float(len(turns)),
        "sampled_tokens": float(sum(turn.sampled_tokens or 0 for turn in turns)),
        "prompt_tokens_max": float(max((turn.prompt_tokens or 0 for turn in turns), default=0)),
        "content_chars": float(sum(turn.content_chars for turn in turns)),
        "reasoning_chars": float(sum(turn.reasoning_chars for turn in turns)),
        "model_retries": float(sum(turn.retries for turn in turns)),
        "truncations": float(truncations),
        "model_s": sum(turn.model_s for turn in turns),
        "tools_s": sum(turn.tools_s for turn in turns),
    }
    return metrics


def call_metrics(calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of tool calls, from records as they are stored (`RolloutRecord.tool_calls`)."""
    own = [call for call in calls if call.get("parent") is None]
    status = Counter(str(call["status"]) for call in own)
    counts = {f"tool_calls_{name}": status[name] for name in _COUNTED_ALONE}
    counts |= {
        "tool_calls_attempted": len(own),
        "tool_calls_schema_valid": sum(bool(call["schema_valid"]) for call in own),
        "tool_calls_executed_ok": status[ToolStatus.OK],
        "tool_calls_exec_error": status[ToolStatus.ERROR] + status[ToolStatus.TIMEOUT],
        "tool_calls_timeout": status[ToolStatus.TIMEOUT],
        "tool_calls_repaired": sum(bool(call["repairs"]) for call in own),
        "tool_calls_duplicate": sum(bool(call["duplicate"]) for call in own),
        "tool_calls_nonzero_exit": sum(call.get("exit_code") not in (None, 0) for call in own),
        "tool_calls_shortened": sum(call.get("stored_path") is not None for call in own),
        "nested_calls": len(calls) - len(own),
        "tools_used": len({call["name"] for call in own if call["status"] == ToolStatus.OK}),
    }
    metrics = {name: float(count) for name, count in counts.items()}
    return metrics | _rates(metrics) | _as_hermes_agent_counts(own) | _repairs(own) | _per_tool(own)


def _rates(counts: Mapping[str, float]) -> dict[str, float]:
    attempted = counts["tool_calls_attempted"]

    def rate(name: str, of_none: float = 0.0) -> float:
        return counts[f"tool_calls_{name}"] / attempted if attempted else of_none

    return {
        "valid_rate": rate("schema_valid", of_none=1.0),
        "ok_rate": rate("executed_ok", of_none=1.0),
        "error_rate": rate("exec_error"),
        "invalid_rate": rate("invalid"),
        "unknown_rate": rate("unknown"),
        "malformed_rate": rate("malformed"),
        "repaired_rate": rate("repaired"),
        "duplicate_rate": rate("duplicate"),
    }


def _as_hermes_agent_counts(calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The counters of hermes-agent with its own meaning, for runs that are compared with its runs.

    An unknown tool is an error there but not an attempt, and a tool that answers with an error but without a negative
    exit code has succeeded.
    """
    status = Counter(str(call["status"]) for call in calls)
    tried = [call for call in calls if call["status"] not in (ToolStatus.UNKNOWN, ToolStatus.MALFORMED)]
    ran = [call for call in tried if call["status"] in (ToolStatus.OK, ToolStatus.ERROR, ToolStatus.TIMEOUT)]
    errors = sum(call["status"] == ToolStatus.TIMEOUT or (call.get("exit_code") or 0) < 0 for call in ran)
    counts = {
        "tool_calls_attempted": len(tried),
        "tool_calls_schema_valid": sum(bool(call["schema_valid"]) for call in tried),
        "tool_calls_executed_ok": len(ran) - errors,
        "tool_calls_exec_error": errors + status[ToolStatus.UNKNOWN],
        "tool_errors": errors + status[ToolStatus.UNKNOWN] + status[ToolStatus.INVALID],
    }
    return {f"hermes_agent/{name}": float(count) for name, count in counts.items()}


def _repairs(calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    classes = Counter(repair for call in calls for repair in call["repairs"])
    return {f"repair/{name}": float(count) for name, count in sorted(classes.items())}


def _per_tool(calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Per known tool: calls that ran, seconds, and how many did not end well."""
    metrics: dict[str, float] = {}
    ran = {ToolStatus.OK, ToolStatus.ERROR, ToolStatus.TIMEOUT}
    for call in sorted((call for call in calls if call["status"] in ran), key=lambda call: str(call["name"])):
        prefix = f"tool/{call['name']}"
        failed = call["status"] != ToolStatus.OK
        for name, value in (("calls", 1.0), ("errors", float(failed)), ("seconds", float(call["duration_s"]))):
            metrics[f"{prefix}/{name}"] = metrics.get(f"{prefix}/{name}", 0.0) + value
    return metrics
