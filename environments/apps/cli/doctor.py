"""`hermes-rl doctor`: what this machine can do, and how to fix what it cannot."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from environments.consoles import new_console

if TYPE_CHECKING:
    from environments.apps.doctor.doctor_checks import Finding

EXAMPLE = "hermes-rl doctor --json"

_COLOURS = {"ok": "green", "limited": "magenta", "missing": "dim", "broken": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="NAME", help="also check the endpoints and tokenizers of this config")
    parser.add_argument("--json", action="store_true", help="print one JSON object, a key per subject")


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit 1 when something is broken."""
    from environments.apps.doctor.doctor_checks import run_checks

    settings = _settings_of(args.config) if args.config is not None else None
    findings = asyncio.run(run_checks(settings))
    if args.json:
        print(json.dumps(as_json(findings), indent=2))
    else:
        _print_table(findings)
    return 1 if any(finding.status == "broken" for finding in findings) else 0


def _settings_of(config: str) -> dict[str, Any]:
    """What the file says, after the same checks as a run makes."""
    from environments.config.settings import RunConfig
    from environments.config.yaml_file import find_config, read_yaml
    from environments.launch import load_run

    data = read_yaml(find_config(config)).data
    load_run(config, (), None, RunConfig)
    return data


def as_json(findings: list[Finding]) -> dict[str, object]:
    """One key per subject; a subject with several findings (endpoints) becomes a list."""
    result: dict[str, object] = {}
    for finding in findings:
        entry = {"status": finding.status, "detail": finding.detail, "fix": finding.fix}
        earlier = result.get(finding.subject)
        if earlier is None:
            result[finding.subject] = entry
        else:
            result[finding.subject] = [*earlier, entry] if isinstance(earlier, list) else [earlier, entry]
    return result


def _print_table(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = new_console()
    if not console.is_terminal:
        for finding in findings:
            fix = f"  (fix: {finding.fix})" if finding.fix else ""
            print(f"{finding.status:8} {finding.subject:10} {finding.detail}{fix}")
        return
    table = Table(box=None, header_style="bold")
    for column in ("subject", "status", "what was found", "fix"):
        table.add_column(column)
    for finding in findings:
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(Text(finding.subject), status, Text(finding.detail), Text(finding.fix))
    console.print(table)
