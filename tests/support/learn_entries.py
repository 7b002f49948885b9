"""Lines of a metrics.jsonl of `learn`."""

from __future__ import annotations


def step(number: int, **more: object) -> dict:
    return {"event": "step", "step": number, "reward": 0.1 * number, "elapsed_s": 60.0 * number, **more}


def evaluation(number: int, success: float, **more: object) -> dict:
    part = {"success": success, "standard_error": 0.04, "rollouts": 8, "parse_rate": 0.9}
    kinds = {"list_files": part, "<b>odd</b>": part}
    return {"event": "evaluation", "step": number, **part, "items": 2, "by_kind": kinds, "elapsed_s": 60.0, **more}
