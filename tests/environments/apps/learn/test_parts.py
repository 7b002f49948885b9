"""The parts of `learn` one by one: folder, clock, figures, curves, report, lines, plan."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import orjson
import pytest

from environments.apps.cli.evaluate import adapter_settings
from environments.apps.learn.charts import Chart, Line, Point
from environments.apps.learn.display import BoardShow, PlainShow, sparkline
from environments.apps.learn.evaluator import RolloutTail, evaluation_figures, shared_prompt
from environments.apps.learn.learn_report import verdict, write_report
from environments.apps.learn.learn_run import Clock
from environments.apps.learn.plan import LearnPlan, LearnRunConfig
from environments.apps.learn.plot_runs import main as picture
from environments.apps.learn.run_folder import RunFolder, read_entries
from environments.errors import UsageError
from environments.launch import load_run
from support.env_records import record
from support.learn_program import tiny_config


def step(number: int, **more: object) -> dict:
    return {"event": "step", "step": number, "reward": 0.1 * number, "elapsed_s": 60.0 * number, **more}


def evaluation(number: int, success: float, **more: object) -> dict:
    part = {"success": success, "standard_error": 0.04, "rollouts": 8, "parse_rate": 0.9}
    kinds = {"list_files": part, "<b>odd</b>": part}
    return {"event": "evaluation", "step": number, **part, "items": 2, "by_kind": kinds, "elapsed_s": 60.0, **more}


def save(folder: Path, number: int) -> None:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    (checkpoints / f"step-{number:04}.npz").touch()
    (checkpoints / "last").unlink(missing_ok=True)
    (checkpoints / "last").symlink_to(f"step-{number:04}.npz")


def test_a_resumed_run_forgets_what_came_after_its_last_checkpoint(tmp_path):
    with RunFolder(tmp_path) as folder:
        for entry in (evaluation(0, 0.1), step(1), step(2)):
            folder.add(entry)
    save(tmp_path, 1)
    with RunFolder(tmp_path, resume=True) as folder:
        assert folder.saved_step == 1
        assert [entry["step"] for entry in folder.entries] == [0, 1]
    assert read_entries(tmp_path) == folder.entries


def test_a_run_is_not_overwritten_unless_told_so_and_not_written_twice(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.add(step(1))
        with pytest.raises(UsageError, match="another process"), RunFolder(tmp_path, resume=True):
            pass
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="--resume goes on"), RunFolder(tmp_path):
        pass
    with RunFolder(tmp_path, fresh=True) as folder:
        assert folder.entries == []
    assert (tmp_path / "notes.txt").exists()


def test_no_step_is_started_that_would_end_too_late():
    clock = Clock(minutes=1.0)
    assert clock.another_step_fits()
    clock.step_took(20.0)
    clock.evaluation_took(30.0)
    assert clock.another_step_fits()
    clock.evaluation_took(41.0)
    assert not clock.another_step_fits()
    assert Clock(None, earlier_s=90.0).elapsed_s >= 90.0


def test_success_is_the_verifiers_word_over_all_and_by_kind():
    parsed = {"tool_calls_attempted": 1.0, "tool_calls_schema_valid": 1.0}
    rollouts = [
        record("a/0", item_id="a", score=1.2, verifier_score=1.0, metrics=parsed),
        record("a/1", item_id="a", score=0.2, verifier_score=0.0, metrics=parsed),
        record("b/0", item_id="b", score=0.2, verifier_score=0.0, metrics={"tool_calls_attempted": 0.0}),
    ]
    figures = evaluation_figures(rollouts, {"a": "sort", "b": "copy"})
    assert figures["success"] == pytest.approx(1 / 3)
    assert figures["parse_rate"] == pytest.approx(2 / 3)
    assert {kind: part["success"] for kind, part in figures["by_kind"].items()} == {"copy": 0.0, "sort": 0.5}


def test_new_rollouts_are_read_once_and_never_half(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    line = record("a/0").to_json()
    tail = RolloutTail(path)
    assert tail.new() == []
    path.write_bytes(line + b"\n" + line[:20])
    assert len(tail.new()) == 1
    with path.open("ab") as file:
        file.write(line[20:] + b"\n")
    assert len(tail.new()) == 1
    assert tail.new() == []
    assert shared_prompt(path) == []


def test_a_chart_is_a_picture_in_bounds_with_error_bars_and_a_legend():
    lines = [
        Line("learn <1>", [Point(0, 0.1, 0.05), Point(10, 0.7, 0.05)]),
        Line("shuffled", [Point(0, 0.1), Point(10, 1.9)]),
    ]
    tree = ET.fromstring(Chart("Held-out & more", lines, low=0.0, high=1.0, as_percent=True).svg())
    texts = [node.text for node in tree.iter() if node.tag.endswith("text")]
    assert {"learn <1>", "shuffled", "100 %", "10"} <= set(texts)
    places = [float(node.get("cy")) for node in tree.iter() if node.tag.endswith("circle")]
    assert len(places) == 4
    assert all(0 <= place <= 300 for place in places)
    assert ET.fromstring(Chart("nothing yet", []).svg()) is not None


def test_the_report_shows_curves_kinds_and_examples_and_escapes_what_the_model_wrote(tmp_path):
    with RunFolder(tmp_path) as folder:
        for entry in (evaluation(0, 0.05), step(1), evaluation(1, 0.6)):
            folder.add(entry)
    messages = [{"role": "user", "content": "make <x>"}, {"role": "assistant", "content": "<script>1</script>"}]
    for number in (0, 1):
        path = folder.evaluation(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(record("a/0", messages=messages).to_json() + b"\n")
    write_report(tmp_path, folder.report)
    page = folder.report.read_text()
    assert page.count("<svg") == 6
    assert "from 5.0 % ± 4.0 to 60.0 % ± 4.0" in page
    assert "make &lt;x&gt;" in page
    assert "<script>" not in page
    assert "<b>odd" not in page
    assert "No evaluation" in verdict([])


def test_a_picture_holds_several_runs_by_name(tmp_path, capsys):
    for name, end in (("one", 0.6), ("two", 0.1)):
        with RunFolder(tmp_path / name) as folder:
            folder.add(evaluation(0, 0.05))
            folder.add(evaluation(30, end))
    out = tmp_path / "a.svg"
    assert picture([f"right={tmp_path / 'one'}", str(tmp_path / "two"), "--out", str(out)]) == 0
    assert ">right<" in out.read_text()
    assert ">two<" in out.read_text()
    assert picture([str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err


def test_lines_in_a_pipe_say_the_figures():
    out = io.StringIO()
    with PlainShow(out, every_s=0.0) as show:
        show.event(step(3, parse_rate=0.5, sampling_s=2.0, train_s=11.0, tokens_per_s=210.0))
        show.evaluating(1, 27)
        show.event(evaluation(10, 0.4, duration_s=61.0))
    first, second, third = out.getvalue().splitlines()
    assert "step 3: reward 0.300" in first
    assert "210 tokens/s, sampling 2.0 s tools - s training 11.0 s" in first
    assert "evaluating: 1 of 27 tasks" in second
    assert "held-out success 40.0 % ± 4.0 (8 rollouts of 2 tasks), parse rate 90.0 %, 61 s" in third
    assert sparkline([0.0, None, 0.5, 2.0], 0.0, 1.0) == "▁ ▅█"


def test_the_board_shows_the_last_figures_their_curves_and_what_goes_on():
    out = io.StringIO()
    with BoardShow(out) as board:
        board.event(evaluation(0, 0.4, duration_s=61.0))
        board.event(step(1, parse_rate=0.5, sampling_s=2.0))
        board.say("sampling for step 2")
        board.evaluating(1, 27)
    shown = out.getvalue()
    for text in ("held-out success", "40.0 % ± 4.0", "50.0 %", "sampling 2.0 s", "sampling for step 2: 1 of 27 tasks"):
        assert text in shown


def test_a_plan_that_cannot_work_is_refused_in_one_sentence(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed (extra cpu-model)")
    source = tiny_config(tmp_path / "a.yaml")

    def plan(*settings: str) -> LearnPlan:
        kind, config = load_run(source, settings, None, LearnRunConfig)
        return LearnPlan(kind, config, tmp_path / "out")

    with pytest.raises(UsageError, match="cpu-model"):
        plan("--openai.server_type", "standin")
    with pytest.raises(UsageError, match="rollout_timeout_s is 60 s"):
        plan("--env.limits.rollout_timeout_s", "60")
    good = plan("--trainer.control", "shuffled")
    job = good.trainer_job("http://a", "http://b", Path("m.gguf"), tmp_path, False)
    assert (job.control, job.batch_size, job.max_token_len) == ("shuffled", 4, 501)
    server = good.server("http://b", Path("m.gguf"))
    serve = orjson.loads(orjson.dumps(good.serve_config("http://a", server, tmp_path / "rollouts.jsonl")))
    assert serve["env"]["extra_body"] == {"hermes_group": 2}
    assert serve["env"]["max_num_workers"] == 2


def test_an_adapter_is_served_with_a_config_that_serves_its_own_model(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed (extra cpu-model)")
    source = tiny_config(tmp_path / "a.yaml")
    adapter = tmp_path / "adapter.gguf"
    with pytest.raises(UsageError, match="no adapter at"):
        adapter_settings(str(source), adapter)
    adapter.touch()
    assert adapter_settings(str(source), adapter) == ["--openai.options.lora", str(adapter)]
    with pytest.raises(UsageError, match="cpu-model"):
        adapter_settings("terminal_tasks", adapter)
