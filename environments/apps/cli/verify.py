"""`hermes-rl verify`: proves that stored rollouts are token-exact, or names the first violation."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import UsageError, at_least

if TYPE_CHECKING:
    from agent_loop.records.against import Confirmation
    from agent_loop.records.record import RolloutRecord
    from agent_loop.records.verify import Report

EXAMPLE = "hermes-rl verify runs/demo/rollouts.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a rollouts.jsonl, or the folder of a run")
    parser.add_argument("--against", metavar="URL", help="ask this server again at random sampled positions")
    parser.add_argument("--backend", default="auto", help="auto, llamacpp, vllm or sglang (default: ask the server)")
    parser.add_argument("--positions", type=at_least(1), default=300, help="positions to ask about (default 300)")
    parser.add_argument(
        "--tolerance", type=at_least(0, float), help="largest difference allowed (default: measured noise floor)"
    )
    parser.add_argument(
        "--differences", type=Path, metavar="JSON", help="with --against: write every position here, for view to draw"
    )
    parser.add_argument("--seed", type=int, default=0, help="which positions are chosen")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Check the file; exit code 1 and the first violation when something is wrong."""
    from environments.runs.report.html_page import find_rollouts

    if args.against is not None:
        check_address("--against", args.against)
    elif args.differences is not None:
        raise UsageError("--differences needs --against: without a model there is nothing to differ from")
    report, with_tokens = _read(find_rollouts(args.file), keep=args.against is not None)
    confirmation = None
    if args.against is not None and report.ok:
        if not with_tokens:
            raise UsageError(f"{args.file}: no rollout has tokens, there is nothing to ask {args.against} about")
        confirmation = asyncio.run(_confirm(args, with_tokens))
        if args.differences is not None:
            write_differences(args.differences, confirmation)
    first = _first_violation(report, confirmation)
    if args.json:
        print(json.dumps(_as_json(report, confirmation, first), indent=2))
    else:
        print(_as_table(report, confirmation) + (f"\n\nFAILED: {first}" if first else ""))
    return 1 if first else 0


def _read(path: Path, *, keep: bool) -> tuple[Report, list[tuple[int, RolloutRecord]]]:
    """The report on a file, and its records with tokens when they are needed again."""
    from agent_loop.records.verify import Report, read_records

    report = Report()
    kept: list[tuple[int, RolloutRecord]] = []
    first_lines: dict[str, int] = {}
    try:
        with path.open("rb") as lines:
            for number, record in read_records(lines):
                if (first := first_lines.setdefault(record.rollout_id, number)) != number:
                    raise ValueError(f"line {number}: the rollout {record.rollout_id!r} stands in line {first} already")
                report.add(record, number)
                if keep and record.segments:
                    kept.append((number, record))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    if not report.rollouts:
        raise UsageError(f"{path}: no rollouts in it")
    if not report.sampled_turns:
        raise UsageError(f"{path}: nothing to verify: none of its {report.rollouts} rollouts sampled a turn")
    return report, kept


def check_address(flag: str, url: str) -> None:
    from agent_loop.model.backends.http import http_address

    try:
        http_address(url)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


async def _confirm(args: argparse.Namespace, records: list[tuple[int, RolloutRecord]]) -> Confirmation:
    from agent_loop.model.backends import connect
    from agent_loop.model.contract import ModelError
    from agent_loop.records.against import confirm

    try:
        backend = await connect(args.against, args.backend)
        try:
            return await confirm(records, backend, positions=args.positions, tolerance=args.tolerance, seed=args.seed)
        finally:
            await backend.close()
    except (ModelError, ValueError) as error:
        raise UsageError(f"--against: {error}") from error


def write_differences(path: Path, confirmation: Confirmation) -> None:
    """Every position that was asked about, for `view --differences` to draw."""
    from environments.runs.store import write_whole

    found = [
        {
            "rollout_id": d.place.rollout_id,
            "segment": d.place.segment,
            "position": d.place.position,
            "stored": d.place.logprob,
            "again": d.again,
        }
        for d in confirmation.differences
    ]
    beyond = confirmation.tolerance.largest
    write_whole(path, json.dumps({"tolerance": beyond, "differences": found}).encode())


def _as_json(report: Report, confirmation: Confirmation | None, first: str | None) -> dict[str, Any]:
    counts = {k: v for k, v in vars(report).items() if isinstance(v, int)}
    checks = {name: {"rollouts": n, "violations": report.violations_of(name)} for name, n in report.checked.items()}
    answer: dict[str, Any] = {"ok": first is None, "first_violation": first, **counts, "checks": checks}
    if confirmation is not None:
        worst = confirmation.largest
        answer["against"] = {
            "positions": len(confirmation.differences),
            "mean_difference": confirmation.mean,
            "largest_difference": worst.size if worst else 0.0,
            "tolerance_largest": confirmation.tolerance.largest,
            "tolerance_mean": confirmation.tolerance.mean,
            "tolerance_from": confirmation.tolerance.said,
        }
    return answer


def _first_violation(report: Report, confirmation: Confirmation | None) -> str | None:
    if report.violations:
        return str(report.violations[0])
    return None if confirmation is None else confirmation.violation


def _as_table(report: Report, confirmation: Confirmation | None) -> str:
    r = report
    counts = f"{r.segments} segments, {r.calls} calls, {r.tokens} tokens, {r.trained_tokens} trained"
    lines = [f"{r.rollouts} rollouts, {r.with_tokens} with tokens: {counts}", ""]
    lines.append(f"{'check':<24}{'rollouts':>10}{'violations':>12}")
    lines += [f"{name:<24}{n:>10}{r.violations_of(name):>12}" for name, n in r.checked.items()]
    if r.untrained_samples:
        lines.append(f"\n{r.untrained_samples} sampled tokens came without a logprob and are not trained")
    if confirmation is not None:
        places, mean, allowed = len(confirmation.differences), confirmation.mean, confirmation.tolerance
        worst = confirmation.largest.size if confirmation.largest else 0.0
        lines.append(f"\nasked the model again at {places} positions: mean difference {mean:.4f}, largest {worst:.4f}")
        lines.append(f"tolerance: largest {allowed.largest:.4f}, mean {allowed.mean:.4f} ({allowed.said})")
    return "\n".join(lines)
