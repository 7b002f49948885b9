"""The terminal on a real shell, isolated and plain."""

import asyncio
import json

import pytest

from agent_loop.limits import Limits
from agent_loop.tools import ToolConfig
from agent_loop.tools.shell.terminal import sudo_hint
from agent_loop.turn.calls import Dispatcher
from agent_loop.turn.tool_call import ToolCallRecord, ToolStatus
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
        assert await tools.runtime.wait_for_notice()
        (notice,) = tools.runtime.pending_notices()
        assert notice["role"] == "user"
        assert f"{started['session_id']} completed (exit code 5)" in notice["content"]
        assert "done" in notice["content"]
        assert tools.runtime.pending_notices() == []
        assert not await tools.runtime.wait_for_notice()

    @pytest.mark.parametrize("action", ["wait", "poll", "log", "kill", "list"])
    async def test_an_end_that_a_result_has_told_is_not_announced_again(self, tools, action):
        started = await tools("terminal", command="true", background=True, notify_on_complete=True)
        await tools.runtime.wait_for_notice()
        await tools("process", action=action, session_id=started["session_id"])
        assert tools.runtime.pending_notices() == []
        assert not await tools.runtime.wait_for_notice()

    async def test_a_line_with_a_watched_text_is_told_while_the_process_runs(self, tools):
        started = await tools(
            "terminal",
            command="echo starting; echo listening on 80; echo $API_TOKEN listening; read stop",
            background=True,
            watch_patterns=["listening"],
            notify_on_complete=True,
        )
        assert started["watch_patterns"] == ["listening"]
        assert await tools.runtime.wait_for_notice()
        (notice,) = tools.runtime.pending_notices()
        assert 'matched watch pattern "listening"' in notice["content"]
        assert "listening on 80\n[REDACTED:API_TOKEN] listening" in notice["content"]
        assert "starting" not in notice["content"].split("Matched output:")[1]
        await tools("process", action="kill", session_id=started["session_id"])

    async def test_a_pattern_alone_is_not_waited_for(self, tools):
        await tools("terminal", command="sleep 30", background=True, watch_patterns=["never"])
        assert not await tools.runtime.wait_for_notice()

    async def test_a_chatty_process_is_not_announced_for_ever(self, tools, monkeypatch):
        monkeypatch.setattr("agent_loop.tools.shell.process_table.MAX_MATCH_NOTICES", 1)
        command = "echo hit; sleep 1.2; echo hit"
        await tools("terminal", command=command, background=True, watch_patterns=["hit"], notify_on_complete=True)
        notices = []
        while await tools.runtime.wait_for_notice():
            notices += tools.runtime.pending_notices()
        assert ["the last for this process" in notice["content"] for notice in notices] == [True, False]
        assert "completed" in notices[1]["content"]

    async def test_without_asking_there_is_no_notice(self, tools):
        started = await tools("terminal", command="true", background=True)
        await tools("process", action="wait", session_id=started["session_id"])
        assert not await tools.runtime.wait_for_notice()
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

    async def test_a_process_that_ended_unseen_does_not_count_as_running(self, tools):
        await tools("terminal", command="echo > ended", background=True)
        await tools.sh("until [ -e ended ]; do sleep 0.02; done; sleep 0.2")
        for _ in range(3):
            started = await tools("terminal", command="true", background=True)
            assert "session_id" in started, started
            await tools("process", action="wait", session_id=started["session_id"])


