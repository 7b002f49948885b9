"""Entry point of `hermes-rl`: finds the verb and imports only its module.

To add a verb, add its line to `VERBS` and a module of that name to this folder, with `EXAMPLE` (a command that works as
it stands), `add_arguments(parser)` and `run(args) -> int`. A verb with `TAKES_SETTINGS = True` gets the dotted flags of
its call (`--env.group_size 8`) as words in `args.settings`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import environments
from environments.config.flags import split_settings
from environments.errors import SentenceParser, UsageError, run_command

VERBS = {
    "demo": "see it work: a real model and scripted policies, sandboxed, down to exact tokens and a page",
    "learn": "watch a real model learn here: run-api, slots, llama.cpp and a reference trainer in one command",
    "serve": "feed rollouts to a trainer through Atropos' run-api",
    "process": "roll out a number of groups into a file, resuming where an earlier start stopped",
    "evaluate": "roll out the evaluation items and sum up: mean, pass@k, points lost to infrastructure",
    "offer": "an environment as a server, for trainers that call environments: OpenEnv, NeMo Gym",
    "rescore": "run the rewards of a stored run again on its kept workspaces, without the agents",
    "replay": "play a recorded rollout once more, without model and slots, and show where it goes another way",
    "compare": "set two runs against each other, item by item: difference with interval, wins, losses, flips",
    "validate": "find items that are broken, flaky or hackable before they cost anything",
    "oracle": "play benchmarks with their own right answers and with a no-op: a table of what each gets",
    "verify": "prove that stored rollouts are token-exact, offline or by asking the model again",
    "train-check": "a few rollouts through a trainer's own logprob code: are its tokens exact?",
    "view": "make an HTML page of a rollouts.jsonl, or serve it while the run goes on",
    "top": "watch a run in the terminal while it goes on",
    "export": "write chosen rollouts for a trainer (OpenAI, ShareGPT, ChatML, TRL, Parquet, OpenEnv) or another viewer",
    "parse": "take model text apart into content, reasoning and tool calls",
    "pool": "sandbox slots: status, gc of leftovers, conformance check, benchmark, the job of a cluster",
    "bench": "measure the loop, the tools or serving on this machine",
    "model": "get the weights of the model that runs on this machine's CPU",
    "config": "print the settings that a run would have, and where each comes from",
    "doctor": "show what this machine can do, with a fix for what is missing",
}
"""The help lines stand here, so that `hermes-rl --help` imports no verb."""

SCORES = ("compare", "oracle", "rescore", "validate")
"""Verbs whose modules are in the folder of that name."""
OTHER_PACKAGES = ("agent_loop", "tool_parsers", "sandbox_pool")


class Verb(Protocol):
    """What a module of this folder offers."""

    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the job and return the exit code."""


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"hermes-rl {version('hermes-rl')}")
        parser.exit()


def load_verb(name: str) -> Verb:
    folder = "scores." if name in SCORES else ""
    return cast("Verb", importlib.import_module(f"environments.apps.cli.{folder}{name.replace('-', '_')}"))


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Parser for this call: all verbs by their help line, but flags and example only of the one that is called."""
    parser = SentenceParser(prog="hermes-rl", description="LLM agent rollouts for reinforcement learning.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    called = next((word for word in argv if not word.startswith("-")), None)
    for name, line in VERBS.items():
        formatter = argparse.RawDescriptionHelpFormatter
        sub = verbs.add_parser(name, help=line, description=line, formatter_class=formatter)
        if name == called:
            verb = load_verb(name)
            sub.epilog = f"example:\n  {verb.EXAMPLE}"
            verb.add_arguments(sub)
    return parser


def check_packages() -> None:
    """UsageError when PYTHONPATH leads to somebody else's package of one of our names."""
    ours = Path(environments.__file__).parents[1]
    for name in OTHER_PACKAGES:
        spec = importlib.util.find_spec(name)
        place = spec.origin if spec is not None else None
        if place is None or Path(place).parents[1] != ours:
            found = f"found at {place}" if place else "not found"
            raise UsageError(
                f"the package {name} of hermes-rl is expected in {ours} but {found}: "
                "rename your own package, or take its folder out of PYTHONPATH"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb to its exit code."""
    return run_command("hermes-rl", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    check_packages()
    words, settings = split_settings(argv)
    args = build_parser(words).parse_args(words)
    verb = load_verb(args.verb)
    if settings and not getattr(verb, "TAKES_SETTINGS", False):
        raise UsageError(f"{args.verb} takes no settings such as {settings[0]}")
    args.settings = settings
    return verb.run(args)


if __name__ == "__main__":
    sys.exit(main())
