"""search_files with ripgrep, with grep alone, and where even grep is plain: the same answers."""

import pytest
import pytest_asyncio

from agent_loop.turn.tool_call import ToolStatus

ENGINES = [("strongest", "ripgrep"), ("strongest", "grep"), ("strongest", "busybox"), ("plain", "ripgrep")]
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize(("pool", "engine"), ENGINES, indirect=True, scope="session"),
]

FILES = {
    "src/app.py": "import os\n\ndef main():\n    return os.getcwd()\n",
    "src/util.py": "def helper(a):\n    # TODO: main idea\n    return a\n",
    "src/deep/more.txt": "main\nmain main\nother\n",
    "README.md": "The main thing\n",
    ".hidden/conf.ini": "main=1\n",
    ".git/objects/x": "main\n",
    "node_modules/lib/index.js": "main()\n",
}


@pytest.fixture(scope="session")
def engine(request):
    return request.param


@pytest_asyncio.fixture(loop_scope="session")
async def tree(tools, engine):
    """Files to search, in a sandbox that has ripgrep or only grep."""
    for path, text in FILES.items():
        await tools.sandbox.write_file(path, text.encode())
    await tools.sandbox.write_file("data.bin", b"main\0main\n")
    has_ripgrep = (await tools.sandbox.exec("command -v rg", timeout_s=5)).exit_code == 0
    if engine == "ripgrep" and not has_ripgrep:
        pytest.skip("needs ripgrep in the sandbox")
    if engine == "busybox":
        if (await tools.sandbox.exec("command -v busybox", timeout_s=5)).exit_code:
            pytest.skip("needs busybox in the sandbox")
        # What an Alpine image has: every command is BusyBox's.
        applets = "grep find ls touch seq yes head mkdir rm tr wc sh printf stat"
        await tools.sh(
            "mkdir .venv; for n in " + applets + '; do ln -s "$(type -P busybox)" .venv/$n; done; '
            'export PATH="$PWD/.venv"; ! command -v rg'
        )
    if engine == "grep" and has_ripgrep:
        # A PATH with what the search and these tests need, and without rg.
        needed = "grep find ls touch seq yes head mkdir rm"
        await tools.sh(f'mkdir .venv; ln -s $(type -P {needed}) .venv/; export PATH="$PWD/.venv"; ! command -v rg')
    return tools


async def test_content_gives_path_line_and_text(tree):
    result = await tree("search_files", pattern=r"main\(")
    assert result == {
        "total_count": 1,
        "matches": [{"path": "src/app.py", "line": 3, "content": "def main():"}],
        "truncated": False,
    }


async def test_hidden_files_are_searched_bulk_directories_and_binary_files_are_not(tree):
    result = await tree("search_files", pattern="main", output_mode="files_only")
    assert result["files"] == [".hidden/conf.ini", "README.md", "src/app.py", "src/deep/more.txt", "src/util.py"]
    assert result["total_count"] == 5


async def test_a_skipped_directory_can_be_searched_by_name(tree):
    assert (await tree("search_files", pattern="main", path="node_modules"))["matches"][0][
        "path"
    ] == "node_modules/lib/index.js"


async def test_counts(tree):
    result = await tree("search_files", pattern="main", output_mode="count", path="src")
    assert result["counts"] == {"src/app.py": 1, "src/deep/more.txt": 2, "src/util.py": 1}
    assert result["total_count"] == 4


async def test_a_file_glob_narrows(tree):
    result = await tree("search_files", pattern="main", file_glob="*.py", output_mode="files_only")
    assert result["files"] == ["src/app.py", "src/util.py"]


async def test_one_file_can_be_searched(tree):
    result = await tree("search_files", pattern="^main", path="src/deep/more.txt")
    assert [(match["path"], match["line"]) for match in result["matches"]] == [
        ("src/deep/more.txt", 1),
        ("src/deep/more.txt", 2),
    ]


async def test_pages_follow_each_other_without_gaps(tree):
    await tree.sh("for n in $(seq 130); do echo hit $n; done > many.txt")
    seen, offset = [], 0
    while True:
        page = await tree("search_files", pattern="^hit", offset=offset, limit=50)
        assert page["total_count"] == 130
        seen += [match["line"] for match in page["matches"]]
        if not page["truncated"]:
            break
        assert f"offset={offset + 50}" in page["hint"]
        offset += 50
    assert seen == list(range(1, 131))


