"""Held-out success of several runs in one chart.

python -m environments.apps.learn.plot_runs RUN... --out FILE.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from environments.apps.learn.charts import held_out
from environments.apps.learn.learn_report import write_report
from environments.apps.learn.run_folder import read_entries
from environments.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the chart; to a name that ends in .html, the report of the first run with the others in its charts."""
    parser = argparse.ArgumentParser(prog="python -m environments.apps.learn.plot_runs", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directory, or NAME=directory")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".svg, or .html for the whole report")
    parser.add_argument("--minutes", action="store_true", help="over minutes instead of steps")
    args = parser.parse_args(arguments)
    try:
        if args.out.suffix == ".html":
            write_report(args.runs[0], args.out, args.runs[1:])
        else:
            named = [str(run).rpartition("=") for run in args.runs]
            runs = {name or Path(place).name: read_entries(Path(place)) for name, _, place in named}
            args.out.write_text(held_out(runs, args.minutes).svg(), "utf-8")
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
