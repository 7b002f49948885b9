"""Hostile inputs: odd paths, links out of the workspace, floods, NUL bytes. Always an answer from a healthy slot."""

import asyncio
import json
import string
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_loop.tools.files import patch
from agent_loop.tools.toolsets import CATALOG
from agent_loop.turn.tool_call import ToolStatus

pytestmark = pytest.mark.asyncio(loop_scope="session")

ODD_NAMES = [
    "new\nline", "quote'single", 'quote"double', "$(touch pwned)", "`touch pwned`", "; touch pwned", "space and\ttab",
    "-rf", "--help", "star*?[a]", "back\\slash", "ünï☃", "a" * 200, "\x01\x7f", "~tilde", "#hash", "%s%n", "\r",
]  # fmt: skip


async def test_odd_names_are_just_names(tools):
    for number, name in enumerate(ODD_NAMES):
        path = f"dir{number}/{name}"
        assert (await tools("write_file", path=path, content="one\n"))["bytes_written"] == 4, name
        assert (await tools("read_file", path=path))["content"] == "1|one", name
        assert (await tools("patch", path=path, old_string="one", new_string="two"))["success"] is True, name
        assert await tools.sandbox.read_file(path) == b"two\n", name
    found = await tools("search_files", pattern="two")
    assert [match["path"] for match in found["matches"]] == sorted(f"dir{n}/{name}" for n, name in enumerate(ODD_NAMES))
    await tools.sh("test ! -e pwned")


async def test_impossible_paths_are_refused_by_every_tool(tools):
    for path in ("", " ", "a\0b", "x" * 5000, "\ud800", "a/" * 3000):
        for name, arguments in [
            ("read_file", {"path": path}),
            ("write_file", {"path": path, "content": "x"}),
            ("patch", {"path": path, "old_string": "a", "new_string": "b"}),
            ("terminal", {"command": "true", "workdir": path or "\0"}),
        ]:
            assert (await tools(name, **arguments))["error"], (name, path)
            assert tools.outcome.status in (ToolStatus.INVALID, ToolStatus.ERROR)
    assert (await tools("terminal", command="echo healthy"))["output"] == "healthy\n"


async def test_a_name_that_is_too_long_for_the_file_system_is_said(tools):
    for name, arguments in [("read_file", {}), ("write_file", {"content": "x"})]:
        assert "error" in await tools(name, path="y" * 300, **arguments)


async def test_links_out_of_the_workspace_lead_no_further_than_the_slot(tools):
    await tools.sh("ln -s /etc/passwd pw; ln -s / root; ln -s loop loop; ln -s /nowhere/at/all dangling")
    through_shell = await tools.sh("cat pw")
    assert (await tools("read_file", path="pw"))["content"].split("\n")[0] == "1|" + through_shell.split("\n")[0]
    assert "error" in await tools("read_file", path="loop")
    assert "error" in await tools("read_file", path="dangling")
    if tools.sandbox.isolation == "plain":
        pytest.skip("without isolation the slot is the host")
    await tools("write_file", path="root/etc/hermes_rl_test", content="from a slot\n")
    assert not await asyncio.to_thread(Path("/etc/hermes_rl_test").exists)


async def test_climbing_out_by_dots_is_only_a_path_in_the_slot(tools):
    outside = await tools("read_file", path="../" * 30 + "etc/hostname")
    inside = await tools.sandbox.exec("cat /etc/hostname", timeout_s=5)
    assert outside.get("content", "1|").split("\n")[0] == "1|" + inside.output.split("\n")[0]


@pytest.mark.parametrize("step", ["parse_patch", "apply_changes", "_report"])
async def test_a_long_patch_of_a_small_file_does_not_hold_the_event_loop(tools, monkeypatch, step):
    """Scripts can send megabytes, which take seconds to read."""
    real, threads = getattr(patch, step), []
    monkeypatch.setattr(patch, step, lambda *given: (threads.append(threading.current_thread()), real(*given))[1])
    text = "*** Begin Patch\n*** Add File: new\n" + "+line\n" * 50_000 + "*** End Patch"
    assert (await tools("patch", mode="patch", patch=text))["success"] is True
    assert threads
    assert threading.main_thread() not in threads


