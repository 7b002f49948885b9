"""`hermes-rl pool`: which sandboxes there are, what was left behind, what a provider keeps of its promises."""

from __future__ import annotations

import argparse

HELP = "Sandbox slots: status, gc of leftovers, conformance check, benchmark, the job of a cluster."
EXAMPLE = "hermes-rl pool bench --slots 16 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their flags."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = actions.add_parser("status", help="hosts and leases of every process of this user")
    gc = actions.add_parser("gc", help="remove what dead processes left behind")
    gc.add_argument(
        "--provider", action="append", default=[], help="also ask this provider for leftovers (local always is)"
    )
    check = actions.add_parser("check", help="run the conformance suite against a provider")
    check.add_argument("--only", action="append", default=[], metavar="TEXT", help="only checks whose id contains TEXT")
    check.add_argument("--list", action="store_true", help="list the checks and their promises, run nothing")
    bench = actions.add_parser("bench", help="measure a provider beside bare subprocesses")
    bench.add_argument("--rounds", type=int, default=100, help="samples per latency (default 100)")
    bench.add_argument("--throughput-s", type=float, default=2.0, help="seconds per throughput sample (default 2)")
    bench.add_argument("--transfer-mb", type=int, default=100, help="size of the transferred file (default 100)")
    gc.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of these providers")
    gc.add_argument("--scratch-dir", help="also look for local leftovers here")
    bench.add_argument(
        "--many", type=int, default=0, metavar="N", help="also lease N slots of one host at once, e.g. 500"
    )
    job = actions.add_parser("job", help="print the job that a provider's hosts are started from")
    for action in (check, bench, job):
        action.add_argument(
            "--provider", default="local", help="built-in name, entry point or module:Class (default local)"
        )
        action.add_argument("--slots", type=int, default=16, help="slots of the host (default 16)")
        action.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the provider")
        action.add_argument("--min-isolation", choices=("namespaces", "landlock", "uid", "plain"), default="plain")
        action.add_argument("--scratch-dir", help="where slots keep their layers")
    job.set_defaults(provider="nomad", slots=8, state_dir=None)
    for action in (status, gc, check, bench):
        action.add_argument("--json", action="store_true", help="machine-readable output")
        action.add_argument("--state-dir", help="where the journal is (default: the user's state directory)")


def run(args: argparse.Namespace) -> int:
    """Do the action."""
    from environments.apps.cli import pool_actions

    actions = {
        "status": pool_actions.status,
        "gc": pool_actions.gc,
        "check": pool_actions.check,
        "bench": pool_actions.bench,
        "job": pool_actions.job,
    }
    return actions[args.action](args)
