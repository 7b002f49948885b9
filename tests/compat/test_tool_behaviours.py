"""What hermes-agent's tools do on a sandbox, row by row of behaviours.yaml."""

import json
import re

import pytest

from environments.scoring.contexts import SandboxContext
from support.pool_wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

BACKGROUND = {"background": True}


async def spawned(tools, command, **more):
    """The id of a background process."""
    return (await tools("terminal", command=command, **BACKGROUND, **more))["session_id"]


# Background processes


async def test_ids_are_proc_and_12_hex_digits(tools):
    assert re.fullmatch(r"proc_[0-9a-f]{12}", await spawned(tools, "true"))


async def test_poll_shows_the_last_1000_characters(tools):
    process = await spawned(tools, "head -c 5000 /dev/zero | tr '\\0' a; echo end; read wait")

    async def printed():
        return "end" in (await tools("process", action="poll", session_id=process))["output_preview"]

    await eventually(printed)
    polled = await tools("process", action="poll", session_id=process)
    assert (polled["status"], len(polled["output_preview"]) <= 1100) == ("running", True)
    assert polled["command"].startswith("head -c 5000")


async def test_log_pages_through_lines(tools):
    process = await spawned(tools, "seq 500")
    await tools("process", action="wait", session_id=process)
    last = await tools("process", action="log", session_id=process)
    assert (last["total_lines"], last["output"].splitlines()[0], last["output"].splitlines()[-1]) == (500, "301", "500")
    page = await tools("process", action="log", session_id=process, offset=10, limit=2)
    assert len(page["output"].splitlines()) == 2


async def test_wait_gives_code_and_output(tools):
    process = await spawned(tools, "echo built; exit 3")
    ended = await tools("process", action="wait", session_id=process)
    assert (ended["status"], ended["exit_code"], ended["output"].strip()) == ("exited", 3, "built")


async def test_wait_is_clamped_and_says_so(tools):
    process = await spawned(tools, "sleep 0.2")
    ended = await tools("process", action="wait", session_id=process, timeout=9999)
    assert (ended["exit_code"], "30" in ended["timeout_note"]) == (0, True)


async def test_kill_takes_children_along(tools):
    process = await spawned(tools, "sleep 623 & sleep 624")
    await tools.started("sleep 623", "sleep 624")
    assert (await tools("process", action="kill", session_id=process))["status"] == "killed"
    assert await tools.gone("sleep 62[34]")


async def test_input_is_written_submitted_and_closed(tools):
    process = await spawned(tools, "cat; echo closed")
    await tools("process", action="write", session_id=process, data="one ")
    await tools("process", action="submit", session_id=process, data="line")
    await tools("process", action="close", session_id=process)
    ended = await tools("process", action="wait", session_id=process)
    assert ended["output"] == "one line\nclosed\n"


async def test_pty_is_a_terminal(tools):
    process = await spawned(tools, "test -t 0 && tput cols", pty=True)
    ended = await tools("process", action="wait", session_id=process)
    assert (ended["exit_code"], ended["output"].split()) == (0, ["120"])


async def test_unknown_process_is_not_found(tools):
    answer = await tools("process", action="poll", session_id="proc_000000000000")
    assert "proc_000000000000" in answer["error"]


async def test_processes_are_listed_with_their_state(tools):
    process = await spawned(tools, "read wait")
    listed = (await tools("process", action="list"))["processes"]
    assert [(one["session_id"], one["status"], one["command"]) for one in listed] == [(process, "running", "read wait")]


async def test_a_child_that_holds_the_output_does_not_keep_a_process_running(tools):
    process = await spawned(tools, "(sleep 625 &) ; echo done")
    ended = await tools("process", action="wait", session_id=process)
    assert (ended["status"], ended["exit_code"], ended["output"]) == ("exited", 0, "done\n")


async def test_characters_split_between_writes_are_whole(tools):
    process = await spawned(
        tools, r"printf 'caf\303'; sleep 0.1; printf '\251 \360\237'; sleep 0.1; printf '\222\251\n'"
    )
    ended = await tools("process", action="wait", session_id=process)
    assert ended["output"] == "café \U0001f4a9\n"


# terminal


async def test_state_of_the_shell_persists(tools):
    await tools(
        "terminal",
        command="mkdir -p d && cd d; export A=1; b() { echo function $A; }; shopt -s expand_aliases; alias c=pwd",
    )
    result = await tools("terminal", command="b; c")
    assert result["output"].splitlines()[0] == "function 1"
    assert result["output"].splitlines()[1].endswith("/d")


async def test_long_output_keeps_both_ends_and_all_of_it_in_a_file(tools):
    result = await tools("terminal", command="seq 20000")
    assert result["output"].startswith("1\n2\n")
    assert result["output"].rstrip().endswith("20000")
    assert len(result["output"]) < 51_000
    assert await tools.sh(f"tail -n 1 {result['truncation']['full_output']}") == "20000\n"


