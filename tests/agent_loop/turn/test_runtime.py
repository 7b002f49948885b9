"""What a tool handler may return."""

from __future__ import annotations

import pytest

from agent_loop.turn.runtime import as_outcome
from agent_loop.turn.tool_call import ToolOutcome, ToolStatus


@pytest.mark.parametrize(
    ("result", "status", "exit_code"),
    [
        ("plain text", ToolStatus.OK, None),
        ('{"output": "x", "exit_code": 0}', ToolStatus.OK, 0),
        ('{"output": "x", "exit_code": 1, "error": null}', ToolStatus.OK, 1),
        ('{"error": "no such file"}', ToolStatus.ERROR, None),
        ('{"error": "x", "exit_code": -1}', ToolStatus.ERROR, -1),
        ('{"output": "", "exit_code": -1}', ToolStatus.ERROR, -1),
        ('{"exit_code": true}', ToolStatus.OK, None),
        ("{not json", ToolStatus.OK, None),
        ({"error": "dict"}, ToolStatus.ERROR, None),
        (None, ToolStatus.OK, None),
        (ToolOutcome("t", ToolStatus.TIMEOUT), ToolStatus.TIMEOUT, None),
    ],
)
def test_a_handlers_return_value_is_read_for_error_and_exit_code(result, status, exit_code):
    outcome = as_outcome(result)
    assert outcome.status is status
    assert outcome.exit_code == exit_code
    assert isinstance(outcome.text, str)
