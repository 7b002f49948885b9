"""Behaviours of hermes-agent that users rely on: every row of behaviours.yaml has a test of its name in this folder."""

import asyncio
import logging
import re
import threading
from pathlib import Path

import pytest
import yaml

from agent_loop.context.result_budget import ResultBudget, apply_budget
from agent_loop.limits import Limits
from agent_loop.loop import HermesAgentLoop
from agent_loop.tools.policy import CommandPolicy, PolicyCheck
from agent_loop.turn.tool_call import ToolCallRecord, ToolStatus
from environments.config.loader import load_config
from environments.config.settings import HermesAgentEnvConfig, RunConfig
from support.loop_servers import ScriptedServer, call, calls, echo, says, tool, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

TABLE = yaml.safe_load(Path(__file__).with_name("behaviours.yaml").read_text())
DIFFERENCES = Path(__file__).parents[2] / "docs" / "reference" / "hermes-agent.md"


async def test_every_behaviour_of_the_table_has_its_test():
    named = [name for rows in TABLE.values() for name in rows]
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py"))]
    tests = [name for source in sources for name in re.findall(r"^async def test_(\w+)", source, re.MULTILINE)]
    of_the_table = {"every_behaviour_of_the_table_has_its_test", "every_difference_has_a_reason"}
    assert sorted(named) == sorted(set(tests) - of_the_table)


async def test_every_difference_has_a_reason():
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", DIFFERENCES.read_text(), re.MULTILINE)
    assert len([row for row in rows if row[0] != "hermes-agent" and "---" not in row[0]]) >= 20
    assert all(reason.strip() for *_, reason in rows)


# The loop


async def test_unknown_tool_error_names_the_tools():
    server = ScriptedServer(calls(call("nope", {})), says("done"))
    result = await HermesAgentLoop(server, [tool()], tool_handler=echo).run(user())
    assert "Available tools: terminal" in result.messages[2]["content"]
    assert [error.tool_name for error in result.tool_errors] == ["nope"]


class TextServer:
    """A chat server whose model writes its calls as text."""

    def __init__(self, *texts):
        self.texts = list(texts)

    async def chat_completion(self, **kwargs):
        message = {"role": "assistant", "content": self.texts.pop(0)}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}


async def test_plain_text_arguments_run():
    text = '<tool_call>{"name": "terminal", "arguments": "ls -la"}</tool_call>'
    result = await HermesAgentLoop(TextServer(text, "done"), [tool()], tool_handler=echo).run(user())
    (made,) = result.tool_calls
    assert (made.status, made.arguments, made.repairs) == (ToolStatus.OK, {"command": "ls -la"}, ("plain_string",))
    assert not made.schema_valid


async def test_sync_handler_is_bounded():
    released = threading.Event()
    server = ScriptedServer(calls(call()), says("done"))
    loop = HermesAgentLoop(
        server, [tool()], tool_handler=lambda *_: released.wait(), limits=Limits(tool_timeout_s=0.05)
    )
    result = await loop.run(user())
    released.set()
    assert [made.status for made in result.tool_calls] == [ToolStatus.TIMEOUT]


# Background processes


async def test_completion_is_announced_once(tools):
    started = await tools("terminal", command="echo built", background=True, notify_on_complete=True)
    assert await tools.runtime.wait_for_notice()
    (notice,) = tools.runtime.pending_notices()
    assert f"{started['session_id']} completed (exit code 0)" in notice["content"]
    assert tools.runtime.pending_notices() == []


async def test_completion_after_answer_is_heard(tools):
    command = {"command": "sleep 0.3; echo built", "background": True, "notify_on_complete": True}
    server = ScriptedServer(calls(call(arguments=command)), says("I wait."), says("It is built."))
    result = await HermesAgentLoop(server, runtime=tools.runtime).run(user())
    assert "completed (exit code 0)" in result.messages[-2]["content"]
    assert result.messages[-1]["content"] == "It is built."


async def test_watch_patterns_are_announced(tools):
    command = "echo listening on 80; read wait"
    await tools("terminal", command=command, background=True, watch_patterns=["listening"], notify_on_complete=True)
    assert await tools.runtime.wait_for_notice()
    (notice,) = tools.runtime.pending_notices()
    assert "listening on 80" in notice["content"]


async def test_ended_processes_free_their_place(tools):
    await tools("terminal", command="echo > ended", background=True)
    await tools.sh("until [ -e ended ]; do sleep 0.02; done; sleep 0.2")
    assert "session_id" in await tools("terminal", command="true", background=True)


# terminal


async def test_exit_code_meaning_is_given(tools):
    result = await tools("terminal", command="grep nothing /dev/null")
    assert (result["exit_code"], result["error"], "not an error" in result["exit_code_meaning"]) == (1, None, True)


async def test_bad_workdir_is_126(tools):
    result = await tools("terminal", command="pwd", workdir="/missing")
    assert (result["exit_code"], "/missing" in result["error"]) == (126, True)


async def test_timeout_is_124_with_output(tools):
    result = await tools("terminal", command="echo so far; sleep 30", timeout=1)
    assert (result["exit_code"], result["output"]) == (124, "so far\n")


