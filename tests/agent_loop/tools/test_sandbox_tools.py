"""The runtime as the loop sees it: outcomes for everything, records of decisions, and whole rollouts."""

import asyncio
import json

import pytest
import pytest_asyncio

from agent_loop.loop import HermesAgentLoop
from agent_loop.outcome import Outcome
from agent_loop.tools import CommandPolicy, Rule, SandboxTools, ToolConfig, ToolsetError
from agent_loop.tools.config import LocalWebConfig
from agent_loop.turn.tool_call import ToolStatus
from sandbox_pool.errors import SandboxLost
from support.loop_servers import ScriptedServer, call, calls, says
from support.tools_calls import Tools

pytestmark = pytest.mark.asyncio(loop_scope="session")


def names(runtime):
    return [schema["function"]["name"] for schema in runtime.schemas()]


async def test_terminal_and_file_are_the_default_six(sandbox):
    runtime = SandboxTools(sandbox)
    assert names(runtime) == ["terminal", "process", "read_file", "write_file", "patch", "search_files"]
    assert [name for name in names(runtime) if runtime.parallel_safe(name)] == ["read_file", "search_files"]
    assert not runtime.parallel_safe("nope")


async def test_a_bad_selection_is_an_error_for_the_user(sandbox):
    with pytest.raises(ToolsetError, match="unknown toolset"):
        SandboxTools(sandbox, ["browser"])
    with pytest.raises(ToolsetError, match="no tools"):
        SandboxTools(sandbox, [])
    with pytest.raises(ToolsetError, match="web_search, web_extract need a web provider"):
        SandboxTools(sandbox, ["terminal", "web"])


async def test_schemas_given_out_are_copies(sandbox):
    runtime = SandboxTools(sandbox)
    runtime.schemas()[0]["function"]["name"] = "changed"
    assert names(runtime)[0] == "terminal"


async def test_an_unknown_tool_lists_the_known_ones(tools):
    result = await tools("browser", url="x")
    assert "Available: execute_code, patch" in result["error"]
    assert tools.outcome.status is ToolStatus.UNKNOWN


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("terminal", {}),
        ("terminal", {"command": 5.5}),
        ("read_file", {"path": ["a"]}),
        ("write_file", {"path": "x"}),
        ("process", {"action": "explode"}),
        ("todo", {"todos": "not a list"}),
    ],
)
async def test_arguments_that_do_not_fit_the_schema_are_not_run(tools, name, arguments):
    await tools(name, **arguments)
    assert tools.outcome.status is ToolStatus.INVALID


async def test_harmless_forms_of_arguments_are_understood(tools):
    assert (await tools("terminal", command="echo hi", timeout="5", background=None))["output"] == "hi\n"


async def test_the_todo_list_belongs_to_the_rollout(tools, sandbox):
    first = await tools("todo", todos=[{"id": "1", "content": "write", "status": "in_progress"}])
    assert first["summary"]["in_progress"] == 1
    merged = await tools("todo", todos=[{"id": "1", "status": "completed"}, {"id": "2", "content": "run"}], merge=True)
    assert [item["status"] for item in merged["todos"]] == ["completed", "pending"]
    assert await tools("todo") == merged
    async with SandboxTools(sandbox, ["todo"]) as other:
        assert json.loads((await other.call("todo", {}, call_id="")).text)["todos"] == []


async def test_an_over_long_result_can_be_stored_and_read_back(tools):
    path = await tools.runtime.store_result("line é\n" * 1000)
    other = await tools.runtime.store_result("second")
    assert path != other
    assert (await tools("read_file", path=path))["total_lines"] == 1000


async def test_a_fault_in_a_tool_is_a_result_and_valid_json(sandbox):
    class Odd:
        def __getattr__(self, name):
            return getattr(sandbox, name)

        async def read_file(self, *_, **__):
            raise ZeroDivisionError("a bug")

    async with SandboxTools(Odd()) as runtime:
        outcome = await runtime.call("read_file", {"path": "x"}, call_id="")
    assert outcome.status is ToolStatus.ERROR
    assert "ZeroDivisionError" in json.loads(outcome.text)["error"]


async def test_a_lost_sandbox_is_raised(pool, spec):
    lease = await pool.lease("gone", spec)
    runtime = SandboxTools(lease)
    await lease.release()
    for name, arguments in [
        ("terminal", {"command": "true"}),
        ("read_file", {"path": "x"}),
        ("search_files", {"pattern": "x"}),
    ]:
        with pytest.raises(SandboxLost):
            await runtime.call(name, arguments, call_id="")


