"""Statistics of a run, from its rollout records alone, and the tables that show them.

Scores are verifier scores: shaping does not enter. A rollout that infrastructure ended has no score and is in no mean;
what it would have been worth is reported as points lost. Every rollout without full score is classified.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_loop.records.record import RolloutRecord
from environments.consoles import PIPE_WIDTH, new_console


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return math.fsum(values) / len(values) if values else None


def clustered_standard_error(clusters: Mapping[str, Sequence[float]]) -> float | None:
    """Standard error of the mean over all values, robust to any correlation within a cluster; None below two clusters.

    sqrt(G / (G - 1)) * sqrt(sum over clusters of (sum of deviations)^2) / N. With one value per cluster this is the
    usual standard error of the mean.
    """
    full = [list(values) for values in clusters.values() if values]
    count = sum(map(len, full))
    if len(full) < 2:
        return None
    centre = math.fsum(value for values in full for value in values) / count
    squares = math.fsum(math.fsum(value - centre for value in values) ** 2 for values in full)
    return math.sqrt(squares * len(full) / (len(full) - 1)) / count


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from these, is correct (Chen et al., 2021)."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct in {samples} samples is not defined")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod((samples - correct - i) / (samples - i) for i in range(k))


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Mean of pass@k over tasks given as (samples, correct); tasks with fewer than k samples are left out."""
    return mean([pass_at_k(samples, correct, k) for samples, correct in counts if samples >= k])


FULL_SCORE = 1.0
PASS_KS = (1, 2, 4, 8, 16, 32, 64)
TIME_PARTS = ("model_s", "tools_s", "acquire_s", "verify_s")
LIMIT_OUTCOMES = ("max_turns", "max_tool_calls", "max_sampled_tokens", "length", "context_overflow")


@dataclass(frozen=True)
class Losses:
    """What infrastructure cost."""

    rollouts: int
    """Rollouts that it ended."""
    share: float
    """Of all rollouts."""
    by_cause: dict[str, int]
    points: float
    """Score they were worth: each counts as the mean of its task's other rollouts, or of the slice without any."""
    mean_if_zero: float | None
    """The mean score if they were counted as zeros, as many systems do."""


@dataclass(frozen=True)
class Slice:
    """Figures of one set of rollouts."""

    name: str
    rollouts: int
    items: int
    scored: int
    mean_score: float | None
    standard_error: float | None
    """Clustered by item."""
    mean_reward: float | None
    """What the trainer was given, shaping included."""
    pass_at: dict[int, float]
    """k -> pass@k, over items with at least k scored rollouts."""
    outcomes: dict[str, int]
    zeros: dict[str, int]
    """Why rollouts have no full score: `policy: ...`, `limit: ...`, `infrastructure: ...`."""
    losses: Losses
    calls: dict[str, float]
    """Totals of tool-call metrics, and rates over attempted calls."""
    time_s: dict[str, float]
    """Seconds per part, summed over rollouts; `other_s` is what no part accounts for."""
    sampled_tokens: float
    turns_mean: float | None


