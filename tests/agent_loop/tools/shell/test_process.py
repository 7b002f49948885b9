"""Background processes: every action, right exit codes, logs by lines, PTY, and only our own."""

import asyncio
import time

import pytest

from agent_loop.tools import SandboxTools
from agent_loop.turn.tool_call import ToolStatus
from support.pool_wait import eventually
from support.tools_calls import Tools

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def start(tools, command, **more):
    result = await tools("terminal", command=command, background=True, **more)
    assert (result["output"], result["exit_code"], result["error"]) == ("Background process started", 0, None)
    assert result["session_id"].startswith("proc_")
    assert isinstance(result["pid"], int)
    return result["session_id"]


async def until(tools, session_id, text):
    """Poll until the output has the text."""

    async def has_it():
        state = await tools("process", action="poll", session_id=session_id)
        return state if text in state["output_preview"] else None

    return await eventually(has_it)


@pytest.mark.parametrize(
    ("ending", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("no_such_command", 127)]
)
async def test_wait_gives_the_real_exit_code(tools, ending, code):
    session_id = await start(tools, f"echo working; {ending}")
    result = await tools("process", action="wait", session_id=session_id)
    assert (result["status"], result["exit_code"]) == ("exited", code)
    assert result["output"].startswith("working\n")


async def test_poll_says_running_then_exited(tools):
    session_id = await start(tools, "echo one; read line; echo two")
    state = await until(tools, session_id, "one")
    assert state["status"] == "running"
    assert "exit_code" not in state
    await tools("process", action="submit", session_id=session_id, data="go")
    state = await until(tools, session_id, "two")
    await tools("process", action="wait", session_id=session_id)
    state = await tools("process", action="poll", session_id=session_id)
    assert (state["status"], state["exit_code"], state["output_preview"]) == ("exited", 0, "one\ntwo\n")


async def test_wait_returns_when_the_process_ends_not_later(tools):
    session_id = await start(tools, "sleep 0.5")
    began = time.monotonic()
    assert (await tools("process", action="wait", session_id=session_id, timeout=25))["status"] == "exited"
    assert time.monotonic() - began < 20


async def test_wait_gives_up_at_its_timeout_with_what_there_is(tools):
    session_id = await start(tools, "echo partial; sleep 60")
    await until(tools, session_id, "partial")
    result = await tools("process", action="wait", session_id=session_id, timeout=1)
    assert (result["status"], result["output"]) == ("timeout", "partial\n")


async def test_wait_lowers_a_timeout_that_is_too_long(tools):
    session_id = await start(tools, "true")
    assert (
        "lowered to 30 s"
        in (await tools("process", action="wait", session_id=session_id, timeout=9999))["timeout_note"]
    )


async def test_the_log_is_paged_by_lines(tools):
    session_id = await start(tools, "seq 1 1000")
    await tools("process", action="wait", session_id=session_id)
    last = await tools("process", action="log", session_id=session_id)
    assert (last["total_lines"], last["output"].split("\n")[0], last["output"].split("\n")[-1]) == (1000, "801", "1000")
    page = await tools("process", action="log", session_id=session_id, offset=10, limit=3)
    assert (page["output"], page["next_offset"]) == ("11\n12\n13", 13)
    assert (await tools("process", action="log", session_id=session_id, offset=5000))["output"] == ""


async def test_a_long_log_rolls_and_says_so(tools):
    session_id = await start(tools, "seq 1 200000")
    await tools("process", action="wait", session_id=session_id)
    log = await tools("process", action="log", session_id=session_id, limit=2)
    assert log["output"] == "199999\n200000"
    assert "no longer kept" in log["note"]
    assert (await tools("process", action="poll", session_id=session_id))["output_preview"].endswith("\n200000\n")


async def test_kill_ends_the_whole_tree(tools):
    session_id = await start(tools, "sleep 62 & setsid sleep 63 & echo up; wait")
    await until(tools, session_id, "up")
    await tools.started("sleep 62", "sleep 63")
    result = await tools("process", action="kill", session_id=session_id)
    assert result["status"] == "killed"
    assert result["exit_code"] not in (0, None)
    assert await tools.gone("sleep 6[23]")
    assert (await tools("process", action="kill", session_id=session_id))["status"] == "already_exited"


