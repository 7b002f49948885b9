"""Charts and the report of a run."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from environments.apps.learn.charts import Chart, Line, Point
from environments.apps.learn.learn_report import verdict, write_report, write_rollouts
from environments.apps.learn.plot_runs import main as plot_runs
from environments.apps.learn.run_folder import RunFolder
from support.axe import faults
from support.browser import opened
from support.env_records import record
from support.learn_entries import evaluation, step
from support.records import make_record
from support.token_records import tokenized


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


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.2391, 0.7123), ["0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8"]),
        ((-0.6033, 0.2), ["-0.8", "-0.6", "-0.4", "-0.2", "0", "0.2"]),
        ((0.239,), ["0.2", "0.25", "0.3", "0.35", "0.4", "0.45", "0.5"]),
        ((0.0,), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ((12.0, 4711.0), ["0", "1000", "2000", "3000", "4000", "5000"]),
    ],
)
def test_the_axis_of_values_is_marked_at_round_numbers(values: tuple[float, ...], ticks: list[str]):
    line = Line("run", [Point(float(step), value) for step, value in enumerate(values)])
    texts = [node.text for node in ET.fromstring(Chart("reward", [line]).svg()).iter() if node.get("text-anchor") == "end"]
    assert texts == ticks


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


def learn_run(folder_path):
    """A run of one step with both its evaluations, and a control next to it."""
    with RunFolder(folder_path.with_name("run-shuffled")) as control:
        control.add(evaluation(0, 0.05))
    with RunFolder(folder_path) as folder:
        for entry in (evaluation(0, 0.05), step(1, loss=0.1), evaluation(1, 0.6)):
            folder.add(entry)
    for number in (0, 1):
        folder.evaluation(number).parent.mkdir(exist_ok=True)
        lines = [make_record(item=i, rollout_id=f"eval{number}-{i}").to_json() + b"\n" for i in range(2)]
        folder.evaluation(number).write_bytes(b"".join(lines))
    trained = [tokenized(make_record(sample=n, rollout_id=f"train-{n}"), weights="0").to_json() for n in range(3)]
    folder.rollouts.write_bytes(b"".join(line + b"\n" for line in trained))
    write_rollouts(folder_path)
    write_report(folder_path, folder.report)
    return folder.report


@pytest.mark.parametrize("width", [1400, 390])
async def test_the_report_fits_a_phone_and_leads_to_the_rollouts_of_a_step(width, tmp_path, browser):
    report = learn_run(tmp_path / "run")
    async with opened(browser, report.as_uri(), width=width) as tab:
        assert await tab.js("document.documentElement.scrollWidth") <= width
        assert "run-shuffled" in await tab.js("document.querySelector('svg').textContent")
        await tab.picture(tmp_path / f"learn-{width}.png")
        assert await faults(tab) == []
        await tab.click("td a", "1")
        await tab.until("document.body.dataset.ready && document.getElementById('count').innerText === '3 of 7'")
        assert len(await tab.texts(".row")) == 3
        await tab.js("location.hash = 'step=evaluation after step 1'")
        await tab.until("document.getElementById('count').innerText === '2 of 7'")
        assert await tab.js("[...document.querySelectorAll('.row')].map((r) => r.dataset.id)") == ["eval1-0", "eval1-1"]


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