async def test_a_command_in_the_background_does_not_hold_the_call(tools):
    result = await tools("terminal", command="sleep 626 & echo now")
    assert (result["output"], await tools.running("sleep 626")) == ("now\n", ["sleep 626"])


async def test_a_list_in_the_background_does_not_hold_the_call(tools):
    result = await tools("terminal", command="true && sleep 627 & echo now")
    assert (result["exit_code"], result["output"]) == (0, "now\n")


async def test_output_is_in_order(tools):
    result = await tools("terminal", command="echo one; echo two >&2; echo three")
    assert result["output"] == "one\ntwo\nthree\n"


async def test_colours_are_taken_out(tools):
    result = await tools("terminal", command=r"printf '\033[31mred\033[0m \033]0;title\007plain\n'")
    assert result["output"] == "red plain\n"


async def test_a_longer_timeout_is_lowered_and_said(tools):
    assert "30" in (await tools("terminal", command="true", timeout=4000))["timeout_note"]


async def test_check_interval_and_force_are_said_to_be_ignored(tools):
    result = await tools("terminal", command="true", check_interval=5, force=True)
    assert (result["exit_code"], "check_interval" in str(result), "force" in str(result)) == (0, True, True)


async def test_multi_line_commands_and_heredocs_run(tools):
    result = await tools("terminal", command="cat <<'END' > f\na $b\nEND\ncat f")
    assert result["output"] == "a $b\n"


async def test_a_command_reads_no_input(tools):
    assert (await tools("terminal", command="cat; echo end"))["output"] == "end\n"


# Files


async def test_a_missing_file_names_its_like(tools):
    await tools.sh("touch reprot.txt report2.txt other")
    answer = await tools("read_file", path="report.txt")
    assert "report.txt" in answer["error"]
    assert {"reprot.txt", "report2.txt"} & set(re.findall(r"[\w.]+\.txt", json.dumps(answer)))


async def test_pictures_and_binaries_are_not_text(tools):
    await tools.sandbox.write_file("a.png", b"\x89PNG\r\n\x1a\n\0\0")
    await tools.sandbox.write_file("b.bin", bytes(range(256)) * 4)
    await tools.sandbox.write_file("short.gif", b"GIF89a")
    for path in ("a.png", "b.bin", "short.gif"):
        assert "error" in await tools("read_file", path=path)


async def test_a_byte_order_mark_is_neither_shown_nor_lost(tools):
    await tools.sandbox.write_file("a.py", b"\xef\xbb\xbfx = 1\n")
    assert (await tools("read_file", path="a.py"))["content"] == "1|x = 1"
    await tools("patch", path="a.py", old_string="x = 1", new_string="x = 2")
    assert await tools.sandbox.read_file("a.py") == b"\xef\xbb\xbfx = 2\n"


async def test_typography_that_is_not_changed_is_kept(tools):
    await tools.sandbox.write_file("a", "Wait\u2026 and \u201cdone\u201d\n")
    result = await tools("patch", path="a", old_string='Wait... and "done"', new_string='Wait... then "done"')
    assert "match" in result
    assert await tools.sh("cat a") == "Wait\u2026 then \u201cdone\u201d\n"


async def test_escaped_newlines_are_found(tools):
    await tools.sandbox.write_file("a", "def f():\n\tpass\n")
    result = await tools("patch", path="a", old_string="def f():\\n\\tpass", new_string="def g():\\n\\treturn")
    assert "escapes" in result["match"]
    assert await tools.sh("cat a") == "def g():\n\treturn\n"


async def test_v4a_markers_of_the_file_are_context(tools):
    await tools.sandbox.write_file("guide", "how to\n*** End Patch\n")
    patch = "*** Begin Patch\n*** Update File: guide\n how to\n *** End Patch\n+the end\n*** End Patch"
    await tools("patch", mode="patch", patch=patch)
    assert await tools.sh("cat guide") == "how to\n*** End Patch\nthe end\n"


async def test_long_lines_are_cut_at_2000_characters(tools):
    await tools.sandbox.write_file("long", b"x" * 5000 + b"\nnext\n")
    first, second = (await tools("read_file", path="long"))["content"].splitlines()[:2]
    assert (2000 <= len(first) < 2100, second) == (True, "2|next")


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "."])
async def test_only_regular_files_are_read(tools, path):
    await tools.sh("mkfifo pipe")
    assert "error" in await tools("read_file", path=path)


async def test_write_makes_folders_and_counts_bytes(tools):
    result = await tools("write_file", path="a/b/c.txt", content="é\n")
    assert (result["bytes_written"], await tools.sh("cat a/b/c.txt")) == (3, "é\n")


async def test_contents_pass_unchanged(tools):
    text = "'\"$HOME` \\n \\\\ EOF\n\ttab\r\nno newline at the end"
    await tools("write_file", path="odd", content=text)
    assert (await tools.sandbox.read_file("odd")).decode() == text


