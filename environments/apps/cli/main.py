"""Entry point of `hermes-rl`: finds the verb, imports only its module, and turns bad input into exit code 2.

A verb is one module in this folder with `HELP` (one line), `EXAMPLE` (a command that works as it stands),
`add_arguments(parser)` and `run(args) -> int`. A verb with `TAKES_SETTINGS = True` finds the dotted flags of its call
(`--env.group_size 8`) as words in `args.settings`. Adding a verb is adding its module and its name below.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from environments.config.flags import split_settings
from environments.errors import UsageError

VERBS = (
    "demo",
    "learn",
    "serve",
    "process",
    "evaluate",
    "verify",
    "view",
    "parse",
    "pool",
    "bench",
    "doctor",
)


class Verb(Protocol):
    """What a module of this folder offers."""

    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the job and return the exit code."""


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing its usage block: every bad call gets one clear sentence."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def load_verb(name: str) -> Verb:
    """Import one verb's module."""
    return cast("Verb", importlib.import_module(f"environments.apps.cli.{name}"))


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Parser for this call: all verbs by their help line, but flags only of the one that is called."""
    parser = _Parser(prog="hermes-rl", description="LLM agent rollouts for reinforcement learning.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    called = next((word for word in argv if not word.startswith("-")), None)
    for name in VERBS:
        verb = load_verb(name)
        sub = verbs.add_parser(
            name,
            help=verb.HELP,
            description=verb.HELP,
            epilog=f"example:\n  {verb.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == called:
            verb.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; bad input prints one sentence on stderr and exits 2."""
    words, settings = split_settings(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser(words).parse_args(words)
        verb = load_verb(args.verb)
        if settings and not getattr(verb, "TAKES_SETTINGS", False):
            raise UsageError(f"{args.verb} takes no settings such as {settings[0]}")
        args.settings = settings
        return verb.run(args)
    except UsageError as error:
        sys.stderr.write(f"hermes-rl: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("hermes-rl: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`hermes-rl ... | head`): nothing to report, nobody to report it to.
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
