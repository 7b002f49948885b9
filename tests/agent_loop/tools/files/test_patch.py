"""patch on real files: replacements, multi-file patches all or nothing, modes and newlines kept, races survived."""

import asyncio

import pytest

from agent_loop.turn.tool_call import ToolStatus

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_replacement_returns_the_diff(tools):
    await tools.sandbox.write_file("a.py", b"x = 1\ny = 2\n")
    result = await tools("patch", mode="replace", path="a.py", old_string="x = 1", new_string="x = 10")
    assert result["success"] is True
    assert "-x = 1\n+x = 10" in result["diff"]
    assert [path.rsplit("/", 1)[1] for path in result["files_modified"]] == ["a.py"]
    assert result["replacements"] == 1
    assert await tools.sandbox.read_file("a.py") == b"x = 10\ny = 2\n"


async def test_mode_may_be_left_out(tools):
    await tools.sandbox.write_file("a", b"1\n")
    assert (await tools("patch", path="a", old_string="1", new_string="2"))["success"]
    assert (await tools("patch", patch="*** Begin Patch\n*** Update File: a\n-2\n+3\n*** End Patch"))["success"]
    assert await tools.sandbox.read_file("a") == b"3\n"


async def test_a_text_that_is_not_there_shows_the_nearest_lines(tools):
    await tools.sandbox.write_file("a.py", b"def alpha():\n    return compute(1, 2)\n")
    result = await tools("patch", path="a.py", old_string="return compute(1, 3)", new_string="x")
    assert result["success"] is False
    assert "2|    return compute(1, 2)" in result["error"]
    assert tools.outcome.status is ToolStatus.ERROR


async def test_a_text_that_is_there_twice_needs_replace_all(tools):
    await tools.sandbox.write_file("a", b"v v\nv\n")
    assert "replace_all" in (await tools("patch", path="a", old_string="v", new_string="w"))["error"]
    assert (await tools("patch", path="a", old_string="v", new_string="w", replace_all=True))["replacements"] == 3
    assert await tools.sandbox.read_file("a") == b"w w\nw\n"


async def test_a_loose_match_is_reported(tools):
    await tools.sandbox.write_file("a.py", b"class A:\n    def f(self):\n        pass\n")
    result = await tools(
        "patch", path="a.py", old_string="def f(self):\n    pass", new_string="def f(self):\n    return 1"
    )
    assert "indentation" in result["match"]
    assert await tools.sandbox.read_file("a.py") == b"class A:\n    def f(self):\n        return 1\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\r\nb\r\nc\r\n", b"a\r\nB\r\nB2\r\nc\r\n"),
        (b"\xef\xbb\xbfa\nb\nc", b"\xef\xbb\xbfa\nB\nB2\nc"),
        (b"caf\xe9\nb\n\xff\xfe\n", b"caf\xe9\nB\nB2\n\xff\xfe\n"),
        (b"x\ny\r\nb\nz\r\n", b"x\ny\r\nB\nB2\nz\r\n"),
    ],
)
async def test_everything_else_in_the_file_stays_byte_for_byte(tools, before, after):
    await tools.sandbox.write_file("f", before)
    await tools("patch", path="f", old_string="b\n" if b"b\n" in before else "b\r\n", new_string="B\nB2\n")
    assert await tools.sandbox.read_file("f") == after


async def test_the_mode_is_kept(tools):
    await tools.sh("echo 'echo 1' > run.sh; chmod 755 run.sh")
    await tools("patch", path="run.sh", old_string="1", new_string="2")
    assert await tools.sh("./run.sh; stat -c %a run.sh") == "2\n755\n"


async def test_a_patch_over_several_files(tools):
    await tools.sandbox.write_file("a.txt", b"one\ntwo\n")
    await tools.sandbox.write_file("old.txt", b"keep\n")
    await tools.sandbox.write_file("gone.txt", b"bye\n")
    patch = (
        "*** Begin Patch\n*** Update File: a.txt\n one\n-two\n+TWO\n*** Add File: sub/new.txt\n+hello\n"
        "*** Update File: old.txt\n*** Move to: moved.txt\n-keep\n+kept\n*** Delete File: gone.txt\n*** End Patch"
    )
    result = await tools("patch", mode="patch", patch=patch)
    assert result["success"] is True
    names = {key: sorted(path.rsplit("/", 1)[1] for path in result[key]) for key in result if key.startswith("files_")}
    assert names == {
        "files_modified": ["a.txt"],
        "files_created": ["moved.txt", "new.txt"],
        "files_deleted": ["gone.txt", "old.txt"],
    }
    assert await tools.sh("cat a.txt sub/new.txt moved.txt; ls") == "one\nTWO\nhello\nkept\na.txt\nmoved.txt\nsub\n"


async def test_when_one_file_does_not_fit_nothing_is_changed(tools):
    await tools.sandbox.write_file("a", b"1\n")
    await tools.sandbox.write_file("b", b"2\n")
    result = await tools("patch", patch="*** Update File: a\n-1\n+x\n*** Add File: c\n+c\n*** Update File: b\n-9\n+y")
    assert "does not match" in result["error"]
    assert await tools.sh("cat a b; ls") == "1\n2\na\nb\n"


