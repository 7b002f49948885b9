"""The terminal on a real shell, isolated and plain."""

import asyncio

import pytest

from agent_loop.tools import ToolConfig
from agent_loop.turn.tool_call import ToolStatus
from support.pool_wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_result_has_output_exit_code_and_error(tools):
    assert await tools("terminal", command="echo out; echo err >&2") == {
        "output": "out\nerr\n",
        "exit_code": 0,
        "error": None,
    }
    assert tools.outcome.status is ToolStatus.OK


async def test_a_failing_command_is_a_result_with_its_exit_code(tools):
    result = await tools("terminal", command="echo no; exit 3")
    assert (result["output"], result["exit_code"], result["error"]) == ("no\n", 3, None)
    assert (tools.outcome.status, tools.outcome.exit_code) == (ToolStatus.OK, 3)


async def test_directory_and_environment_persist(tools):
    await tools("terminal", command="mkdir -p sub/dir && cd sub/dir && export COLOR=blue")
    result = await tools("terminal", command='pwd; echo "$COLOR"')
    assert result["output"].endswith("/sub/dir\nblue\n")


async def test_file_tools_start_where_the_shell_stands(tools):
    await tools("terminal", command="mkdir -p deep && cd deep")
    await tools("write_file", path="here.txt", content="x\n")
    assert (await tools("terminal", command="cat here.txt; cd ..; cat deep/here.txt"))["output"] == "x\nx\n"
    assert (await tools("read_file", path="deep/here.txt"))["content"] == "1|x"


async def test_workdir_is_for_one_command_only(tools):
    await tools("terminal", command="mkdir -p one")
    assert (await tools("terminal", command="pwd", workdir="one"))["output"].endswith("/one\n")
    assert not (await tools("terminal", command="pwd"))["output"].endswith("/one\n")


async def test_a_bad_workdir_is_said(tools):
    result = await tools("terminal", command="echo hi", workdir="/no/such/place")
    assert result["exit_code"] == 126
    assert "/no/such/place" in (result["error"] or "") + result["output"]


async def test_a_timeout_kills_the_command_and_keeps_its_output(tools):
    result = await tools("terminal", command="echo before; sleep 60", timeout=4)
    assert (result["output"], result["exit_code"]) == ("before\n", 124)
    assert "4 s" in result["error"]
    assert tools.outcome.status is ToolStatus.TIMEOUT
    assert await tools.gone("sleep 60")


async def test_a_timeout_that_is_too_long_is_lowered_with_a_note(tools):
    result = await tools("terminal", command="true", timeout=5000)
    assert "5000 s was lowered to 30 s" in result["timeout_note"]


async def test_a_command_runs_once_also_when_it_fails(tools):
    await tools("terminal", command="echo x >> runs; exit 1")
    await tools("terminal", command="echo x >> runs; sleep 60", timeout=4)
    assert await tools.sh("wc -l < runs") == "2\n"


async def test_escapes_are_removed_and_secrets_we_hold_are_hidden(tools):
    result = await tools("terminal", command=r"printf '\033[31mred\033[0m %s\n' " + '"$API_TOKEN"')
    assert result["output"] == "red [REDACTED:API_TOKEN]\n"


async def test_long_output_keeps_head_and_tail_and_says_where_the_rest_is(tools):
    result = await tools("terminal", command="seq 1 100000")
    assert result["output"].startswith("1\n2\n")
    assert result["output"].endswith("99999\n100000\n")
    assert len(result["output"]) < 51_000
    assert result["truncation"]["omitted_chars"] > 500_000
    assert await tools.sh(f"tail -n 1 {result['truncation']['full_output']}") == "100000\n"


async def test_a_child_that_keeps_the_output_open_does_not_delay_the_result(tools):
    result = await asyncio.wait_for(tools("terminal", command="sleep 30 & echo started"), 10)
    assert (result["output"], result["exit_code"]) == ("started\n", 0)


async def test_sudo_fails_fast_with_a_clear_text(tools):
    await tools.sandbox.write_file(
        "bin/sudo", b"#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n", mode=0o755
    )
    result = await asyncio.wait_for(tools("terminal", command='PATH="$PWD/bin:$PATH" sudo id'), 10)
    assert result["exit_code"] == 1
    assert "without sudo" in result["hint"]


async def test_interactive_programs_end_and_get_a_hint(tools):
    result = await asyncio.wait_for(tools("terminal", command="TERM= top"), 10)
    assert result["exit_code"] != 0
    assert "top needs a terminal" in result["hint"]


async def test_a_pseudo_terminal_in_the_foreground(tools):
    result = await tools("terminal", command="test -t 1 && echo tty; exit 4", pty=True)
    assert (result["output"], result["exit_code"]) == ("tty\n", 4)


async def test_a_pseudo_terminal_times_out_too(tools):
    result = await tools("terminal", command="echo a; sleep 60", pty=True, timeout=4)
    assert (result["output"], result["exit_code"]) == ("a\n", 124)
    assert tools.outcome.status is ToolStatus.TIMEOUT
    assert await tools.gone("sleep 60")


@pytest.mark.parametrize("command", ["", "  ", "a\0b", "\ud800"])
async def test_what_is_no_command_is_not_run(tools, command):
    result = await tools("terminal", command=command)
    assert result["error"]
    assert tools.outcome.status is ToolStatus.INVALID


async def test_unicode_goes_in_and_out(tools):
    assert (await tools("terminal", command="echo 'héllo 漢字 🎉'"))["output"] == "héllo 漢字 🎉\n"


async def test_cancelling_the_call_kills_the_command(tools):
    call = asyncio.create_task(tools("terminal", command="sleep 61"))
    await tools.started("sleep 61")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await tools.gone("sleep 61")


class TestNotices:
    async def test_a_background_command_reports_its_end_before_the_next_turn(self, tools):
        started = await tools(
            "terminal", command="sleep 0.2; echo done; exit 5", background=True, notify_on_complete=True
        )
        assert started["notify_on_complete"] is True
        await tools("process", action="wait", session_id=started["session_id"])
        (notice,) = await eventually(tools.runtime.pending_notices)
        assert notice["role"] == "user"
        assert f"{started['session_id']} completed (exit code 5)" in notice["content"]
        assert "done" in notice["content"]
        assert tools.runtime.pending_notices() == []

    async def test_without_asking_there_is_no_notice(self, tools):
        started = await tools("terminal", command="true", background=True)
        await tools("process", action="wait", session_id=started["session_id"])
        await asyncio.sleep(0.1)
        assert tools.runtime.pending_notices() == []


class TestSmallBudget:
    @pytest.fixture
    def config(self):
        return ToolConfig(max_output_chars=1000, max_processes=1)

    async def test_the_budget_is_the_configured_one(self, tools):
        result = await tools("terminal", command="seq 1 10000")
        assert len(result["output"]) < 1300
        pty = await tools("terminal", command="seq 1 10000", pty=True)
        assert len(pty["output"]) < 1300
        assert pty["output"].endswith("10000\n")

    async def test_the_number_of_background_processes_is_limited(self, tools):
        first = await tools("terminal", command="sleep 30", background=True)
        assert "1 background processes" in (await tools("terminal", command="sleep 30", background=True))["error"]
        await tools("process", action="kill", session_id=first["session_id"])
        assert "session_id" in await tools("terminal", command="true", background=True)
