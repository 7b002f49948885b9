"""The curves of one or several runs, from their metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.learn.charts import Chart, Line, Point

Entries = Sequence[Mapping[str, Any]]


def held_out(runs: Mapping[str, Entries], over_minutes: bool = False) -> Chart:
    """Success on held-out tasks with standard errors: the picture that says whether it learned."""
    lines = [Line(name, _points(entries, "evaluation", "success", over_minutes)) for name, entries in runs.items()]
    title = "Held-out tasks solved in the sandbox, temperature 1.0 (± standard error)"
    return Chart(title, lines, "minutes" if over_minutes else "step", 0.0, 1.0, as_percent=True)


def all_charts(runs: Mapping[str, Entries]) -> list[Chart]:
    """Everything the report shows."""

    def of(title: str, key: str, event: str = "step", **look: Any) -> Chart:
        return Chart(title, [Line(name, _points(entries, event, key)) for name, entries in runs.items()], **look)

    return [
        held_out(runs),
        of("Reward of training rollouts, shaping included", "reward"),
        of("Training answers that parse", "parse_rate", low=0.0, high=1.0, as_percent=True),
        of("Recomputed logprob against the recorded one, mean difference", "logprob_difference_mean", low=0.0),
        of("Training tasks solved", "success", low=0.0, high=1.0, as_percent=True),
        of("Staleness of trained rows, in steps", "staleness_mean", low=0.0),
    ]


def _points(entries: Entries, event: str, key: str, over_minutes: bool = False) -> list[Point]:
    return [
        Point(entry["elapsed_s"] / 60 if over_minutes else entry["step"], entry[key], entry.get("standard_error"))
        for entry in entries
        if entry["event"] == event and entry.get(key) is not None
    ]