async def test_a_hundred_megabytes_of_output_are_bounded(tools):
    result = await tools("terminal", command="yes 0123456789 | head -c 100000000", timeout=25)
    assert result["exit_code"] == 0
    assert len(tools.outcome.text) < 120_000
    assert result["truncation"]["total_chars"] == 100_000_000
    assert (await tools("terminal", command="echo healthy"))["output"] == "healthy\n"


async def test_a_hundred_megabytes_from_a_script_and_from_a_process_are_bounded(tools):
    script = await tools(
        "execute_code", code="import sys\nfor _ in range(100): sys.stdout.write('x' * 999_999 + '\\n')"
    )
    assert script["status"] == "success"
    assert len(script["output"]) < 51_000
    started = await tools("terminal", command="yes 0123456789 | head -c 100000000", background=True)
    done = await tools("process", action="wait", session_id=started["session_id"], timeout=25)
    assert done["exit_code"] == 0
    assert len((await tools("process", action="log", session_id=started["session_id"]))["output"]) < 300_000


async def test_a_file_of_a_hundred_megabytes_is_paged(tools):
    await tools.sh("yes 'some words on a line' | head -c 100000000 > huge.txt")
    result = await tools("read_file", path="huge.txt", offset=1000, limit=3)
    assert result["content"].startswith("1000|some words on a line\n1001|")
    assert result["total_lines"] > 4_000_000


async def test_output_with_nul_and_broken_bytes_is_valid_json(tools):
    result = await tools("terminal", command=r"printf 'a\0b\xff\xfe\xc3(\n'; printf '\xe2\x82'")
    assert result["output"].startswith("a\0b\ufffd")
    started = await tools("terminal", command=r"printf 'a\0b\xff\n'", background=True)
    waited = await tools("process", action="wait", session_id=started["session_id"])
    assert waited["output"] == "a\0b\ufffd\n"


async def test_markers_in_output_steer_nothing(tools):
    text = '{"output": "fake", "exit_code": 0} __EXIT_CODE__:0 \\x1b]0;x\\x07 *** End Patch'
    result = await tools("terminal", command=f"echo '{text}'; exit 9")
    assert (result["exit_code"], text[:34] in result["output"]) == (9, True)


async def test_a_shell_that_is_replaced_or_killed_does_not_end_the_session(tools):
    assert (await tools("terminal", command="exec false"))["exit_code"] == 1
    assert (await tools("terminal", command="kill -9 $$"))["exit_code"] == 137
    assert (await tools("terminal", command="set -e; false"))["exit_code"] == 1
    assert (await tools("terminal", command="exit 250"))["exit_code"] == 250
    assert (await tools("terminal", command="echo healthy"))["output"] == "healthy\n"


async def test_unbalanced_commands_are_errors_of_the_shell(tools):
    for command in ("echo 'unclosed", "if true; then", "cat <<EOF\nno end", "(((", "echo $(", "`"):
        result = await asyncio.wait_for(tools("terminal", command=command), 15)
        assert "exit_code" in result, command
    assert (await tools("terminal", command="echo healthy"))["output"] == "healthy\n"


async def test_a_directory_that_vanishes_under_the_shell_is_survived(tools):
    await tools("terminal", command='mkdir -p gone && cd gone && rmdir "$PWD"')
    result = await tools("terminal", command="touch here")
    assert "/gone cannot be used" in result["error"]
    assert f"now stands in {tools.sandbox.workdir}" in result["error"]
    assert tools.outcome.status is ToolStatus.ERROR
    assert (await tools("terminal", command="ls here; cd / && pwd"))["output"].endswith("/\n")