class TestPolicy:
    RULES = (
        Rule(pattern=r"\bgit push\b", action="deny", reason="no pushing"),
        Rule(pattern=r"\brm\b", action="ask"),
    )

    @pytest_asyncio.fixture(loop_scope="session")
    async def tools(self, sandbox):
        async def ask(tool, text, reason):
            return "build" in text

        config = ToolConfig(policy=CommandPolicy(enforce="always", rules=self.RULES))
        async with SandboxTools(sandbox, ["terminal", "code_execution"], config, ask=ask) as runtime:
            yield Tools(runtime, sandbox)

    async def test_a_denied_command_does_not_run_and_the_decision_is_recorded(self, tools):
        result = await tools("terminal", command="touch ran; git push")
        assert (result["status"], result["exit_code"]) == ("blocked", -1)
        assert "no pushing" in result["error"]
        assert tools.outcome.metadata["policy"] == {
            "allowed": False, "action": "deny", "rule": r"\bgit push\b", "reason": "no pushing",
        }  # fmt: skip
        assert await tools.sh("ls") == ""

    async def test_an_allowed_command_runs_and_the_decision_is_recorded_too(self, tools):
        assert (await tools("terminal", command="echo fine"))["output"] == "fine\n"
        assert tools.outcome.metadata["policy"]["allowed"] is True

    async def test_the_user_is_asked(self, tools):
        await tools.sh("mkdir build other")
        assert (await tools("terminal", command="rm -r build"))["exit_code"] == 0
        assert (await tools("terminal", command="rm -r other"))["status"] == "blocked"
        assert await tools.sh("ls") == "other\n"

    async def test_scripts_and_what_they_call_are_under_the_same_rules(self, tools):
        assert (await tools("execute_code", code="print('git push')"))["status"] == "blocked"
        output = await tools.script("from hermes_tools import terminal\nprint(terminal('git ' + 'push')['status'])")
        assert output == "blocked\n"
        assert tools.outcome.nested[0].status is ToolStatus.ERROR

    async def test_a_callback_that_raises_does_not_leave_a_script_waiting(self, sandbox):
        async def ask(tool, text, reason):
            raise RuntimeError("nobody home")

        rules = (Rule(pattern="danger", action="ask", tools=("terminal",)),)
        config = ToolConfig(policy=CommandPolicy(enforce="always", rules=rules))
        async with SandboxTools(sandbox, ["terminal", "code_execution"], config, ask=ask) as runtime:
            code = "from hermes_tools import terminal; print(terminal('danger')['error'])"
            outcome = await asyncio.wait_for(runtime.call("execute_code", {"code": code}, call_id=""), 20)
        assert "nobody home" in outcome.text

    async def test_typing_into_a_process_is_under_them_too(self, tools):
        started = await tools("terminal", command="bash", background=True)
        typed = await tools("process", action="submit", session_id=started["session_id"], data="git push")
        assert typed["status"] == "blocked"

    async def test_without_enforcement_an_isolated_slot_needs_no_decision(self, sandbox):
        async with SandboxTools(sandbox, ["terminal"], ToolConfig(policy=CommandPolicy(rules=self.RULES))) as runtime:
            outcome = await runtime.call("terminal", {"command": "git push; true"}, call_id="")
        if sandbox.isolation == "plain":
            assert outcome.metadata["policy"]["allowed"] is False
        else:
            assert outcome.metadata == {}
            assert outcome.exit_code == 0


class TestWeb:
    @pytest_asyncio.fixture(loop_scope="session")
    async def tools(self, sandbox, tmp_path):
        corpus = tmp_path / "corpus.jsonl"
        pages = [
            {"url": "http://wiki/python", "title": "Python", "text": "Python is a language. " * 2000},
            {"url": "http://wiki/rust", "title": "Rust", "text": "Rust is a language."},
        ]
        corpus.write_text("".join(json.dumps(page) + "\n" for page in pages))
        config = ToolConfig(web=LocalWebConfig(corpus=str(corpus)))
        async with SandboxTools(sandbox, ["web", "code_execution"], config) as runtime:
            yield Tools(runtime, sandbox)

    async def test_search_and_extract(self, tools):
        result = await tools("web_search", query="rust language", limit=1)
        assert result["success"] is True
        (hit,) = result["data"]["web"]
        assert (hit["url"], hit["title"], hit["position"]) == ("http://wiki/rust", "Rust", 1)
        pages = (await tools("web_extract", urls=["http://wiki/rust", "http://wiki/none", "http://wiki/python"]))[
            "results"
        ]
        assert [(page["url"], page["error"] is None) for page in pages] == [
            ("http://wiki/rust", True), ("http://wiki/none", False), ("http://wiki/python", True),
        ]  # fmt: skip
        assert pages[0]["content"] == "Rust is a language."
        assert "characters left out" in pages[2]["content"]
        assert len(pages[2]["content"]) < 16_000

    async def test_an_empty_query_is_an_error(self, tools):
        assert (await tools("web_search", query=" "))["success"] is False

    async def test_scripts_can_use_the_web_tools(self, tools):
        output = await tools.script("""
from hermes_tools import web_search, web_extract
url = web_search("rust")["data"]["web"][0]["url"]
print(web_extract([url])["results"][0]["content"])
""")
        assert output == "Rust is a language.\n"


