"""`hermes-rl bench NAME`: measures one part of hermes-rl and prints the figures with their targets.

To add a bench, add its name to `BENCHES` and a module `environments/apps/bench/bench_NAME.py` with `HELP`,
`add_arguments(parser)` and `measure(args) -> Report`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

EXAMPLE = "hermes-rl bench loop --rollouts 64 --turns 8"

BENCHES = ("loop", "serve", "tools")


@dataclass(frozen=True)
class Figure:
    """One measured figure; `target` is the most it should be, None when it is only reported."""

    name: str
    value: float
    unit: str
    target: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


@dataclass(frozen=True)
class Report:
    """What a bench measured, and under which settings."""

    bench: str
    settings: dict[str, float | int | str]
    figures: tuple[Figure, ...]


class Bench(Protocol):
    """What a `bench_NAME` module offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def measure(self, args: argparse.Namespace) -> Report: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True)
    for name in BENCHES:
        bench = _load(name)
        sub = benches.add_parser(name, help=bench.HELP, description=bench.HELP)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        bench.add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """Measure and print; a missed target is shown but does not change the exit code: this machine may be busy."""
    report = _load(args.bench).measure(args)
    print(as_json(report) if args.json else as_table(report))
    return 0


def as_json(report: Report) -> str:
    figures = {figure.name: {**asdict(figure), "met": figure.met} for figure in report.figures}
    return json.dumps({"bench": report.bench, "settings": report.settings, "figures": figures})


def as_table(report: Report) -> str:
    settings = ", ".join(
        f"{name} {value:g}" if not isinstance(value, str) else f"{name} {value}"
        for name, value in report.settings.items()
    )
    lines = [f"bench {report.bench}: {settings}"]
    width = max(len(figure.name) for figure in report.figures)
    for figure in report.figures:
        verdict = "" if figure.met is None else f"   target <= {figure.target:g}: {'met' if figure.met else 'MISSED'}"
        lines.append(f"  {figure.name:<{width}}  {figure.value:>10.3f} {figure.unit:<8}{verdict}".rstrip())
    return "\n".join(lines)


async def timed(call: Callable[..., Awaitable[object]], *arguments: Any) -> float:
    """Seconds that one call took."""
    began = time.perf_counter()
    await call(*arguments)
    return time.perf_counter() - began


def _load(name: str) -> Bench:
    return cast("Bench", importlib.import_module(f"environments.apps.bench.bench_{name}"))
