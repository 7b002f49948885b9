"""Charts as SVG: points with error bars, one line per run, a legend. Without scripts, so a README can show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Entries = Sequence[Mapping[str, Any]]


def held_out(runs: Mapping[str, Entries], over_minutes: bool = False) -> Chart:
    """Success on held-out tasks with standard errors: the chart that says whether it learned."""
    lines = [Line(name, _points(entries, "evaluation", "success", over_minutes)) for name, entries in runs.items()]
    title = "Held-out tasks solved in the sandbox (± standard error)"
    return Chart(title, lines, "minutes" if over_minutes else "step", 0.0, 1.0, as_percent=True)


def all_charts(runs: Mapping[str, Entries]) -> list[Chart]:
    def of(title: str, key: str, event: str = "step", **look: Any) -> Chart:
        return Chart(title, [Line(name, _points(entries, event, key)) for name, entries in runs.items()], **look)

    return [
        held_out(runs),
        of("Reward of training rollouts, shaping included", "reward"),
        of("Training answers that parse", "parse_rate", low=0.0, high=1.0, as_percent=True),
        of("Recomputed against recorded logprob, mean difference", "logprob_difference_mean", low=0.0),
        of("Training tasks solved", "success", low=0.0, high=1.0, as_percent=True),
        of("Staleness of trained rows, in steps", "staleness_mean", low=0.0),
    ]


def _points(entries: Entries, event: str, key: str, over_minutes: bool = False) -> list[Point]:
    return [
        Point(entry["elapsed_s"] / 60 if over_minutes else entry["step"], entry[key], entry.get("standard_error"))
        for entry in entries
        if entry["event"] == event and entry.get(key) is not None
    ]


WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 68, 16, 34, 46
COLOURS = ("#1a7f5a", "#c2410c", "#6d5bd0", "#0b6fb8", "#a11d55", "#6b6b6b")
DASHES = ("", "6 4", "2 3", "8 3 2 3", "4 2", "1 3")
"""Lines can be told apart without colour."""
GRID_LINES = 5
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True)
class Point:
    """`error` is the standard error."""

    x: float
    y: float
    error: float | None = None


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """Bounds that are not given are taken from the points."""

    title: str
    lines: Sequence[Line]
    x_title: str = "step"
    low: float | None = None
    high: float | None = None
    as_percent: bool = False

    def svg(self) -> str:
        lines = [line for line in self.lines if line.points]
        scale = _Scale.of(self, lines)
        name = f'role="img" aria-label="{escape(self.title)}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {name} {FONT}>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text x="{LEFT}" y="18" font-size="14" font-weight="600" fill="#222">{escape(self.title)}</text>',
            *_axes(self, scale),
        ]
        for number, line in enumerate(lines):
            parts += _curve(line, scale, COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)])
        if len(lines) > 1:
            parts += _legend(lines)
        return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    y_step: float

    @classmethod
    def of(cls, chart: Chart, lines: Sequence[Line]) -> _Scale:
        points = [point for line in lines for point in line.points] or [Point(0.0, 0.0)]
        xs = [point.x for point in points]
        lows = [point.y - (point.error or 0.0) for point in points]
        highs = [point.y + (point.error or 0.0) for point in points]
        low = min(lows) if chart.low is None else chart.low
        high = max(highs) if chart.high is None else chart.high
        if high <= low:
            high = low + (abs(low) or 1.0)
        size = _step(low, high, GRID_LINES)
        low, high = math.floor(low / size + 1e-9) * size, math.ceil(high / size - 1e-9) * size
        return cls(min(xs), max(max(xs), min(xs) + 1.0), low, high, size)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(self.y_high, max(self.y_low, value))
        return HEIGHT - BOTTOM - (inside - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def _axes(chart: Chart, scale: _Scale) -> list[str]:
    parts = []
    for value in _ticks(scale.y_low, scale.y_high, scale.y_step):
        y = scale.y(value)
        text = f"{100 * value:.0f} %" if chart.as_percent else f"{value:.4g}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{text}</text>')
    for value in _ticks(scale.x_low, scale.x_high, max(1.0, _step(scale.x_low, scale.x_high, 8))):
        x = scale.x(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#666">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle" fill="#666">{escape(chart.x_title)}</text>')
    return parts


def _step(low: float, high: float, lines: int) -> float:
    """A round distance that parts the range into about that many."""
    rough = (high - low) / lines
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))


def _ticks(low: float, high: float, size: float) -> list[float]:
    """Its multiples between the ends; 0 is 0, whatever rounding makes of it."""
    first = math.ceil(low / size - 1e-9)
    return [number * size for number in range(first, math.floor(high / size + 1e-9) + 1)]


def _curve(line: Line, scale: _Scale, colour: str, dash: str) -> list[str]:
    places = [(scale.x(point.x), scale.y(point.y), point) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>']
    for x, y, point in places:
        if point.error:
            top, foot = scale.y(point.y + point.error), scale.y(point.y - point.error)
            parts.append(f'<path d="M{x:.1f} {top:.1f}V{foot:.1f}" stroke="{colour}" stroke-width="1.5"/>')
        said = f"{line.name}: {point.x:g}, {point.y:.4g}" + (f" ± {point.error:.2g}" if point.error else "")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(said)}</title></circle>')
    return parts


def _legend(lines: Sequence[Line]) -> list[str]:
    parts = []
    x = LEFT + 4.0
    for number, line in enumerate(lines):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<path d="M{x:.0f} {TOP + 2}h24" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{x + 30:.0f}" y="{TOP + 6}" fill="#333">{escape(line.name)}</text>')
        x += 46 + 6.6 * len(line.name)
    return parts
