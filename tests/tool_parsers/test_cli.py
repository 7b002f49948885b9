"""`hermes-rl parse`, run the way a shell runs it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from environments.apps.cli import main as cli

CALL = '<tool_call>{"name": "ls", "arguments": {"path": "."}}</tool_call>'


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str, text: str | bytes = "") -> tuple[int, str, str]:
        raw = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
        code = cli.main(["parse", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_text_in_json_out(run: Any) -> None:
    code, out, _ = run("--parser", "hermes", text=f"Hi.\n{CALL}")
    answer = json.loads(out)
    assert code == 0
    assert answer["content"] == "Hi."
    assert answer["calls"][0]["arguments"] == {"path": "."}


def test_tools_type_the_arguments_and_mark_undeclared_names(run: Any, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(
        json.dumps([{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}])
    )
    text = "<tool_call><function=f><parameter=n>3</parameter></function></tool_call>"
    _, out, _ = run("--parser", "qwen3_coder", "--tools", str(tools), text=text)
    assert json.loads(out)["calls"][0]["arguments"] == {"n": 3}
    assert json.loads(out)["calls"][0]["declared"] is True


def test_start_says_that_the_prompt_opened_the_thinking(run: Any) -> None:
    _, out, _ = run("--parser", "hermes", "--start", "reasoning", text="hm, no end")
    assert json.loads(out)["reasoning"] == "hm, no end"


def test_strict_refuses_repairs(run: Any) -> None:
    _, out, _ = run("--parser", "hermes", "--strict", text=CALL.replace('"', "'"))
    assert json.loads(out)["calls"][0]["error"]


def test_a_template_picks_the_parser(run: Any, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% if tools %}<tool_call>{{ call | tojson }}</tool_call>{% endif %}")
    _, out, _ = run("--template", str(template), text=CALL)
    assert json.loads(out)["parser"] == "hermes"
    assert json.loads(out)["calls"]


def test_one_line_per_record(run: Any) -> None:
    records = [
        {"id": "a", "parser": "hermes", "input_text": CALL, "tools": None, "start_state": "content"},
        {"id": "b", "parser": "mistral", "input_text": "Hello", "start_state": None},
    ]
    code, out, _ = run("--jsonl", text="\n".join(json.dumps(record) for record in records) + "\n\n")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["id"] for line in lines] == ["a", "b"]
    assert set(lines[0]) >= {"id", "content", "reasoning", "calls", "errors"}
    assert set(lines[0]["calls"][0]) == {"name", "arguments", "error", "repaired", "declared", "complete"}


def test_a_bad_record_costs_only_its_own_line(run: Any) -> None:
    good = json.dumps({"id": 1, "parser": "hermes", "input_text": CALL})
    bad = [
        json.dumps({"id": 2, "parser": "hermez", "input_text": ""}),
        "{oops",
        json.dumps({"id": 3, "parser": "hermes"}),
    ]
    code, out, err = run("--jsonl", text="\n".join([*bad, good]))
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert "3 bad records" in err
    assert [bool(line["errors"]) for line in lines] == [True, True, True, False]
    assert "hermes" in lines[0]["errors"][0]["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--parser", "hermez"), "hermes"),
        ((), "--parser"),
        (("--parser", "hermes", "--template", "x"), "--parser"),
        (("--parser", "hermes", "--tools", "/no/such/file"), "/no/such/file"),
        (("--template", "/no/such/file"), "/no/such/file"),
        (("--parser", "hermes", "--start", "nowhere"), "nowhere"),
        (("--jsonl", "--tools", "x"), "--jsonl"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(run: Any, words: tuple[str, ...], said: str) -> None:
    code, out, err = run(*words, text="x")
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("content", ["{oops", "{}"])
def test_a_tools_file_that_is_no_list_is_refused(run: Any, tmp_path: Path, content: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(content)
    code, _, err = run("--parser", "hermes", "--tools", str(path))
    assert code == 2
    assert "tools.json" in err


def test_bytes_that_are_not_utf8_are_survived(run: Any) -> None:
    code, out, _ = run("--parser", "hermes", text=b"\xff\xfe" + CALL.encode())
    assert code == 0
    assert json.loads(out)["calls"]


def test_help_names_the_parsers(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    out = capsys.readouterr().out
    assert "qwen3_coder" in out
    assert "hermes-rl parse --parser hermes" in out