async def test_kill_is_not_fooled_by_a_process_that_ignores_term(tools):
    session_id = await start(tools, "trap '' TERM; echo up; while :; do sleep 0.1; done")
    await until(tools, session_id, "up")
    assert (await tools("process", action="kill", session_id=session_id))["status"] == "killed"


async def test_write_is_raw_submit_adds_enter_close_ends_stdin(tools):
    session_id = await start(tools, "cat")
    await tools("process", action="write", session_id=session_id, data="ab")
    result = await tools("process", action="submit", session_id=session_id, data="cé")
    assert (result["status"], result["bytes_written"]) == ("ok", 4)
    await until(tools, session_id, "abcé\n")
    assert (await tools("process", action="close", session_id=session_id))["status"] == "ok"
    result = await tools("process", action="wait", session_id=session_id, timeout=10)
    assert (result["exit_code"], result["output"]) == (0, "abcé\n")


async def test_an_interactive_program_on_a_pseudo_terminal(tools):
    session_id = await start(tools, "python3 -q", pty=True)
    await until(tools, session_id, ">>>")
    await tools("process", action="submit", session_id=session_id, data="print(6 * 7)")
    state = await until(tools, session_id, "42")
    assert "\x1b" not in state["output_preview"]
    await tools("process", action="close", session_id=session_id)
    assert (await tools("process", action="wait", session_id=session_id, timeout=10))["exit_code"] == 0


async def test_list_shows_all_of_them(tools):
    assert (await tools("process", action="list"))["processes"] == []
    one = await start(tools, "echo first; exit 3")
    await tools("process", action="wait", session_id=one)
    two = await start(tools, "sleep 30")
    rows = (await tools("process", action="list"))["processes"]
    assert [(row["session_id"], row["status"]) for row in rows] == [(one, "exited"), (two, "running")]
    assert (rows[0]["exit_code"], rows[0]["output_preview"], rows[1]["command"]) == (3, "first\n", "sleep 30")


async def test_talking_to_a_process_that_has_ended_is_an_error(tools):
    session_id = await start(tools, "true")
    await tools("process", action="wait", session_id=session_id)
    for action in ("write", "submit", "close"):
        assert (await tools("process", action=action, session_id=session_id, data="x"))["status"] == "already_exited"


async def test_an_unknown_or_missing_id_is_an_error(tools):
    assert (await tools("process", action="poll", session_id="proc_000000000000"))["status"] == "not_found"
    assert "session_id" in (await tools("process", action="poll"))["error"]
    assert tools.outcome.status is ToolStatus.INVALID
    assert "error" in await tools("process", action="dance")


async def test_another_rollout_cannot_see_or_stop_it(tools, pool, spec):
    session_id = await start(tools, "sleep 30")
    async with pool.lease("other", spec) as sandbox, SandboxTools(sandbox, ["terminal"]) as runtime:
        other = Tools(runtime, sandbox)
        assert (await other("process", action="list"))["processes"] == []
        for action in ("poll", "kill", "log"):
            assert (await other("process", action=action, session_id=session_id))["status"] == "not_found"
    assert (await tools("process", action="poll", session_id=session_id))["status"] == "running"


async def test_secrets_and_escapes_are_cleaned_in_logs_too(tools):
    session_id = await start(tools, r"printf '\033[1m%s\033[0m\n' " + '"$API_TOKEN"')
    await tools("process", action="wait", session_id=session_id)
    log = await tools("process", action="log", session_id=session_id)
    assert log["output"] == "[REDACTED:API_TOKEN]"


async def test_background_commands_start_where_the_shell_stands(tools):
    await tools("terminal", command="mkdir -p bg && cd bg && export WHERE=here")
    session_id = await start(tools, 'pwd; echo "$WHERE"')
    result = await tools("process", action="wait", session_id=session_id)
    assert result["output"].endswith("/bg\nhere\n")


async def test_closing_the_runtime_ends_its_watchers(sandbox):
    async with SandboxTools(sandbox, ["terminal"]) as runtime:
        await runtime.call(
            "terminal", {"command": "sleep 30", "background": True, "notify_on_complete": True}, call_id="1"
        )
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith("watch proc_")]