@dataclass(frozen=True)
class Summary:
    """A run: all of it, by policy, and by category."""

    overall: Slice
    policies: tuple[Slice, ...]
    categories: tuple[Slice, ...]
    isolation: dict[str, int]
    roles: dict[str, dict[str, float]]
    """What the judge and the user were asked, and what that cost: sums over the rollouts, and the mean agreement."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> bytes:
        """The same as JSON; the k of pass@k become strings."""
        return orjson.dumps(self, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2)


def classify(record: RolloutRecord) -> str | None:
    """Why a rollout has no full score; None when it has."""
    if not record.trainable:
        # `prepare` and `compute_reward` are the environment's own code: their errors are not the infrastructure's.
        whose = "environment" if record.outcome in ("prepare_error", "reward_error") else "infrastructure"
        return f"{whose}: {record.outcome}"
    if record.verifier_score is None:
        return "unscored"
    if record.verifier_score >= FULL_SCORE:
        return None
    if record.outcome in LIMIT_OUTCOMES:
        return f"limit: {record.outcome}"
    if record.metrics.get("tool_calls_attempted", 0.0) == 0.0:
        return "policy: no tool call"
    if record.metrics.get("tool_calls_executed_ok", 0.0) == 0.0:
        return "policy: no call ran"
    return "policy: partly right" if record.verifier_score > 0.0 else "policy: wrong result"


def summary_figures(summary: Summary, prefix: str) -> dict[str, float]:
    """The overall figures by name, for logs and trackers."""
    overall = summary.overall
    figures = {f"{prefix}/{name}": value for name, value in vars(overall).items() if isinstance(value, int | float)}
    figures |= {f"{prefix}/pass@{k}": value for k, value in overall.pass_at.items()}
    return figures | {f"{prefix}/lost_share": overall.losses.share}


def summarize(records: Iterable[RolloutRecord]) -> Summary:
    rollouts = list(records)
    return Summary(
        overall=summarize_slice("all", rollouts),
        policies=_by(rollouts, lambda record: record.policy),
        categories=_by(rollouts, lambda record: record.category),
        isolation=dict(Counter(record.isolation for record in rollouts if record.isolation)),
        roles=_roles(rollouts),
    )


def _roles(records: Sequence[RolloutRecord]) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = {}
    for name in sorted({name for record in records for name in record.roles}):
        uses = [record.roles[name] for record in records if name in record.roles]
        counted = ("requests", "cached", "retries", "prompt_tokens", "sampled_tokens", "cost")
        totals[name] = {key: math.fsum(use[key] for use in uses) for key in counted}
        verdicts = [verdict for use in uses for verdict in use["verdicts"]]
        if (agreement := mean([v["agreement"] for v in verdicts if v["agreement"] is not None])) is not None:
            totals[name]["agreement"] = agreement
    return totals


def _by(records: Sequence[RolloutRecord], key: Callable[[RolloutRecord], str]) -> tuple[Slice, ...]:
    groups: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        groups[key(record) or "(none)"].append(record)
    return tuple(summarize_slice(name, groups[name]) for name in sorted(groups))


def summarize_slice(name: str, records: Sequence[RolloutRecord]) -> Slice:
    scores = _scores_by_item(records)
    flat = _flat(scores)
    return Slice(
        name=name,
        rollouts=len(records),
        items=len(scores),
        scored=len(flat),
        mean_score=mean(flat),
        standard_error=clustered_standard_error(scores),
        mean_reward=mean([r.score for r in records if r.trainable and r.score is not None]),
        pass_at=_passes(scores),
        outcomes=_counted(record.outcome for record in records),
        zeros=_counted(filter(None, map(classify, records))),
        losses=_losses(records, scores),
        calls=_calls(records),
        time_s=_times(records),
        sampled_tokens=math.fsum(record.metrics.get("sampled_tokens", 0.0) for record in records),
        turns_mean=mean([float(len(record.turns)) for record in records]),
    )


def _flat(scores: dict[str, list[float]]) -> list[float]:
    return [score for values in scores.values() for score in values]


def _passes(scores: dict[str, list[float]]) -> dict[int, float]:
    counts = [(len(values), sum(value >= FULL_SCORE for value in values)) for values in scores.values() if values]
    return {k: value for k in PASS_KS if (value := mean_pass_at_k(counts, k)) is not None}


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _scores_by_item(records: Sequence[RolloutRecord]) -> dict[str, list[float]]:
    """Verifier scores of trainable rollouts; items that infrastructure took entirely keep an empty list."""
    scores: dict[str, list[float]] = {}
    for record in records:
        values = scores.setdefault(record.item_id, [])
        if record.trainable and record.verifier_score is not None:
            values.append(record.verifier_score)
    return scores


def _losses(records: Sequence[RolloutRecord], scores: dict[str, list[float]]) -> Losses:
    lost = [record for record in records if not record.trainable]
    flat = _flat(scores)
    overall = mean(flat) or 0.0
    return Losses(
        rollouts=len(lost),
        share=len(lost) / len(records) if records else 0.0,
        by_cause=_counted(record.outcome for record in lost),
        points=math.fsum(mean(scores[record.item_id] or [overall]) or 0.0 for record in lost),
        mean_if_zero=mean([*flat, *([0.0] * len(lost))]),
    )


def _calls(records: Sequence[RolloutRecord]) -> dict[str, float]:
    names = sorted({name for record in records for name in record.metrics if name.startswith("tool_calls_")})
    totals = {name: math.fsum(record.metrics.get(name, 0.0) for record in records) for name in names}
    attempted = totals.get("tool_calls_attempted", 0.0)
    if attempted:
        rates = {"valid_rate": "schema_valid", "ok_rate": "executed_ok", "repaired_rate": "repaired"}
        totals |= {rate: totals.get(f"tool_calls_{name}", 0.0) / attempted for rate, name in rates.items()}
    return totals


def _times(records: Sequence[RolloutRecord]) -> dict[str, float]:
    parts = {part: math.fsum(record.timing.get(part, 0.0) for record in records) for part in TIME_PARTS}
    others = (r.timing.get("total_s", 0.0) - math.fsum(r.timing.get(part, 0.0) for part in TIME_PARTS) for r in records)
    return parts | {"other_s": math.fsum(max(0.0, other) for other in others)}


NAME_WIDTH = 20


def render(summary: Summary) -> RenderableType:
    """Policies, categories and losses as tables; 80 columns are enough."""
    parts: list[RenderableType] = [_scores("policy", summary.policies, summary.overall)]
    if len(summary.categories) > 1:
        parts.append(_scores("category", summary.categories, None))
    if summary.overall.zeros:
        parts.append(_causes(summary.overall))
    parts += [Text(_effort_text(summary.overall)), Text(_losses_text(summary.overall))]
    parts += [Text(_role_text(name, totals)) for name, totals in summary.roles.items()]
    return Group(*parts)


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Write the tables to a console, stdout by default."""
    (console or new_console(pipe_width=PIPE_WIDTH)).print(render(summary))


