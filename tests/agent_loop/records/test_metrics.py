"""Metrics: the sums hold for every mix of calls, and they can be computed again from what is stored."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.limits import Limits
from agent_loop.loop import HermesAgentLoop
from agent_loop.records.metrics import call_metrics
from agent_loop.turn.tool_call import ToolStatus
from support.loop_servers import ScriptedServer, assert_paired, call, calls, record_of, says, tool, user

PARTS = ("executed_ok", "exec_error", "invalid", "unknown", "malformed", "skipped", "cancelled", "lost")

CALLS = st.one_of(
    st.builds(lambda n: call(arguments={"command": f"c{n}"}), st.integers(0, 3)),
    st.just(call(arguments="ls")),
    st.just(call(arguments={"command": "fail"})),
    st.just(call(arguments="{")),
    st.just(call(arguments=None)),
    st.just(call("nope", {})),
    st.just(call(error="No closing tag.")),
    st.just(call(repairs=("trailing_comma",))),
)
TURNS = st.one_of(
    st.builds(lambda made: calls(*made), st.lists(CALLS, min_size=1, max_size=4)),
    st.builds(lambda made: calls(*made, malformed=("Half a call.",)), st.lists(CALLS, max_size=2)),
)


async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
    return '{"error": "failed", "exit_code": 1}' if arguments.get("command") == "fail" else '{"output": ""}'


@given(
    turns=st.lists(TURNS, max_size=5), last=st.sampled_from(["stop", "length"]), max_calls=st.none() | st.integers(0, 4)
)
async def test_sums_are_consistent_and_pairs_hold_whatever_the_model_writes(turns, last, max_calls):
    server = ScriptedServer(*turns, says("done", finish_reason=last))
    loop = HermesAgentLoop(server, [tool()], tool_handler=handler, limits=Limits(max_tool_calls=max_calls))
    result = await loop.run(user())
    assert_paired(result.messages)
    metrics = result.metrics
    attempted = metrics["tool_calls_attempted"]
    assert attempted == sum(metrics[f"tool_calls_{part}"] for part in PARTS)
    assert attempted == result.tool_calls_attempted == len(result.tool_calls)
    assert attempted == sum(turn.tool_calls for turn in result.turns)
    assert result.tool_calls_schema_valid <= attempted
    assert all(0.0 <= value <= 1.0 for name, value in metrics.items() if name.endswith("_rate"))
    assert result.finished_naturally == (metrics["finished_naturally"] == 1.0)
    stored = orjson.loads(record_of(result).to_json())
    again = call_metrics(stored["tool_calls"])
    assert again == {name: value for name, value in metrics.items() if name in again}


def test_without_calls_nothing_was_wrong():
    metrics = call_metrics([])
    assert metrics["valid_rate"] == 1.0
    assert metrics["ok_rate"] == 1.0
    assert metrics["error_rate"] == 0.0


def test_every_status_has_its_place_in_the_sum():
    base = {"schema_valid": False, "repairs": (), "duplicate": False, "name": "t", "duration_s": 0.5}
    metrics = call_metrics([{**base, "status": status} for status in ToolStatus])
    assert metrics["tool_calls_attempted"] == len(ToolStatus)
    assert metrics["tool_calls_attempted"] == sum(metrics[f"tool_calls_{part}"] for part in PARTS)
    assert metrics["tool/t/calls"] == 3
    assert metrics["tool/t/errors"] == 2
    assert metrics["tool/t/seconds"] == 1.5


def test_nested_calls_stand_apart():
    base = {"schema_valid": True, "repairs": (), "duplicate": False, "name": "t", "duration_s": 0.0, "status": "ok"}
    metrics = call_metrics([base, {**base, "parent": "a"}])
    assert metrics["tool_calls_attempted"] == 1
    assert metrics["nested_calls"] == 1


def test_the_counters_of_hermes_agent_keep_its_meaning_next_to_ours():
    def stored(status: str, exit_code: int | None = None, schema_valid: bool = True) -> dict[str, Any]:
        made = {"name": "t", "status": status, "exit_code": exit_code, "schema_valid": schema_valid, "repairs": ()}
        return {**made, "duplicate": False, "duration_s": 0.0}

    metrics = call_metrics(
        [
            stored("ok", 0),
            stored("ok", 1),
            stored("error"),  # read_file of a missing file: no exit code, so not an error there
            stored("error", -1),
            stored("timeout", 124),
            stored("invalid", schema_valid=False),
            stored("unknown", schema_valid=False),
            stored("malformed", schema_valid=False),
        ]
    )
    there = {name.partition("/")[2]: n for name, n in metrics.items() if name.startswith("hermes_agent/")}
    assert there == {
        "tool_calls_attempted": 6, "tool_calls_schema_valid": 5, "tool_calls_executed_ok": 3,
        "tool_calls_exec_error": 3, "tool_errors": 4,
    }  # fmt: skip
    assert (metrics["tool_calls_attempted"], metrics["tool_calls_exec_error"]) == (8, 3)
