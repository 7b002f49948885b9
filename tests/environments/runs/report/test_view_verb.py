from __future__ import annotations

from pathlib import Path

import pytest

from environments.apps.cli import main as cli
from environments.runs.report.html_page import read_rollouts
from support.records import make_run, write_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path / "rollouts.jsonl", make_run(items=2, samples=2))


def test_view_writes_a_page_beside_the_file_and_prints_where(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["view", str(run_file)]) == 0
    page = run_file.with_name("report.html")
    assert capsys.readouterr().out.strip() == str(page)
    assert "scripted-good" in page.read_text()


def test_view_takes_the_folder_of_a_run_and_another_output(run_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "other.html"
    assert cli.main(["view", str(run_file.parent), "--output", str(target)]) == 0
    assert target.exists()
    assert not run_file.with_name("report.html").exists()


def test_view_opens_the_page_when_asked(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli.main(["view", str(run_file), "--open"]) == 0
    assert opened == [run_file.with_name("report.html").as_uri()]


def test_texts_are_cut_as_asked(run_file: Path) -> None:
    assert cli.main(["view", str(run_file), "--max-chars", "100"]) == 0
    assert "left out of this page" in run_file.with_name("report.html").read_text()


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        (None, [], "cannot read"),
        (b'{"version": 1, "nonsense": 2}\n', [], "line 1: unknown key 'nonsense'"),
        (b"not json\n", [], "line 1:"),
        (b"{}\n", ["--max-chars", "5"], "at least 100"),
        (b"", ["--output", "/nowhere/at/all.html"], "cannot write"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    content: bytes | None, words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert cli.main(["view", str(file), *words]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert "\n" not in said


def test_a_file_cut_off_in_its_last_line_is_read_up_to_there(run_file: Path) -> None:
    whole = run_file.read_bytes()
    run_file.write_bytes(whole[:-50])
    assert len(list(read_rollouts(run_file))) == whole.count(b"\n") - 1
    run_file.write_bytes(b"{broken\n" + whole)
    with pytest.raises(ValueError, match="line 1"):
        list(read_rollouts(run_file))
