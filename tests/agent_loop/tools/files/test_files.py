"""read_file and write_file on real files, isolated and plain."""

import asyncio
import json

import pytest

from agent_loop.tools import ToolConfig
from agent_loop.turn.tool_call import ToolStatus

pytestmark = pytest.mark.asyncio(loop_scope="session")


class TestRead:
    async def test_lines_are_numbered_from_one_with_the_total(self, tools):
        await tools.sandbox.write_file("a.txt", b"one\n\tt wo\nthree\n")
        result = await tools("read_file", path="a.txt")
        assert result == {"content": "1|one\n2|\tt wo\n3|three", "total_lines": 3, "truncated": False, "file_size": 16}

    async def test_pages(self, tools):
        await tools.sandbox.write_file("n.txt", "".join(f"{n}\n" for n in range(1, 1001)).encode())
        first = await tools("read_file", path="n.txt")
        assert (first["content"].split("\n")[-1], first["truncated"], first["next_offset"]) == ("500|500", True, 501)
        second = await tools("read_file", path="n.txt", offset=501, limit=2)
        assert second["content"] == "501|501\n502|502"
        last = await tools("read_file", path="n.txt", offset=999, limit=5000)
        assert (last["content"], last["truncated"]) == ("999|999\n1000|1000", False)
        behind = await tools("read_file", path="n.txt", offset=2000)
        assert (behind["content"], behind["total_lines"]) == ("", 1000)
        assert "behind its end" in behind["hint"]

    @pytest.mark.parametrize(
        ("data", "content", "total"),
        [
            (b"", "", 0),
            (b"\n", "1|", 1),
            (b"a", "1|a", 1),
            (b"a\r\nb\r\n", "1|a\r\n2|b\r", 2),
            (b"a\x0bb\x0c\n", "1|a\x0bb\x0c", 1),
        ],
    )
    async def test_what_is_in_the_file_is_what_is_shown(self, tools, data, content, total):
        await tools.sandbox.write_file("f", data)
        result = await tools("read_file", path="f")
        assert (result["content"], result["total_lines"]) == (content, total)

    async def test_contents_are_never_redacted_or_stripped(self, tools):
        text = "token = 's3cr3t-value-of-ours'\n\x1b[31mred\x1b[0m password=hunter2 sk-abcdefghijk\n"
        await tools.sandbox.write_file("secret.py", text.encode())
        result = await tools("read_file", path="secret.py")
        assert (
            result["content"]
            == "1|token = 's3cr3t-value-of-ours'\n2|\x1b[31mred\x1b[0m password=hunter2 sk-abcdefghijk"
        )

    async def test_a_missing_file_suggests_names_like_it(self, tools):
        await tools.sandbox.write_file("dir/config.yaml", b"")
        result = await tools("read_file", path="dir/confg.yml")
        assert "not found" in result["error"]
        assert [name.rsplit("/", 1)[1] for name in result["similar_files"]] == ["config.yaml"]
        assert tools.outcome.status is ToolStatus.ERROR

    async def test_binary_files_images_and_utf16_are_refused_clearly(self, tools):
        await tools.sandbox.write_file("a.bin", b"\x7fELF\0\0")
        await tools.sandbox.write_file("a.png", b"\x89PNG\0")
        await tools.sandbox.write_file("a.txt", "hello".encode("utf-16"))
        assert "binary" in (await tools("read_file", path="a.bin"))["error"]
        assert "image" in (await tools("read_file", path="a.png"))["error"]
        assert "iconv" in (await tools("read_file", path="a.txt"))["error"]

    async def test_bytes_that_are_not_utf8_are_shown_with_a_note(self, tools):
        await tools.sandbox.write_file("latin", b"caf\xe9\n")
        result = await tools("read_file", path="latin")
        assert result["content"] == "1|caf\ufffd"
        assert "1 bytes are not UTF-8" in result["encoding_note"]

    async def test_directories_devices_and_pipes_have_clear_answers(self, tools):
        await tools.sh("mkdir d; mkfifo pipe")
        assert "is a directory" in (await tools("read_file", path="d"))["error"]
        for path in ("pipe", "/dev/zero", "/dev/tty"):
            assert "error" in await asyncio.wait_for(tools("read_file", path=path), 10)

    async def test_files_of_proc_can_be_read(self, tools):
        assert "Name:" in (await tools("read_file", path="/proc/self/status"))["content"]

    async def test_a_file_that_may_not_be_read(self, tools):
        await tools.sh("touch locked && chmod 000 locked")
        if (await tools.sandbox.exec("cat locked", timeout_s=5)).exit_code == 0:
            pytest.skip("the slot's user may read everything")
        assert "permission" in (await tools("read_file", path="locked"))["error"]

    async def test_long_lines_are_cut_with_a_mark(self, tools):
        await tools.sandbox.write_file("long", b"x" * 5000 + b"\nshort\n")
        content = (await tools("read_file", path="long"))["content"]
        assert content == "1|" + "x" * 2000 + "... [line of 5,000 characters cut]\n2|short"

    async def test_a_page_stays_within_the_budget_and_goes_on(self, tools):
        await tools.sandbox.write_file("wide", b"y" * 1500 + b"\n" + (b"z" * 1500 + b"\n") * 199)
        first = await tools("read_file", path="wide", limit=2000)
        assert len(first["content"]) <= 100_000
        assert first["truncated"]
        rest = await tools("read_file", path="wide", offset=first["next_offset"])
        assert rest["content"].startswith(f"{first['next_offset']}|z")

    async def test_home_is_known(self, tools):
        await tools.sh('echo hi > "$HOME/in_home.txt"')
        assert (await tools("read_file", path="~/in_home.txt"))["content"] == "1|hi"
        await tools.sh('rm "$HOME/in_home.txt"')

    async def test_reading_the_same_again_and_again_is_mentioned_but_not_refused(self, tools):
        await tools.sandbox.write_file("same", b"x\n")
        results = [await tools("read_file", path="same") for _ in range(5)]
        assert ["_warning" in result for result in results] == [False, False, True, True, True]
        assert all(result["content"] == "1|x" for result in results)
        await tools.sandbox.write_file("same", b"y\n")
        assert "_warning" not in await tools("read_file", path="same")