async def test_context_lines_are_marked(tree):
    result = await tree("search_files", pattern="TODO", context=1)
    assert [(m["line"], m.get("context", False)) for m in result["matches"]] == [(1, True), (2, False), (3, True)]
    assert result["total_count"] == 1


async def test_regular_expressions_work_alike(tree):
    for pattern, lines in [
        (r"\bmain\b.*\bmain\b", 1),
        (r"^\s+return\s\w", 2),
        (r"(os|helper)\W", 2),
        ("ma.n|other", 7),
    ]:
        assert (await tree("search_files", pattern=pattern))["total_count"] == lines, pattern


async def test_a_bad_expression_is_explained(tree):
    result = await tree("search_files", pattern="(unclosed")
    assert "failed" in result["error"]
    assert tree.outcome.status is ToolStatus.ERROR


async def test_nothing_found_is_an_empty_answer(tree):
    assert await tree("search_files", pattern="zzz_nothing") == {"total_count": 0, "matches": [], "truncated": False}


async def test_names_by_glob_newest_first(tree):
    await tree.sh("touch -d '2001-01-01' src/app.py; touch -d '2002-01-01' src/util.py")
    result = await tree("search_files", pattern="*.py", target="files")
    assert result == {"total_count": 2, "files": ["src/util.py", "src/app.py"], "truncated": False}


async def test_globs_on_names_and_paths(tree):
    for pattern, path, found in [
        ("src/*.py", ".", {"src/app.py", "src/util.py"}),
        ("**/*.txt", ".", {"src/deep/more.txt"}),
        ("src/**/*.txt", ".", {"src/deep/more.txt"}),
        ("more.*", "src", {"src/deep/more.txt"}),
        ("*.ini", ".", {".hidden/conf.ini"}),
        ("index.js", ".", set()),
        ("*", "src/deep", {"src/deep/more.txt"}),
    ]:
        result = await tree("search_files", pattern=pattern, target="files", path=path)
        assert set(result["files"]) == found, pattern


async def test_a_missing_path_is_said(tree):
    for target in ("content", "files"):
        assert "Path not found" in (await tree("search_files", pattern="x", path="no/such", target=target))["error"]


ODD_NAMES = ["with space", "new\nline", "quote'\"", "-dash", "col:on:1:x", "$HOME", "star*", "ünï", "back\\slash"]


async def test_no_file_name_confuses_it(tree):
    for name in ODD_NAMES:
        await tree.sandbox.write_file(f"odd/{name}/{name}", b"needle here\n")
    paths = sorted(f"odd/{name}/{name}" for name in ODD_NAMES)
    content = await tree("search_files", pattern="needle", path="odd")
    assert content["matches"] == [{"path": path, "line": 1, "content": "needle here"} for path in paths]
    files = await tree("search_files", pattern="*", target="files", path="odd")
    assert sorted(files["files"]) == paths
    for name in ODD_NAMES:
        inside = await tree("search_files", pattern="needle", path=f"odd/{name}")
        assert [match["path"] for match in inside["matches"]] == [f"odd/{name}/{name}"]


async def test_patterns_are_never_commands_or_options(tree):
    for pattern in ("-v", "--help", "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned #'):
        for target in ("content", "files"):
            await tree("search_files", pattern=pattern, target=target, file_glob=pattern, path="src")
    assert "pwned" not in await tree.sh("ls -a . src")


async def test_long_lines_are_cut(tree):
    await tree.sandbox.write_file("min.js", b"needle" + b"x" * 10_000 + b"\n")
    (match,) = (await tree("search_files", pattern="needle", path="min.js"))["matches"]
    assert len(match["content"]) < 600


async def test_more_matches_than_can_be_collected_are_bounded_and_said(tree):
    await tree.sh("yes 'a needle in a very long haystack of text' | head -n 20000 > big.txt")
    result = await tree("search_files", pattern="needle", path="big.txt")
    assert len(result["matches"]) == 50
    assert result["total_count"] > 1_000
    assert "more matches" in result["note"]
    assert len(tree.outcome.text) < 20_000


async def test_impossible_arguments_are_refused(tree):
    for arguments in [{"pattern": ""}, {"pattern": "a\0b"}, {"pattern": "\ud800"}, {"pattern": "a", "file_glob": "\0"}]:
        assert (await tree("search_files", **arguments))["error"]
        assert tree.outcome.status is ToolStatus.INVALID