def _scores(title: str, slices: tuple[Slice, ...], total: Slice | None) -> Table:
    rows = [*slices, *([total] if total is not None and len(slices) > 1 else [])]
    ks = sorted({k for row in slices for k in row.pass_at if k > 1})[-1:]
    table = Table(title=None, box=None, header_style="bold", pad_edge=False)
    table.add_column(title, overflow="fold", max_width=NAME_WIDTH)
    for name in ("score", *(f"pass@{k}" for k in ks), "reward", "rollouts", "lost", "valid"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            _with_error(row.mean_score, row.standard_error),
            *(_percent(row.pass_at.get(k)) for k in ks),
            _number(row.mean_reward),
            str(row.rollouts),
            str(row.losses.rollouts),
            _percent(row.calls.get("valid_rate")),
        )
    return table


TIME_NAMES = dict(zip((*TIME_PARTS, "other_s"), ("model", "tools", "waiting", "verifying", "other"), strict=True))


def _effort_text(row: Slice) -> str:
    total = sum(row.time_s.values())
    shares = ", ".join(f"{name} {row.time_s[part] / total:.0%}" for part, name in TIME_NAMES.items() if total)
    each = f"{_number(row.turns_mean, 1)} turns each, {row.sampled_tokens:,.0f} sampled tokens"
    return f"{row.rollouts} rollouts, {each}, {total:,.0f} s" + (f": {shares}." if shares else ".")


def _causes(row: Slice) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("why no full score")
    table.add_column("rollouts", justify="right")
    for cause, count in row.zeros.items():
        table.add_row(cause, str(count))
    return table


def _role_text(name: str, totals: Mapping[str, float]) -> str:
    agreement = f", agreement {totals['agreement']:.3f}" if "agreement" in totals else ""
    return (
        f"The {name}: {totals['requests']:,.0f} requests ({totals['cached']:,.0f} more from the cache, "
        f"{totals['retries']:,.0f} retries), {totals['prompt_tokens']:,.0f} tokens read and "
        f"{totals['sampled_tokens']:,.0f} written, cost {totals['cost']:,.2f}{agreement}."
    )


def _losses_text(row: Slice) -> str:
    losses = row.losses
    if not losses.rollouts:
        return "No rollout was lost."
    causes = ", ".join(f"{count} {name}" for name, count in losses.by_cause.items())
    return (
        f"Lost, not scored: {losses.rollouts} of {row.rollouts} rollouts ({causes}), "
        f"worth {losses.points:.1f} points; counted as zeros they would "
        f"lower the mean from {_number(row.mean_score)} to {_number(losses.mean_if_zero)}."
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _with_error(value: float | None, error: float | None) -> str:
    return _number(value) if error is None else f"{_number(value)} ± {error:.3f}"


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], low: float | None = None, high: float | None = None) -> str:
    """One character per value; a blank where a value is missing."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    bottom, top = (min(known) if low is None else low), (max(known) if high is None else high)
    span = (top - bottom) or 1.0
    places = [None if v is None else min(1.0, max(0.0, (v - bottom) / span)) for v in values]
    return "".join(" " if place is None else BARS[round(place * (len(BARS) - 1))] for place in places)
