from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent_loop.records.against import Confirmation, Difference, Place, Tolerance
from environments.apps.cli import main as cli
from environments.apps.cli.verify import write_differences
from environments.apps.cli.view import read_differences
from environments.runs.report.html_page import read_rollouts
from support.records import make_run, write_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path / "rollouts.jsonl", make_run(items=2, samples=2))


def packed(page: Path, name: str) -> Any:
    """What an element of a page holds."""
    found = re.search(rf'id="{name}">([^<]*)<', page.read_text())
    assert found is not None
    return orjson.loads(gzip.decompress(base64.b64decode(found[1])))


def test_view_writes_a_page_beside_the_file_and_prints_where(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["view", str(run_file)]) == 0
    page = run_file.with_name("report.html")
    assert capsys.readouterr().out.strip() == str(page)
    index = packed(page, "index")
    assert {rollout["policy"] for rollout in index["rollouts"]} == {"smollm2-135m", "scripted-good", "scripted-sloppy"}
    assert sum(index["chunks"]) == len(index["rollouts"]) == 12
    assert [detail["id"] for detail in packed(page, "chunk-0")] == [rollout["id"] for rollout in index["rollouts"]]


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
    assert "left out of this page" in str(packed(run_file.with_name("report.html"), "chunk-0"))


def test_tokens_can_be_left_out(run_file: Path) -> None:
    page = run_file.with_name("report.html")
    for words, found in (([], 1), (["--no-tokens"], 0)):
        assert cli.main(["view", str(run_file), *words]) == 0
        assert len(packed(page, "chunk-0")[0]["tokens"]) == found


def test_the_report_of_learn_is_not_overwritten(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.with_name("metrics.jsonl").write_text("")
    assert cli.main(["view", str(run_file)]) == 0
    assert capsys.readouterr().out.strip() == str(run_file.with_name("rollouts.html"))


def test_advantages_are_those_of_the_run(run_file: Path) -> None:
    page = run_file.with_name("report.html")
    run_file.with_name("config.json").write_text('{"env": {"advantages": "mean"}}')
    assert cli.main(["view", str(run_file)]) == 0
    index = packed(page, "index")
    assert index["baseline"] == "mean"
    groups: dict[str, list[dict]] = {}
    for rollout in index["rollouts"]:
        if rollout["trainable"]:
            groups.setdefault(rollout["group"], []).append(rollout)
    for members in groups.values():
        mean = sum(rollout["score"] for rollout in members) / len(members)
        assert [r["advantage"] for r in members] == pytest.approx([r["score"] - mean for r in members])


def test_what_the_model_says_otherwise_is_kept_with_its_place(run_file: Path, tmp_path: Path) -> None:
    places = [Place("smollm2-135m-0-0", 1, 0, position, -0.5) for position in (2, 3)]
    found = Confirmation((Difference(places[0], -0.51), Difference(places[1], -2.5)), Tolerance(0.02, 0.02, "given"))
    write_differences(tmp_path / "d.json", found)
    expected = [[0, 2, -0.5, -0.51, False], [0, 3, -0.5, -2.5, True]]
    assert read_differences(tmp_path / "d.json") == {"smollm2-135m-0-0": expected}
    assert cli.main(["view", str(run_file), "--differences", str(tmp_path / "d.json")]) == 0
    details = packed(run_file.with_name("report.html"), "chunk-0")
    assert [detail.get("differences") for detail in details][:2] == [expected, None]


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
