"""Charts and the report of a run."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from environments.apps.learn.charts import Chart, Line, Point
from environments.apps.learn.learn_report import verdict, write_report
from environments.apps.learn.plot_runs import main as plot_runs
from environments.apps.learn.run_folder import RunFolder
from support.env_records import record
from support.learn_entries import evaluation, step


def test_a_chart_is_an_svg_in_bounds_with_error_bars_and_a_legend():
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


def test_a_chart_holds_several_runs_by_name(tmp_path, capsys):
    for name, end in (("one", 0.6), ("two", 0.1)):
        with RunFolder(tmp_path / name) as folder:
            folder.add(evaluation(0, 0.05))
            folder.add(evaluation(30, end))
    out = tmp_path / "a.svg"
    assert plot_runs([f"right={tmp_path / 'one'}", str(tmp_path / "two"), "--out", str(out)]) == 0
    assert ">right<" in out.read_text()
    assert ">two<" in out.read_text()
    assert plot_runs([str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