async def test_a_text_that_stands_twice_is_not_replaced(tools):
    await tools.sandbox.write_file("t", b"x = 1\nx = 1\n")
    assert "error" in await tools("patch", path="t", old_string="x = 1", new_string="x = 2")
    done = await tools("patch", path="t", old_string="x = 1", new_string="x = 2", replace_all=True)
    assert (done["success"], await tools.sh("cat t")) == (True, "x = 2\nx = 2\n")


async def test_a_patch_shows_its_diff(tools):
    await tools.sandbox.write_file("t", b"one\ntwo\n")
    done = await tools("patch", path="t", old_string="two", new_string="2")
    assert ("-two" in done["diff"], "+2" in done["diff"]) == (True, True)


async def test_indentation_is_tolerated(tools):
    await tools.sandbox.write_file("t.py", b"def f():\n        return 1\n")
    done = await tools("patch", path="t.py", old_string="def f():\n    return 1", new_string="def f():\n    return 2")
    assert (done["success"], "return 2" in await tools.sh("cat t.py")) == (True, True)


async def test_v4a_adds_changes_and_deletes(tools):
    await tools.sh("printf 'one\\ntwo\\n' > a; touch b")
    steps = "*** Add File: c\n+new\n*** Update File: a\n@@\n one\n-two\n+2\n*** Delete File: b\n"
    done = await tools("patch", mode="patch", patch=f"*** Begin Patch\n{steps}*** End Patch")
    assert (done["success"], await tools.sh("cat a c; ls")) == (True, "one\n2\nnew\na\nc\n")


async def test_search_finds_lines_and_files(tools):
    await tools.sh("mkdir s; printf 'x\\nneedle\\ny\\n' > s/a.py; printf 'needle\\n' > s/b.txt")
    found = await tools("search_files", pattern="needle", path="s")
    assert {(hit["path"].rsplit("/")[-1], hit["line"]) for hit in found["matches"]} == {("a.py", 2), ("b.txt", 1)}
    only = await tools("search_files", pattern="needle", path="s", file_glob="*.py")
    assert only["total_count"] == 1
    names = await tools("search_files", pattern="*.txt", target="files", path="s")
    assert [name.rsplit("/")[-1] for name in names["files"]] == ["b.txt"]
    around = await tools("search_files", pattern="needle", path="s/a.py", context=1)
    assert {"x", "y"} <= set(re.findall(r"\b[xy]\b", json.dumps(around)))


async def test_search_pages_and_counts(tools):
    await tools.sh("mkdir s; for n in $(seq 60); do echo needle; done > s/many")
    first = await tools("search_files", pattern="needle", path="s")
    assert (len(first["matches"]), first["truncated"]) == (50, True)
    rest = await tools("search_files", pattern="needle", path="s", offset=50)
    assert len(rest["matches"]) == 10
    counted = await tools("search_files", pattern="needle", path="s", output_mode="count")
    assert list(counted["counts"].values()) == [60]
    files = await tools("search_files", pattern="needle", path="s", output_mode="files_only")
    assert len(files["files"]) == 1


# execute_code


async def test_a_script_says_what_it_did(tools):
    result = await tools("execute_code", code="from hermes_tools import terminal\nprint(terminal('echo hi')['output'])")
    assert (result["status"], result["output"].strip(), result["tool_calls_made"]) == ("success", "hi", 1)
    assert result["duration_seconds"] >= 0


async def test_scripts_have_the_helpers(tools):
    printed = "json_parse('[1]')[0], shell_quote('a b'), retry(lambda: 7)"
    code = f"from hermes_tools import json_parse, retry, shell_quote\nprint({printed})"
    assert (await tools.script(code)).split() == ["1", "'a", "b'", "7"]


async def test_a_failing_script_shows_its_traceback(tools):
    result = await tools("execute_code", code="print('before')\nraise ValueError('boom')")
    assert (result["status"], "before" in result["output"], "ValueError: boom" in str(result)) == ("error", True, True)


async def test_scripts_start_nothing_in_the_background(tools):
    code = "from hermes_tools import terminal\nprint(terminal('sleep 628', background=True))"
    assert (await tools("execute_code", code=code))["status"] == "error"
    assert await tools.running("sleep 628") == []


async def test_scripts_see_the_workspace(tools):
    await tools.sandbox.write_file("data.txt", b"42\n")
    assert await tools.script("print(open('data.txt').read())") == "42\n\n"


# The verifier's context


async def test_the_context_has_hermes_agents_shapes(tools, tmp_path):
    ctx = SandboxContext(tools.sandbox)
    assert await ctx.terminal("echo hi; exit 3") == {"output": "hi\n", "exit_code": 3}
    data = bytes(range(256)) * 1000
    (tmp_path / "up").write_bytes(data)
    await ctx.upload_file(tmp_path / "up", "sent")
    await ctx.download_file("sent", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data