async def test_largest_timeout_is_in_the_schema(tools):
    terminal = next(s["function"] for s in tools.runtime.schemas() if s["function"]["name"] == "terminal")
    assert "at most 30" in terminal["parameters"]["properties"]["timeout"]["description"]


async def test_dangerous_commands_are_asked_about():
    asked = []

    async def ask(name, text, reason):
        asked.append(text)
        return "session"

    check = PolicyCheck(CommandPolicy(rule_sets=("hermes_agent",)), ask)
    for command in ("git reset --hard", "git push --force", "ls"):
        assert (await check.decide("terminal", command)).allowed
    assert asked == ["git reset --hard"]


# Files


async def test_read_lines_are_numbered(tools):
    await tools.sandbox.write_file("n", "".join(f"{n}\n" for n in range(5000)))
    assert (await tools("read_file", path="n"))["next_offset"] == 501
    assert (await tools("read_file", path="n", limit=9999))["next_offset"] == 2001
    assert (await tools("read_file", path="n", limit=1))["content"] == "1|0"


async def test_third_identical_read_warns(tools):
    await tools.sandbox.write_file("n", b"x\n")
    for _ in range(3):
        assert "_warning" not in await tools("read_file", path="n")
        await tools("terminal", command="true")
    results = [await tools("read_file", path="n") for _ in range(3)]
    assert "3 times in a row" in results[-1]["_warning"]


async def test_stale_write_warns(tools):
    await tools.sandbox.write_file("n", b"x\n")
    await tools("read_file", path="n")
    await tools("terminal", command="echo y > n")
    assert "had changed" in (await tools("write_file", path="n", content="z\n"))["_warning"]


async def test_lint_tells_new_errors_from_old(tools):
    assert "note" not in (await tools("write_file", path="a.py", content="x = (\n"))["lint"]
    assert "before this change too" in (await tools("write_file", path="a.py", content="y = (\n"))["lint"]["note"]


# patch


async def test_v4a_moves_files(tools):
    await tools.sandbox.write_file("a", b"x\n")
    await tools("patch", mode="patch", patch="*** Begin Patch\n*** Move File: a -> d/b\n*** End Patch")
    assert await tools.sh("cat d/b; ls") == "x\nd\n"


async def test_v4a_context_needs_no_prefix(tools):
    await tools.sandbox.write_file("a", b"one\ntwo\n")
    result = await tools(
        "patch", mode="patch", patch="*** Begin Patch\n*** Update File: a\none\n-two\n+2\n*** End Patch"
    )
    assert "read as context" in result["match"]
    assert await tools.sh("cat a") == "one\n2\n"


async def test_v4a_markers_need_no_space(tools):
    await tools.sandbox.write_file("a", b"x\n")
    await tools("patch", mode="patch", patch="***Begin Patch\n***Update File: a\n-x\n+y\n***End Patch")
    assert await tools.sh("cat a") == "y\n"


async def test_typography_is_tolerated(tools):
    await tools.sandbox.write_file("a", "say \u201chi\u201d \u2014 now, please\n")
    result = await tools("patch", path="a", old_string='"hi" -- now', new_string="bye")
    assert "dashes inside a line" in result["match"]
    assert await tools.sh("cat a") == "say bye, please\n"


# execute_code


async def test_directory_is_shared(tools):
    await tools.script("from hermes_tools import terminal\nterminal('mkdir d && cd d')")
    assert (await tools("terminal", command="pwd"))["output"].endswith("/d\n")


async def test_children_end_with_the_script(tools):
    await tools.script("import subprocess; subprocess.Popen(['setsid', 'sleep', '621'])")
    assert await tools.running("sleep 621") == []


async def test_no_bytecode_is_left(tools):
    await tools.sandbox.write_file("mod.py", b"")
    await tools.script("import mod")
    assert await tools.sh("find . -name __pycache__") == ""


# Budgets and configs


async def test_read_file_is_never_cut(tools):
    await tools.sandbox.write_file("n", '"quoted line"\n' * 2000)
    outcome = await tools.runtime.checked_call("read_file", {"path": "n", "limit": 2000})
    made = ToolCallRecord("read_file", text=outcome.text)
    await apply_budget([made], ResultBudget(per_result_chars=5000), tools.runtime.store_result)
    assert "left out" not in made.text
    assert '"next_offset"' in made.text


async def test_budget_keys_are_read():
    config = HermesAgentEnvConfig(preview_size_chars=10, tool_result_overrides={"terminal": 20})
    assert (config.preview_size_chars, config.tool_result_overrides) == (10, {"terminal": 20})


async def test_yamls_load(tmp_path, caplog):
    path = tmp_path / "run.yaml"
    await asyncio.to_thread(path.write_text, "env: {terminal_backend: modal}\nopenai: {health_check: false}\n")
    with caplog.at_level(logging.WARNING):
        assert load_config(RunConfig, path).env.pool.provider == "modal"
    assert "'modal' -> env.pool.provider: 'modal'" in caplog.text
