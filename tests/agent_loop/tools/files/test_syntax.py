"""The syntax check names the first error, knows its formats, and survives hostile text."""

import pytest

from agent_loop.tools.files.syntax import MAX_CHARS, lint, syntax_error


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("a.py", "def f(:\n", "line 1"),
        ("/x/b.PY", "x = (1,\ny = 2\n", "line 1"),
        ("a.json", '{"a": 1,}', "line 1"),
        ("a.toml", "a = \n", "line 1"),
        ("a.yaml", "a: [1, 2\nb: 3\n", "line"),
        ("a.yml", "\tx: 1", "line 1"),
    ],
)
def test_an_error_is_named_with_its_line(path, text, said):
    assert said in syntax_error(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", "print('ok')\n"),
        ("a.py", "x = '\\d'\n"),
        ("a.json", "[1, 2]"),
        ("a.toml", "a = 1\n"),
        ("a.yaml", "a: !custom {b: 1}\n---\nc: 2\n"),
        ("a.txt", "def f(:"),
        ("Makefile", "x = ("),
        ("a.py", "(" * (MAX_CHARS + 1)),
    ],
)
def test_good_text_unknown_formats_and_large_files_are_not_complained_about(path, text):
    assert syntax_error(path, text) is None


@pytest.mark.parametrize(
    "text",
    [
        "(" * 50_000,
        "-" * 50_000 + "1",
        "a" + ".b" * 30_000,
        "not " * 15_000 + "x",
        "x = " + "[" * 20_000 + "]" * 20_000,
        "if 1:\n" + "".join(" " * n + "if 1:\n" for n in range(1, 340)),
        "a" + "+a" * 30_000,
        "lambda: " * 7_000 + "1",
        "f'{" * 1000,
        "\0",
        "\ud800",
    ],
)
@pytest.mark.parametrize("suffix", [".py", ".json", ".yaml", ".toml"])
def test_text_made_to_break_parsers_does_not(text, suffix):
    syntax_error(f"a{suffix}", text)


@pytest.mark.parametrize(
    ("path", "text"),
    [("a.yaml", "[" * 63_000), ("a.yaml", '["]",' * 12_000), ("a.yml", "{" * 63_000), ("a.toml", "a." * 3_900 + "b=1")],
)
def test_what_would_take_seconds_is_not_checked(path, text):
    assert syntax_error(path, text) is None


def test_lint_compares_before_and_after():
    good, bad = "x = 1\n", "x = (\n"
    assert lint("a.py", good, good) is None
    assert lint("a.py", None, good) is None
    assert lint("a.py", good, bad)["status"] == "error"
    assert "note" not in lint("a.py", good, bad)
    assert "before this change too" in lint("a.py", bad, bad)["note"]
    assert lint("a.py", bad, good) == {"status": "ok", "output": "The syntax error that the file had is gone."}
