"""report.html of a run: curves, tables and example rollouts before and after, in one file without scripts; and
rollouts.html, every rollout of training and of the evaluations, which the report links by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlencode

import orjson

from agent_loop.records.record import RolloutRecord
from environments.apps.learn.charts import all_charts
from environments.apps.learn.display import number, percent, with_error
from environments.apps.learn.run_folder import read_entries
from environments.runs.report.html_page import build_report, read_rollouts
from environments.runs.store import write_whole

EXAMPLES = 8
PAGE = Path(__file__).with_name("page.html")


def write_report(folder: Path, path: Path, compared: Sequence[Path] = ()) -> None:
    """Write the page of a run to `path`; its charts also show the `compared` runs, or else the run's controls."""
    runs = {place.name: read_entries(place) for place in (folder, *(compared or controls_of(folder)))}
    entries = runs[folder.name]
    link = _Links(folder)
    charts = "".join(f"<figure>{chart.svg()}</figure>" for chart in all_charts(runs))
    page = Template(PAGE.read_text("utf-8")).substitute(
        title=escape(f"hermes-rl learn: {folder.name}"),
        verdict=escape(verdict(entries)),
        charts=charts,
        kinds=_kinds(entries, link),
        steps=_steps(entries, link),
        examples=_examples(folder, entries, link),
        rollouts=link.to("", "Every rollout, with its tokens"),
    )
    write_whole(path, page.encode())


CONTROLS = ("shuffled", "shifted")


def controls_of(folder: Path) -> list[Path]:
    """Runs next to this one that are named as its controls: `learn --control shuffled --out runs/learn-shuffled`."""
    named = (folder.with_name(f"{folder.name}-{control}") for control in CONTROLS)
    return [place for place in named if (place / "metrics.jsonl").is_file()]


def write_rollouts(folder: Path) -> None:
    """rollouts.html: training rollouts by the step they were made for, and those of each evaluation."""
    files = [folder / "rollouts.jsonl", *sorted((folder / "evaluations").glob("step-*.jsonl"), key=_step_of)]
    labels: dict[str, str] = {}

    def records() -> Iterator[RolloutRecord]:
        for file in filter(Path.is_file, files):
            for record in read_rollouts(file):
                labels[record.rollout_id] = _label(file, record)
                yield record

    page = build_report(records(), title=str(folder), label=lambda record: labels[record.rollout_id])
    if labels:
        write_whole(folder / ROLLOUTS, page.encode())


ROLLOUTS = "rollouts.html"


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


def _label(file: Path, record: RolloutRecord) -> str:
    if file.parent.name == "evaluations":
        return _evaluation_label(_step_of(file))
    weights = next((call.weights_version for call in record.sampled_calls if call.weights_version), None)
    return "training" if weights is None else _training_label(int(weights) + 1)


def _training_label(step: int) -> str:
    """Rollouts for a step are sampled by the weights of the step before."""
    return f"for step {step}"


def _evaluation_label(step: int) -> str:
    return f"evaluation after step {step}"


class _Links:
    """Links to the page of rollouts, or plain text while there is none."""

    def __init__(self, folder: Path) -> None:
        self._there = (folder / ROLLOUTS).is_file()

    def to(self, label: str, text: str) -> str:
        """Markup that leads to the rollouts of this label."""
        if not self._there:
            return escape(text)
        state = f"#{urlencode({'step': label})}" if label else ""
        return f'<a href="{ROLLOUTS}{escape(state)}">{escape(text)}</a>'


def verdict(entries: Sequence[Mapping[str, Any]]) -> str:
    """The result of a run in one sentence."""
    evaluations = [entry for entry in entries if entry["event"] == "evaluation"]
    if not evaluations:
        return "No evaluation yet."
    first, last = evaluations[0], evaluations[-1]
    if first is last:
        return f"Held-out success after step {last['step']}: {with_error(dict(last))}; not evaluated since."
    minutes = last["elapsed_s"] / 60
    return (
        f"Held-out success went from {with_error(dict(first))} to {with_error(dict(last))} "
        f"({last['rollouts']} rollouts of {last['items']} tasks each time) in {last['step']} steps "
        f"and {minutes:.1f} minutes; answers that parse: {percent(first['parse_rate'])} to "
        f"{percent(last['parse_rate'])}."
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of markup."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _kinds(entries: Sequence[Mapping[str, Any]], link: _Links) -> str:
    evaluations = [entry for entry in entries if entry["event"] == "evaluation"]
    kinds = sorted({kind for entry in evaluations for kind in entry["by_kind"]})
    rows = [[escape(kind), *(with_error(entry["by_kind"].get(kind, {})) for entry in evaluations)] for kind in kinds]
    heads = (link.to(_evaluation_label(entry["step"]), f"step {entry['step']}") for entry in evaluations)
    return _table(["kind of task", *heads], rows)


def _steps(entries: Sequence[Mapping[str, Any]], link: _Links) -> str:
    heads = {
        "reward": 3,
        "loss": 4,
        "logprob_difference_mean": 4,
        "logprob_difference_max": 3,
        "ratio_mean": 3,
        "gradient_norm": 3,
        "groups_without_signal": 0,
        "staleness_mean": 1,
        "tokens_per_s": 0,
        "sampling_s": 1,
        "tools_s": 1,
        "train_s": 1,
        "sync_s": 1,
    }
    rows = [
        [
            link.to(_training_label(entry["step"]), str(entry["step"])),
            *(number(entry.get(key), digits) for key, digits in heads.items()),
        ]
        for entry in entries
        if entry["event"] == "step"
    ]
    return _table(["step", *(head.replace("_", " ") for head in heads)], rows)


def _examples(folder: Path, entries: Sequence[Mapping[str, Any]], link: _Links) -> str:
    """The first answer to some held-out tasks, before and after."""
    steps = [entry["step"] for entry in entries if entry["event"] == "evaluation"]
    if not steps:
        return ""
    before, after = (_first_answers(folder / "evaluations" / f"step-{step}.jsonl") for step in (steps[0], steps[-1]))
    rows = [
        [escape(text) for text in (_task(before[item]), _answer(before[item]), _answer(after[item]))]
        for item in list(before)[:EXAMPLES]
        if item in after
    ]
    ends = (("before", steps[0]), ("after", steps[-1]))
    heads = (link.to(_evaluation_label(step), f"{word} (step {step})") for word, step in ends)
    return _table(["task", *heads], rows)


def _first_answers(path: Path) -> dict[str, RolloutRecord]:
    found: dict[str, RolloutRecord] = {}
    if path.is_file():
        for record in read_rollouts(path):
            if record.trainable:
                found.setdefault(record.item_id, record)
    return found


def _task(record: RolloutRecord) -> str:
    users = [str(message["content"]) for message in record.messages if message["role"] == "user"]
    return users[-1] if users else record.item_id


def _answer(record: RolloutRecord) -> str:
    """What the model wrote, and whether it solved the task."""
    sampled = [message for message in record.messages if message["role"] == "assistant"]
    last = sampled[-1] if sampled else {}
    calls = [call["function"] for call in last.get("tool_calls") or []]
    text = " ".join(_call(call) for call in calls) or str(last.get("content") or "(nothing)")
    return f"{'solved' if record.verifier_score else 'not solved'}: {text}"


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    try:
        given = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return str(arguments)
    return str(given.get("command", given)) if isinstance(given, dict) else str(given)