async def test_when_one_file_cannot_be_written_the_others_are_put_back(tools):
    await tools.sandbox.write_file("a", b"1\n")
    await tools.sandbox.write_file("file", b"not a directory\n")
    result = await tools("patch", patch="*** Update File: a\n-1\n+2\n*** Add File: n\n+n\n*** Add File: file/below\n+x")
    assert "not a directory" in result["error"]
    assert await tools.sh("cat a; ls") == "1\na\nfile\n"


async def test_a_moved_file_keeps_its_mode(tools):
    await tools.sh("echo 1 > a; echo run > tool; chmod 755 tool")
    patch = "*** Update File: a\n-1\n+2\n*** Update File: tool\n*** Move to: moved\n-run\n+ran"
    assert (await tools("patch", patch=patch))["success"]
    assert await tools.sh("cat a moved; stat -c %a moved; test ! -e tool") == "2\nran\n755\n"


async def test_a_cancelled_patch_leaves_every_file_as_it_was(tools):
    paths = [f"f{number}" for number in range(6)]
    for path in paths:
        await tools.sandbox.write_file(path, b"1\n")
    patch = "\n".join(f"*** Update File: {path}\n-1\n+2" for path in paths)
    workspace = tools.runtime._ctx.workspace
    write, written, half_way = workspace.write, [], asyncio.Event()

    async def slow_write(path, data, mode=None):
        if len(written) == 3 and not half_way.is_set():
            half_way.set()
            await asyncio.sleep(60)
        written.append(path)
        await write(path, data, mode)

    workspace.write = slow_write
    call = asyncio.create_task(tools.runtime.call("patch", {"patch": patch}, call_id=""))
    await half_way.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await tools.sh("cat f*") == "1\n" * 6


async def test_one_file_under_two_names_is_one_file(tools):
    await tools.sandbox.write_file("d/a", b"1\n")
    assert (await tools("patch", patch="*** Update File: d/a\n-1\n+2\n*** Update File: ./d//a\n-2\n+3"))["success"]
    assert await tools.sandbox.read_file("d/a") == b"3\n"


async def test_text_that_is_not_unicode_is_refused(tools):
    await tools.sandbox.write_file("a", b"1\n")
    for arguments in ({"path": "a", "old_string": "1", "new_string": "\udc80"}, {"patch": "*** Add File: b\n+\ud800"}):
        assert "surrogate" in (await tools("patch", **arguments))["error"]
    assert await tools.sh("cat a; ls") == "1\na\n"


async def test_binary_files_and_directories_are_refused(tools):
    await tools.sandbox.write_file("bin", b"a\0b")
    await tools.sh("mkdir d")
    assert "binary" in (await tools("patch", path="bin", old_string="a", new_string="b"))["error"]
    assert "directory" in (await tools("patch", path="d", old_string="a", new_string="b"))["error"]


async def test_a_missing_file_suggests_names(tools):
    await tools.sandbox.write_file("main.py", b"")
    assert (await tools("patch", path="man.py", old_string="a", new_string="b"))["similar_files"]


@pytest.mark.parametrize("arguments", [{"mode": "replace", "path": "x"}, {"mode": "patch"}, {}, {"mode": "other"}])
async def test_missing_arguments_are_named(tools, arguments):
    assert "error" in await tools("patch", **arguments)
    assert tools.outcome.status is ToolStatus.INVALID


async def test_a_syntax_error_in_the_result_is_mentioned(tools):
    await tools.sandbox.write_file("a.json", b'{"a": 1}\n')
    result = await tools("patch", path="a.json", old_string="1", new_string="1,")
    assert "line 1" in next(iter(result["lint"].values()))["output"]


async def test_parallel_patches_of_one_file_all_count(tools):
    await tools.sandbox.write_file("f", "".join(f"line {n} old\n" for n in range(20)).encode())
    calls = [{"path": "f", "old_string": f"line {n} old", "new_string": f"line {n} new"} for n in range(20)]
    await asyncio.gather(*(tools.runtime.call("patch", call, call_id="") for call in calls))
    assert (await tools.sandbox.read_file("f")).decode() == "".join(f"line {n} new\n" for n in range(20))


async def test_patches_over_the_same_files_in_other_order_do_not_wait_for_each_other(tools):
    await tools.sandbox.write_file("a", b"0\n")
    await tools.sandbox.write_file("b", b"0\n")
    one = "*** Update File: a\n@@\n+1\n*** Update File: b\n@@\n+1"
    two = "*** Update File: b\n@@\n+2\n*** Update File: a\n@@\n+2"
    calls = (tools.runtime.call("patch", {"patch": patch}, call_id="") for patch in (one, two) * 5)
    await asyncio.wait_for(asyncio.gather(*calls), 20)
    assert (await tools.sandbox.read_file("a")).count(b"\n") == 11