class TestHugeFiles:
    @pytest.fixture
    def config(self):
        return ToolConfig(max_file_bytes=10_000)

    async def test_a_huge_file_is_paged_inside_the_sandbox(self, tools):
        await tools.sh("seq 1 100000 > 'huge file'")
        result = await tools("read_file", path="huge file", offset=50_000, limit=2)
        assert (result["content"], result["total_lines"], result["next_offset"]) == (
            "50000|50000\n50001|50001",
            100_000,
            50_002,
        )

    async def test_huge_lines_are_cut(self, tools):
        await tools.sh("head -c 50000 /dev/zero | tr '\\0' x > line; echo; echo y >> line")
        result = await tools("read_file", path="line")
        assert result["content"].startswith("1|" + "x" * 2000 + "... [line of 50")
        assert len(result["content"]) < 3000

    async def test_a_huge_file_cannot_be_patched(self, tools):
        await tools.sh("seq 1 100000 > huge")
        assert "too large" in (await tools("patch", path="huge", old_string="5\n", new_string="6\n"))["error"]


class TestWrite:
    async def test_a_new_file_with_its_directories(self, tools):
        result = await tools("write_file", path="a/b/c.txt", content="héllo\n")
        assert result["bytes_written"] == 7
        assert await tools.sandbox.read_file("a/b/c.txt") == "héllo\n".encode()

    @pytest.mark.parametrize(
        "content", ["", "no newline", "a\0b", "$HOME `id` \"'\\ \n", "x" * 3_000_000, "tab\t\r\n", "EOF\n"]
    )
    async def test_content_arrives_byte_for_byte(self, tools, content):
        await tools("write_file", path="f", content=content)
        assert await tools.sandbox.read_file("f") == content.encode()

    async def test_the_mode_is_kept(self, tools):
        await tools.sh("echo old > run.sh; chmod 750 run.sh")
        await tools("write_file", path="run.sh", content="new\n")
        assert await tools.sh("stat -c %a run.sh; cat run.sh") == "750\nnew\n"

    async def test_the_newline_style_is_kept(self, tools):
        await tools.sandbox.write_file("dos.txt", b"a\r\nb\r\n")
        await tools("write_file", path="dos.txt", content="a\nc\n")
        assert await tools.sandbox.read_file("dos.txt") == b"a\r\nc\r\n"
        await tools("write_file", path="dos.txt", content="a\r\nmixed\n")
        assert await tools.sandbox.read_file("dos.txt") == b"a\r\nmixed\n"
        await tools("write_file", path="unix.txt", content="a\r\nb\n")
        assert await tools.sandbox.read_file("unix.txt") == b"a\r\nb\n"

    async def test_a_link_is_written_through(self, tools):
        await tools.sh("echo old > target; ln -s target link")
        await tools("write_file", path="link", content="new\n")
        assert await tools.sh("cat target; readlink link") == "new\ntarget\n"

    async def test_readers_see_the_old_or_the_new_file_never_half_of_one(self, tools):
        old, new = "a" * 1_000_000, "b" * 1_000_000
        await tools("write_file", path="f", content=old)
        watcher = asyncio.create_task(
            tools.sandbox.exec("for i in $(seq 60); do tr -s ab < f; echo; done | sort -u", timeout_s=30)
        )
        for content in (new, old, new):
            await tools("write_file", path="f", content=content)
        assert set((await watcher).output.split()) <= {"a", "b"}

    async def test_places_that_cannot_be_written_are_explained(self, tools):
        await tools.sh("mkdir dir; echo x > file")
        assert "is a directory" in (await tools("write_file", path="dir", content="x"))["error"]
        assert "not a directory" in (await tools("write_file", path="file/below", content="x"))["error"]
        assert "error" in await tools("write_file", path="/proc/nope", content="x")

    async def test_a_syntax_error_is_mentioned(self, tools):
        result = await tools("write_file", path="bad.py", content="def f(:\n")
        assert (result["bytes_written"], result["lint"]["status"]) == (8, "error")
        assert "lint" not in await tools("write_file", path="good.py", content="x = 1\n")

    async def test_text_that_utf8_cannot_hold_is_refused_and_nothing_is_written(self, tools):
        result = await tools("write_file", path="f", content="a\ud800")
        assert "surrogate" in result["error"]
        assert await tools.sandbox.stat("f") is None

    async def test_parallel_writes_leave_one_whole_file_and_no_litter(self, tools):
        contents = [str(n) * 50_000 for n in range(8)]
        await asyncio.gather(
            *(tools.runtime.call("write_file", {"path": "d/f", "content": c}, call_id="") for c in contents)
        )
        assert (await tools.sandbox.read_file("d/f")).decode() in contents
        assert await tools.sh("ls -A d") == "f\n"