class TestWhatIsSaidWithIt:
    @pytest.mark.parametrize(
        ("command", "exit_code", "said"),
        [
            ("echo a | grep b", 1, "nothing was found"),
            ("echo a > x; echo b > y; diff x y", 1, "differ"),
            ("true && [ 1 = 2 ]", 1, "condition is false"),
            ("LC_ALL=C /bin/grep b /dev/null;", 1, "nothing was found"),
            ("grep b /dev/null || test -e missing", 1, "condition is false"),
        ],
    )
    async def test_an_exit_code_that_is_no_failure_says_what_it_means(self, tools, command, exit_code, said):
        result = await tools("terminal", command=command)
        assert result["exit_code"] == exit_code
        assert said in result["exit_code_meaning"]

    @pytest.mark.parametrize("command", ["true", "grep a missing", "false", "grep x /dev/null; false", "ls missing"])
    async def test_what_is_simply_success_or_failure_has_no_meaning(self, tools, command):
        assert "exit_code_meaning" not in await tools("terminal", command=command)

    async def test_parameters_of_hermes_agent_that_do_nothing_here_are_said_to_be_ignored(self, tools):
        result = await tools("terminal", command="true", check_interval=5, force=True, notify_on_complete=True)
        assert "check_interval is ignored" in result["note"]
        assert "force is ignored" in result["note"]
        assert "background=true only" in result["note"]
        started = await tools("terminal", command="true", background=True, check_interval=5, timeout=3)
        assert "timeout does not apply" in started["note"]
        assert "check_interval is ignored" in started["note"]
        assert "note" not in await tools("terminal", command="true", force=False)

    async def test_the_schema_names_the_timeouts_that_apply(self, tools):
        (schema,) = [s for s in tools.runtime.schemas() if s["function"]["name"] == "terminal"]
        assert "(default 20, at most 30)" in schema["function"]["parameters"]["properties"]["timeout"]["description"]

    async def test_sudo_where_privileges_cannot_be_gained_is_explained(self):
        said = 'sudo: The "no new privileges" flag is set, which prevents sudo from running as root.'
        assert "no_new_privs" in sudo_hint("sudo ls", said)
        assert sudo_hint("ls", said) is None


class TestRedactionByShape:
    @pytest.fixture
    def config(self):
        return ToolConfig(redact_shapes=True)

    async def test_what_looks_like_a_secret_is_hidden(self, tools):
        result = await tools("terminal", command="echo key sk-proj-abcdefghij0123456789 end")
        assert result["output"] == "key [REDACTED] end\n"


class TestWorkingDirectory:
    @pytest.mark.parametrize("how", [{}, {"background": True}, {"pty": True}])
    async def test_a_bad_workdir_is_an_error_with_a_sentence(self, tools, how):
        await tools.sandbox.write_file("file", b"")
        for workdir in ("missing", "file"):
            result = await tools("terminal", command="touch ran", workdir=workdir, **how)
            assert f"/{workdir} cannot be used" in result["error"]
            assert (result["exit_code"], tools.outcome.status) == (126, ToolStatus.ERROR)
        assert await tools.sandbox.stat("ran") is None

    async def test_a_program_of_its_own_that_ends_with_126_is_not_a_bad_workdir(self, tools):
        result = await tools("terminal", command="echo cd: no; exit 126")
        assert (result["exit_code"], result["error"], result["output"]) == (126, None, "cd: no\n")

    @pytest.mark.parametrize("how", [{"background": True}, {"pty": True}])
    async def test_a_deleted_session_folder_is_told_to_every_kind_of_command(self, tools, how):
        await tools("terminal", command='mkdir gone && cd gone && rmdir "$PWD"')
        assert "/gone cannot be used" in (await tools("terminal", command="true", **how))["error"]
        assert "error" not in await tools("write_file", path="back.txt", content="x")
        assert (await tools("terminal", command="cat back.txt"))["output"] == "x"

    async def test_a_deleted_workspace_is_told_too(self, tools):
        await tools("terminal", command='rm -rf "$PWD"')
        assert "now stands in /." in (await tools("terminal", command="true"))["error"]
        assert (await tools("terminal", command="pwd"))["output"] == "/\n"

    async def test_cd_minus_goes_back_as_in_any_shell(self, tools):
        await tools("terminal", command="mkdir -p a b; cd a")
        await tools("terminal", command="cd ../b")
        assert (await tools("terminal", command="cd - > /dev/null; pwd"))["output"].endswith("/a\n")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("terminal", {"command": "echo printed; touch there; sleep 100; echo never"}),
        ("terminal", {"command": "echo printed; touch there; sleep 100; echo never", "pty": True}),
        ("execute_code", {"code": "import time\nprint('printed', flush=True)\nopen('there', 'w')\ntime.sleep(100)"}),
    ],
)
async def test_a_stopped_call_keeps_what_it_had_printed(tools, name, arguments):
    call = ToolCallRecord(name, arguments, "stopped", arguments=arguments)
    running = asyncio.create_task(Dispatcher(tools.runtime, Limits()).run([call], None))

    async def printed():
        return await tools.sandbox.stat("there") is not None

    await eventually(printed)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert call.status is ToolStatus.CANCELLED
    assert "printed" in json.loads(call.text)["output"]
    assert "never" not in json.loads(call.text)["output"]
    assert (await tools("terminal", command="echo next"))["output"] == "next\n"
