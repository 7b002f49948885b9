"""execute_code in real sandboxes: nested calls, limits, secrets, threads, old Pythons, nothing left behind."""

import asyncio
import json

import pytest
import pytest_asyncio

from agent_loop.tools import SandboxTools, ScriptLimits, ToolConfig
from agent_loop.turn.tool_call import ToolStatus
from sandbox_pool.errors import SandboxLost
from support.tools_calls import Tools
from support.tools_pythons import find_python

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def leftovers(tools):
    """Processes, files and sockets of scripts that are still there."""
    scratch = await tools.runtime._ctx.workspace.scratch()
    await tools.gone("hermes_tools")
    return await tools.sh(f"ls -A {scratch} | grep '^hermes_[cr]' || true")


async def test_a_script_prints_and_succeeds(tools):
    result = await tools("execute_code", code="print('hello', 6 * 7)")
    assert (result["status"], result["output"], result["tool_calls_made"]) == ("success", "hello 42\n", 0)
    assert isinstance(result["duration_seconds"], float)
    assert "error" not in result
    assert await leftovers(tools) == ""


async def test_every_tool_can_be_called_and_returns_a_dict(tools):
    output = await tools.script("""
from hermes_tools import terminal, read_file, write_file, patch, search_files
print(write_file("a.txt", "one\\ntwo\\n")["bytes_written"])
print(read_file("a.txt")["content"])
print(patch("a.txt", "two", "TWO")["success"])
print(patch(mode="patch", patch="*** Update File: a.txt\\n-one\\n+ONE")["success"])
print(search_files("T.O", path="a.txt")["matches"][0]["line"])
print(terminal("cat a.txt; exit 3"))
""")
    assert output == ("8\n1|one\n2|two\nTrue\nTrue\n2\n{'output': 'ONE\\nTWO\\n', 'exit_code': 3, 'error': None}\n")


async def test_nested_calls_are_recorded_in_order_with_status_and_arguments(tools):
    await tools.script("""
from hermes_tools import terminal, read_file
terminal("exit 4")
read_file("missing")
""")
    first, second = tools.outcome.nested
    assert (first.name, first.arguments, first.status, first.exit_code) == (
        "terminal",
        {"command": "exit 4"},
        ToolStatus.OK,
        4,
    )
    assert (second.name, second.status) == ("read_file", ToolStatus.ERROR)
    assert "not found" in second.error
    assert second.result_chars > 0


async def test_the_helpers_are_there(tools):
    output = await tools.script("""
from hermes_tools import json_parse, shell_quote, retry, terminal
print(json_parse('{"a": "x\\ty"}'), terminal("echo " + shell_quote("a b'c"))["output"].strip(), retry(lambda: 5))
""")
    assert output == "{'a': 'x\\ty'} a b'c 5\n"


async def test_failing_tools_return_their_error_to_the_script(tools):
    assert "not found" in await tools.script("from hermes_tools import read_file; print(read_file('none')['error'])")


async def test_an_exception_is_an_error_with_the_traceback_of_the_script_only(tools):
    result = await tools("execute_code", code="print('before')\ndef f():\n    raise ValueError('bad thing')\nf()\n")
    assert result["status"] == "error"
    assert result["output"].startswith("before\n")
    assert "line 3, in f" in result["output"]
    assert "raise ValueError('bad thing')" in result["output"]
    assert "boot" not in result["output"]
    assert "<string>" not in result["output"]
    assert result["error"].endswith("ValueError: bad thing")
    assert (tools.outcome.status, tools.outcome.exit_code) == (ToolStatus.ERROR, 1)


async def test_a_syntax_error_and_an_exit_code(tools):
    assert "SyntaxError" in (await tools("execute_code", code="def (:"))["error"]
    result = await tools("execute_code", code="import sys; sys.exit(7)")
    assert (result["status"], tools.outcome.exit_code) == ("error", 7)
    assert (await tools("execute_code", code="import sys; sys.exit(0)"))["status"] == "success"