async def test_results_are_one_json_object_and_nothing_after_it(tools):
    await tools.sandbox.write_file("n.txt", b"1\n" * 600)
    for name, arguments in [
        ("read_file", {"path": "n.txt"}),
        ("search_files", {"pattern": "1", "path": "n.txt"}),
        ("read_file", {"path": "none"}),
    ]:
        await tools(name, **arguments)
        json.JSONDecoder().raw_decode(tools.outcome.text)
        assert json.JSONDecoder().raw_decode(tools.outcome.text)[1] == len(tools.outcome.text)


class TestWhatTheModelKnows:
    async def test_a_page_fits_its_budget_with_escapes_and_nothing_is_lost_on_the_way_through(self, tools):
        lines = [f'{n} "quoted" \\ \t and \x01 more' * 8 for n in range(3000)]
        await tools.sandbox.write_file("big.txt", "".join(f"{line}\n" for line in lines))
        seen, offset = [], 1
        while offset:
            outcome = await tools.runtime.checked_call(
                "read_file", {"path": "big.txt", "offset": offset, "limit": 2000}
            )
            assert len(outcome.text) <= 100_000
            page = json.loads(outcome.text)
            seen += [row.partition("|")[2] for row in page["content"].split("\n")]
            offset = page.get("next_offset")
        assert seen == lines

    async def test_the_same_page_again_and_again_is_told_only_when_nothing_else_ran(self, tools):
        await tools.sandbox.write_file("a.txt", b"a\n")
        for other in ("terminal", "search_files"):
            for _ in range(4):
                assert "_warning" not in await tools("read_file", path="a.txt")
                await tools(other, **({"command": "true"} if other == "terminal" else {"pattern": "a"}))
        results = [await tools("read_file", path="a.txt") for _ in range(3)]
        assert ["_warning" in result for result in results] == [False, False, True]
        assert "3 times in a row" in results[2]["_warning"]

    @pytest.mark.parametrize("tool", ["write_file", "patch"])
    async def test_a_file_that_changed_since_it_was_read_is_told(self, tools, tool):
        async def edit(n):
            if tool == "write_file":
                return await tools("write_file", path="a.txt", content=f"mine {n}\n")
            return await tools("patch", path="a.txt", old_string="line", new_string=f"line{n} line")

        await tools.sandbox.write_file("a.txt", b"a line\n")
        await tools("read_file", path="a.txt")
        assert "_warning" not in await edit(1)
        await tools.sandbox.write_file("a.txt", b"another line\n")
        assert "had changed since you last read" in (await edit(2))["_warning"]
        assert "_warning" not in await tools("write_file", path="a.txt", content="b")

    async def test_a_file_that_was_never_read_is_written_without_a_warning(self, tools):
        await tools.sandbox.write_file("a.txt", b"a\n")
        assert "_warning" not in await tools("write_file", path="a.txt", content="b\n")

    async def test_lint_says_whether_the_error_is_new(self, tools):
        assert "note" not in (await tools("write_file", path="a.py", content="x = (\n"))["lint"]
        worse = await tools("patch", path="a.py", old_string="x", new_string="y")
        (found,) = worse["lint"].values()
        assert "before this change too" in found["note"]
        assert (await tools("write_file", path="a.py", content="x = 1\n"))["lint"]["status"] == "ok"
        assert "lint" not in await tools("write_file", path="a.py", content="x = 2\n")