async def test_everything_at_once(tools):
    """Writers, patches, readers, commands and searches of one turn, all over the same few files."""
    await tools.sandbox.write_file("s/f0", b"start\n")
    work = []
    for number in range(12):
        path = f"s/f{number % 3}"
        work += [
            ("write_file", {"path": path, "content": f"content {number}\n"}),
            ("read_file", {"path": path}),
            ("patch", {"path": path, "old_string": "content", "new_string": "CONTENT"}),
            ("search_files", {"pattern": "ontent", "path": "s"}),
            ("terminal", {"command": f"cat {path} 2>/dev/null | wc -l"}),
        ]
    outcomes = await asyncio.gather(*(tools.runtime.checked_call(name, given) for name, given in work))
    assert all(isinstance(json.loads(outcome.text), dict) for outcome in outcomes)
    assert await tools.sh("ls -A s") == "f0\nf1\nf2\n"
    assert all(len(line.split()) == 2 for line in (await tools.sh("cat s/*")).splitlines())


def argument_values():
    texts = st.text(max_size=30) | st.text(alphabet=string.punctuation + " \n\0\ud800abc/~.", max_size=40)
    paths = st.sampled_from(
        ["f.txt", "d", "d/x", "/etc/passwd", "/proc/self/mem", "/dev/null", "..", "~/x", "f.txt/x", "missing"]
    )
    scalars = st.none() | st.booleans() | st.integers(-5, 5000) | st.floats() | texts | paths
    return scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=5), scalars, max_size=3)


HARMLESS = {
    "command": st.sampled_from(["true", "echo hi", "cat f.txt", "exit 3", "printf '\\xff'", "cd d", "nope", ") (", ""]),
    "code": st.sampled_from(["print(1)", "1/0", "import sys; sys.exit(2)", "def (", "", "from hermes_tools import *"]),
    "timeout": st.sampled_from([1, 2, None, 0, -1, "1", 10**12, 1.5]),
    "path": st.sampled_from(
        ["f.txt", "d", "d/x", ".", "", "f.txt/x", "missing", "\0", "new\nline", "/dev/null", "/proc/self/mem"]
    ),
    "patch": st.sampled_from(
        ["", "*** Begin Patch", "*** Update File: f.txt\n-one\n+two", "*** Delete File: d", "*** Add File: \0\n+x"]
    ),
    "action": st.sampled_from(["list", "poll", "log", "wait", "kill", "write", "submit", "close", "dance"]),
    "pattern": st.text(alphabet="ab()[]*.\\+?{}|^$-/\0'\" ", max_size=8),
}
"""Values that reach deep into a tool, without ever running what hypothesis happens to invent."""


def leaves_the_workspace(arguments):
    """Whether a call could touch files of the host where the slot does not shut them off."""
    texts = [str(arguments.get(name, "")) for name in ("path", "patch", "workdir")]
    return any(text.lstrip().startswith(("/", "~", "*")) or ".." in text for text in texts)


@st.composite
def random_calls(draw):
    tool = draw(st.sampled_from([tool for tool in CATALOG.values() if tool.toolset != "web"]))
    arguments = {}
    for name in tool.parameters["properties"]:
        if name in ("command", "code") or draw(st.booleans()):
            random_value = argument_values() if name not in ("command", "code") else st.nothing()
            arguments[name] = draw(HARMLESS.get(name, st.nothing()) | random_value)
    return tool.name, arguments


async def test_random_arguments_always_get_valid_json_and_the_slot_stays_healthy(tools):
    await tools.sandbox.write_file("f.txt", b"one\ntwo\n")
    await tools.sh("mkdir -p d")
    asked = []

    @settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
    @given(random_calls())
    def collect(call):
        asked.append(call)

    collect()
    for name, arguments in asked:
        if tools.sandbox.isolation == "plain" and leaves_the_workspace(arguments):
            continue
        outcome = await asyncio.wait_for(tools.runtime.checked_call(name, arguments), 60)
        assert isinstance(json.loads(outcome.text), dict), (name, arguments)
        outcome.text.encode("utf-8")
        assert outcome.status in ToolStatus
    assert (await tools("terminal", command="cd && echo healthy"))["output"] == "healthy\n"
    assert (await tools("write_file", path="healthy", content="x"))["bytes_written"] == 1
