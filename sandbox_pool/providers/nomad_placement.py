"""Why the scheduler has not placed a host, in one sentence that names what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def placement_problem(evaluations: Iterable[dict[str, Any]]) -> str:
    """From a job's evaluations; empty while the scheduler has found no fault.

    The status alone does not tell: an evaluation that placed nothing is `complete` and refers to a blocked one.
    """
    newest = sorted(evaluations, key=lambda each: int(each.get("CreateIndex") or 0), reverse=True)
    for evaluation in newest:
        failed = evaluation.get("FailedTGAllocs") or {}
        for metric in failed.values():
            return _sentence(metric)
    return ""


def _sentence(metric: dict[str, Any]) -> str:
    parts = []
    for resource, nodes in sorted((metric.get("DimensionExhausted") or {}).items()):
        parts.append(f"{resource} is exhausted on {_nodes(nodes)}")
    for reason, nodes in sorted((metric.get("ConstraintFiltered") or {}).items()):
        parts.append(f"the constraint `{reason}` leaves out {_nodes(nodes)}")
    for quota in metric.get("QuotaExhausted") or []:
        parts.append(f"the quota {quota} is used up")
    evaluated = int(metric.get("NodesEvaluated") or 0)
    if not parts and not evaluated:
        places = ", ".join(metric.get("NodesAvailable") or {}) or "none"
        parts.append(f"no node is eligible (datacenters with nodes: {places})")
    return "; ".join(parts) or f"none of {_nodes(evaluated)} would do"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