async def test_a_script_that_is_killed_is_interrupted(tools):
    result = await tools("execute_code", code="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert result["status"] == "interrupted"
    assert "SIGKILL" in result["error"]
    assert await leftovers(tools) == ""


async def test_it_runs_where_the_shell_stands_with_its_environment(tools):
    await tools("terminal", command="mkdir -p work && cd work && export COLOR=blue && echo 'x = 5' > mine.py")
    assert (
        await tools.script("import os, mine; print(os.path.basename(os.getcwd()), os.environ['COLOR'], mine.x)")
        == "work blue 5\n"
    )
    await tools.script("import os; os.chdir('/'); os.environ['COLOR'] = 'red'")
    assert (await tools("terminal", command='basename "$PWD"; echo "$COLOR"'))["output"] == "work\nblue\n"


async def test_files_in_the_directory_cannot_stand_in_for_the_standard_library(tools):
    for name in ("json", "socket", "threading", "hermes_tools", "shlex"):
        await tools.sandbox.write_file(f"{name}.py", b"raise RuntimeError('imported the wrong one')\n")
    assert await tools.script("from hermes_tools import terminal; print(terminal('echo ok')['output'])") == "ok\n\n"


async def test_stdin_is_empty(tools):
    assert await tools.script("import sys; print(repr(sys.stdin.read()))") == "''\n"


async def test_main_is_main(tools):
    code = """
import pickle
class A: pass
if __name__ == "__main__":
    pickle.dumps(A())
    print(__file__.endswith("script.py"))
"""
    assert await tools.script(code) == "True\n"


async def test_threads_call_at_the_same_time(tools):
    output = await tools.script("""
from concurrent.futures import ThreadPoolExecutor
from hermes_tools import terminal
meet = "touch here.{0}; until [ $(ls here.* | wc -l) = 8 ]; do sleep 0.05; done; echo {0}"
with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(lambda n: terminal(meet.format(n))["output"].strip(), range(8)))
print(results == [str(n) for n in range(8)])
""")
    assert output == "True\n"
    assert len(tools.outcome.nested) == 8


async def test_forked_children_have_a_connection_of_their_own(tools):
    output = await tools.script("""
import multiprocessing
from hermes_tools import terminal
def work(n):
    return terminal(f"echo {n}")["output"].strip()
if __name__ == "__main__":
    print(work("first"))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print(pool.map(work, range(6)))
""")
    assert output == "first\n['0', '1', '2', '3', '4', '5']\n"


async def test_large_results_and_arguments_travel_whole(tools):
    output = await tools.script("""
from hermes_tools import write_file, terminal
text = "x" * 1_000_000 + "é"
print(write_file("big", text)["bytes_written"])
print(len(terminal("head -c 40000 big")["output"]))
""")
    assert output == "1000002\n40000\n"


async def test_results_longer_than_a_frame_come_whole(tools):
    await tools.sandbox.write_file("wide", b"\x01\x02\x03\x04" * 400 + b"\n" + ("é漢" * 900 + "\n").encode() * 60)
    output = await tools.script("""
from concurrent.futures import ThreadPoolExecutor
from hermes_tools import read_file, search_files
whole = read_file("wide")
with ThreadPoolExecutor(4) as pool:
    again = list(pool.map(lambda _: read_file("wide"), range(8)))
print(len(whole["content"]), all(r["content"] == whole["content"] for r in again))
print(len(search_files("é", limit=60)["matches"]))
""")
    size, same, found = output.split()
    assert (int(size) > 80_000, same, found) == (True, "True", "60")


async def test_background_parameters_do_not_exist_in_scripts(tools):
    result = await tools("execute_code", code="from hermes_tools import terminal\nterminal('sleep 9', background=True)")
    assert "unexpected keyword argument 'background'" in result["error"]
    output = await tools.script(
        "import hermes_tools as h; print(h._call('terminal', command='echo hi', background=True))"
    )
    assert "'output': 'hi\\n'" in output


async def test_tools_that_scripts_must_not_have_are_refused(tools):
    output = await tools.script("""
import hermes_tools as h
for name in ("execute_code", "process", "todo", "web_search", "nope", None, 5):
    print("not available" in h._exchange({"tool": name, "args": {}})["error"])
""")
    assert output.split() == ["True"] * 7
    assert tools.outcome.nested == ()


async def test_output_is_capped_head_and_tail(tools):
    output = await tools.script("for n in range(100000): print(n)")
    assert output.startswith("0\n1\n2\n")
    assert output.endswith("99998\n99999\n")
    assert len(output.encode()) < 50_600
    wide = await tools.script("print('é' * 60000); print('end')")
    assert len(wide.encode()) < 50_600
    assert wide.endswith("end\n")


async def test_stderr_is_capped(tools):
    result = await tools("execute_code", code="import sys; sys.stderr.write('e' * 100000 + 'END'); sys.exit(1)")
    assert len(result["output"]) < 11_000
    assert result["output"].endswith("END")


async def test_escapes_and_secrets_are_cleaned(tools):
    assert (
        await tools.script(r"import os; print('\033[31mred\033[0m', os.environ['API_TOKEN'])")
        == "red [REDACTED:API_TOKEN]\n"
    )


@pytest.mark.parametrize("code", ["", "  \n", "print('\ud800')"])
async def test_what_is_no_script_is_not_run(tools, code):
    assert (await tools("execute_code", code=code))["error"]
    assert tools.outcome.status is ToolStatus.INVALID


async def test_cancelling_leaves_nothing_running(tools):
    code = "from hermes_tools import terminal\nterminal('sleep 64')"
    call = asyncio.create_task(tools("execute_code", code=code))
    await tools.started("sleep 64")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await tools.gone("sleep 64")


async def test_the_description_lists_what_is_enabled_and_the_limits(tools):
    schema = next(s["function"] for s in tools.runtime.schemas() if s["function"]["name"] == "execute_code")
    assert "terminal(command, timeout=None, workdir=None) -> dict" in schema["description"]
    assert "300 s, 50 tool calls, 50,000 bytes" in schema["description"]
    assert "web_search" not in schema["description"]


class TestSecret:
    async def test_a_stranger_in_the_sandbox_is_not_answered(self, tools):
        output = await tools.script("""
import json, socket
import hermes_tools as h
def ask(frame):
    s = socket.socket(socket.AF_UNIX); s.connect(h._agent["socket"]); s.sendall(frame + b"\\n")
    return s.makefile().readline()
for frame in (b'{"tool": "terminal", "args": {"command": "touch pwned"}}',
              b'{"tool": "terminal", "args": {"command": "touch pwned"}, "token": "guess"}',
              b'{"token": null}', b'[]', b'not json', b'', b'[' * 5000,
              json.dumps({"token": h._agent["token"][:-1], "tool": "terminal"}).encode()):
    print("error" in json.loads(ask(frame)))
print(len(h._agent["token"]))
""")
        assert output.split() == ["True"] * 8 + ["32"]
        assert "pwned" not in await tools.sh("ls")

    async def test_each_execution_has_its_own(self, tools):
        code = "import hermes_tools as h; print(h._agent['token'], h._agent['socket'])"
        assert len({part for _ in range(3) for part in (await tools.script(code)).split()}) == 6


class TestFewTools:
    @pytest.fixture
    def toolsets(self):
        return ("code_execution", "read_file")

    async def test_only_the_enabled_tools_can_be_imported(self, tools):
        assert (await tools("execute_code", code="from hermes_tools import read_file"))["status"] == "success"
        result = await tools("execute_code", code="from hermes_tools import terminal")
        assert "cannot import name 'terminal'" in result["error"]
        output = await tools.script("import hermes_tools as h; print(h._call('terminal', command='id'))")
        assert "not available in scripts here. Available: read_file." in output


class TestNoTools:
    @pytest.fixture
    def toolsets(self):
        return ("code_execution",)

    async def test_no_other_tools_means_none_in_scripts(self, tools):
        output = await tools.script("import hermes_tools as h; print(h._call('terminal', command='id')['error'])")
        assert "Available: none" in output
        assert "(none are enabled)" in tools.runtime.schemas()[0]["function"]["description"]


class TestLimits:
    @pytest.fixture
    def config(self):
        return ToolConfig(script=ScriptLimits(timeout_s=5.0, stdout_bytes=1000, stderr_bytes=500))

    async def test_at_the_time_limit_everything_of_the_script_is_killed(self, tools):
        result = await tools(
            "execute_code",
            code="""
import subprocess
print("up", flush=True)
subprocess.Popen(["setsid", "sleep", "65"])
subprocess.run(["sleep", "66"])
""",
        )
        assert result["status"] == "timeout"
        assert "5 s" in result["error"]
        assert result["output"].startswith("up\n")
        assert tools.outcome.status is ToolStatus.TIMEOUT
        assert await tools.gone("sleep 6[56]")
        assert await leftovers(tools) == ""

    async def test_a_nested_call_is_stopped_with_its_script(self, tools):
        result = await tools("execute_code", code="from hermes_tools import terminal\nterminal('sleep 67')")
        assert result["status"] == "timeout"
        assert await tools.gone("sleep 67")


class TestCallLimit:
    @pytest.fixture
    def config(self):
        return ToolConfig(script=ScriptLimits(max_calls=3))

    async def test_calls_beyond_the_limit_are_refused(self, tools):
        output = await tools.script("""
from hermes_tools import terminal
print([("error" in r and r["error"]) or r["output"] for r in [terminal("echo x") for _ in range(5)]])
""")
        assert output.count("x\\n") == 3
        assert output.count("limit of 3 tool calls") == 2
        assert len(tools.outcome.nested) == 3
        assert json.loads(tools.outcome.text)["tool_calls_made"] == 3


class TestPythons:
    @pytest.mark.parametrize("version", ["3.8", "3.13"])
    async def test_old_and_new_pythons_run_scripts(self, tools, version):
        python = find_python(version)
        if python is None or (await tools.sandbox.exec(f"{python} -V", timeout_s=10)).exit_code:
            pytest.skip(f"needs Python {version} inside the sandbox")
        await tools(
            "terminal", command=f'mkdir -p pybin && ln -s {python} pybin/python3 && export PATH="$PWD/pybin:$PATH"'
        )
        output = await tools.script(
            "import sys\n"
            "from hermes_tools import terminal\n"
            "print('%d.%d' % sys.version_info[:2], terminal('echo ok')['output'])"
        )
        assert output == f"{version} ok\n\n"

    async def test_a_python_that_is_too_old_is_said(self, tools):
        python = find_python("3.6") or find_python("2.7")
        if python is None or (await tools.sandbox.exec(f"{python} -V", timeout_s=10)).exit_code:
            pytest.skip("needs an old Python inside the sandbox")
        await tools(
            "terminal", command=f'mkdir -p pybin && ln -s {python} pybin/python3 && export PATH="$PWD/pybin:$PATH"'
        )
        assert "needs Python 3.8" in (await tools("execute_code", code="print(1)"))["error"]

    async def test_a_python_that_does_nothing_is_not_a_success(self, tools):
        await tools.sandbox.write_file("fake/python3", b"#!/bin/sh\nexit 0\n", mode=0o755)
        await tools("terminal", command='export PATH="$PWD/fake:$PATH"')
        assert "without running" in (await tools("execute_code", code="print(1)"))["error"]

    async def test_no_python_is_said(self, tools):
        await tools("terminal", command='mkdir -p empty && export PATH="$PWD/empty"')
        result = await tools("execute_code", code="print(1)")
        assert "no Python" in result["error"]
        assert tools.outcome.status is ToolStatus.ERROR


class TestLostSandbox:
    @pytest_asyncio.fixture(loop_scope="session")
    async def tools(self, sandbox, config):
        class Breaking:
            """The sandbox, except that reading files reports that it is gone."""

            def __getattr__(self, name):
                return getattr(sandbox, name)

            async def read_file(self, *_, **__):
                raise SandboxLost("gone")

        async with SandboxTools(Breaking(), ["code_execution", "file", "terminal"], config) as runtime:
            yield Tools(runtime, sandbox)

    async def test_a_fault_of_the_sandbox_ends_the_rollout_and_is_never_a_result(self, tools):
        with pytest.raises(SandboxLost):
            await tools("read_file", path="x")

    async def test_a_fault_under_a_nested_call_ends_the_script_and_the_rollout(self, tools):
        code = "from hermes_tools import read_file\nimport time\nread_file('x')\ntime.sleep(60)"
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(tools("execute_code", code=code), 30)
        assert await leftovers(tools) == ""


class TestNothingIsLeft:
    async def test_a_directory_change_in_a_script_holds_for_shell_scripts_and_files_alike(self, tools):
        await tools.script("from hermes_tools import terminal\nterminal('mkdir -p deep && cd deep')")
        await tools("write_file", path="a.txt", content="x")
        assert (await tools("terminal", command="pwd; ls"))["output"].endswith("/deep\na.txt\n")
        assert await tools.script("import os; print(os.listdir())") == "['a.txt']\n"

    @pytest.mark.parametrize("end", ["", "import os; os._exit(3)", "raise ValueError", "import sys; sys.exit(2)"])
    async def test_children_of_a_script_end_with_it_however_it_ends(self, tools, end):
        await tools(
            "execute_code",
            code="import subprocess\n"
            "subprocess.Popen(['sleep', '611'])\n"
            "subprocess.Popen(['setsid', 'sleep', '612'])\n"
            "subprocess.run('( setsid sleep 613 & ) &', shell=True)\n" + end,
        )
        assert await tools.running("sleep 61[123]") == []

    async def test_the_exit_code_and_the_signal_are_the_scripts_own(self, tools):
        assert "exit code 3" in (await tools("execute_code", code="import os; os._exit(3)"))["error"]
        killed = await tools("execute_code", code="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert (killed["status"], "SIGKILL" in killed["error"]) == ("interrupted", True)

    async def test_a_background_process_that_a_script_started_by_terminal_stays(self, tools):
        started = await tools("terminal", command="sleep 614", background=True)
        await tools.script("print(1)")
        assert (await tools("process", action="poll", session_id=started["session_id"]))["status"] == "running"

    async def test_imports_leave_no_bytecode(self, tools):
        await tools.sandbox.write_file("mod.py", b"")
        await tools.script("import mod, subprocess, sys; subprocess.run([sys.executable, '-c', 'import mod'])")
        assert await tools.sh("find . -name __pycache__") == ""

    async def test_a_deleted_session_folder_is_told(self, tools):
        await tools("terminal", command='mkdir gone && cd gone && rmdir "$PWD"')
        result = await tools("execute_code", code="print(1)")
        assert (result["status"], "/gone cannot be used" in result["error"]) == ("error", True)
        assert await tools.script("print(1)") == "1\n"