class TestRollouts:
    async def play(self, runtime, *turns):
        loop = HermesAgentLoop(ScriptedServer(*turns), runtime=runtime)
        return await loop.run([{"role": "user", "content": "go"}])

    async def test_a_rollout_over_a_real_sandbox(self, tools):
        result = await self.play(
            tools.runtime,
            calls(call("write_file", {"path": "a.py", "content": "print(6 * 7)\n"})),
            calls(call("terminal", {"command": "python3 a.py"}), call("read_file", {"path": "a.py"})),
            says("done"),
        )
        assert result.outcome is Outcome.FINISHED
        said = [json.loads(message["content"]) for message in result.messages if message["role"] == "tool"]
        assert said[1]["output"] == "42\n"
        assert said[2]["content"] == "1|print(6 * 7)"
        assert [record.status for record in result.tool_calls] == [ToolStatus.OK] * 3

    async def test_nested_calls_are_recorded_with_their_parent(self, tools):
        code = "from hermes_tools import terminal\nterminal('exit 3')\nterminal('true')"
        result = await self.play(
            tools.runtime, calls(call("execute_code", {"code": code}, call_id="call_7")), says("done")
        )
        records = {record.parent: [] for record in result.tool_calls}
        for record in result.tool_calls:
            records[record.parent].append((record.name, record.arguments, record.exit_code))
        (parent,) = [record.call_id for record in result.tool_calls if record.parent is None]
        assert records[parent] == [("terminal", {"command": "exit 3"}, 3), ("terminal", {"command": "true"}, 0)]
        assert result.metrics["nested_calls"] == 2

    async def test_a_notice_reaches_the_model_before_its_next_turn(self, tools):
        started = {"command": "echo built", "background": True, "notify_on_complete": True}
        server = ScriptedServer(
            calls(call("terminal", started)), calls(call("terminal", {"command": "sleep 1"})), says("done")
        )
        result = await HermesAgentLoop(server, runtime=tools.runtime).run([{"role": "user", "content": "go"}])
        notices = [
            m["content"] for m in result.messages if m["role"] == "user" and "completed (exit code 0)" in m["content"]
        ]
        assert len(notices) == 1
        assert "built" in notices[0]

    async def test_reads_of_one_turn_run_beside_each_other(self, tools):
        await tools.sandbox.write_file("a", b"x\n")
        result = await self.play(
            tools.runtime, calls(*(call("read_file", {"path": "a", "offset": n}) for n in (1, 2, 3))), says("done")
        )
        assert result.turns[0].parallel is True
        assert [record.status for record in result.tool_calls] == [ToolStatus.OK] * 3

    async def test_two_rollouts_in_one_process_do_not_meet(self, tools, pool, spec):
        async with pool.lease("second", spec) as sandbox, SandboxTools(sandbox, ["terminal", "file", "todo"]) as other:
            script = [
                calls(call("terminal", {"command": "mkdir -p w && cd w && export WHO={who} && sleep 0.3"})),
                calls(call("write_file", {"path": "who.txt", "content": "{who}"})),
                calls(call("terminal", {"command": "pwd; cat who.txt; echo $WHO; ls .."})),
            ]

            def turns(who):
                return [
                    calls(
                        call(
                            turn.calls[0].name,
                            json.loads(json.dumps(turn.calls[0].raw_arguments).replace("{who}", who)),
                        )
                    )
                    for turn in script
                ]

            one, two = await asyncio.gather(
                self.play(tools.runtime, *turns("one"), says("done")), self.play(other, *turns("two"), says("done"))
            )
        for result, who in ((one, "one"), (two, "two")):
            last = json.loads([m for m in result.messages if m["role"] == "tool"][-1]["content"])
            assert last["output"].endswith(f"/w\n{who}{who}\nw\n")
