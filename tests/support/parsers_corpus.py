"""The corpus of recorded cases, judged; also prints the table of pass rates for `tool_parsers/FORMATS.md`.

Print it with `python tests/support/parsers_corpus.py` from the top of the checkout.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "tool_parsers" / "data"
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.parsers_judge import same, verdict  # noqa: E402
from tool_parsers import get_parser  # noqa: E402


@cache
def records() -> tuple[dict[str, Any], ...]:
    lines = [line for name in ("peers", "llamacpp") for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    return tuple(json.loads(line) for line in lines)


@cache
def refused() -> dict[str, str]:
    """Case id -> key of the reason why this project answers differently."""
    return dict(json.loads((DATA / "refused.json").read_text()))


def complaints(record: dict[str, Any]) -> list[str]:
    """What the source's own assertions have against our answer; [] = pass."""
    result = get_parser(record["parser"]).parse(record["input_text"], record["tools"], record.get("start_state"))
    calls = [(call.name, call.arguments) for call in result.good_calls]
    return verdict(record, result.content, calls, result.reasoning)


def calls_as_recorded(record: dict[str, Any]) -> bool:
    """Whether our calls equal the peer's recorded answer in every name and argument, asserted or not."""
    result = get_parser(record["parser"]).parse(record["input_text"], record["tools"], record.get("start_state"))
    ours = [[call.name, call.arguments] for call in result.good_calls]
    return same(ours, [[call["name"], call["arguments"]] for call in record["expected_tool_calls"]])


def table() -> str:
    """Pass rates per format as Markdown."""
    total, passed, named, equal = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for record in records():
        name = record["parser"]
        total[name] += 1
        passed[name] += not complaints(record)
        named[name] += record["id"] in refused()
        equal[name] += calls_as_recorded(record)
    lines = ["| format | cases | pass | refused by name | calls equal the recorded answer |", "|---|---|---|---|---|"]
    for name in sorted(total):
        lines.append(f"| {name} | {total[name]} | {passed[name]} | {named[name] or ''} | {equal[name]} |")
    lines.append(
        f"| **all** | **{total.total()}** | **{passed.total()}** | **{named.total()}** | **{equal.total()}** |"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
