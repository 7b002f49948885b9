"""`hermes-rl train-check`: a few rollouts into a trainer's own logprob code, before GPU hours are spent on them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from typing import TYPE_CHECKING

from environments.errors import UsageError, at_least

if TYPE_CHECKING:
    from environments.trainers.checks.exactness import Exactness

EXAMPLE = "hermes-rl train-check terminal_tasks_vllm --trainer trl --model Qwen/Qwen3-4B"
TAKES_SETTINGS = True
TRAINERS = {
    "trl": ("trl", "environments.trainers.checks.trl_check", "TrlView"),
    "verl": ("verl", "environments.trainers.checks.verl_check", "VerlView"),
    "tinker": ("tinker", "environments.trainers.checks.tinker_check", "TinkerView"),
}
"""Name -> the package it needs, and what asks it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file or shipped config, as for serve")
    parser.add_argument("--trainer", required=True, choices=sorted(TRAINERS), help="whose arithmetic judges")
    parser.add_argument("--model", required=True, help="Hugging Face name or folder: the weights that the server has")
    parser.add_argument("--groups", type=at_least(1), default=2, help="groups to roll out (default 2)")
    parser.add_argument(
        "--control",
        action="append",
        default=[],
        choices=("swapped", "shifted", "wrong"),
        help="judge spoiled samples as well, which must not pass: swapped tokens, shifted masks, a wrong logprob",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when the tokens are not exact, or when a control is not noticed."""
    package, module, view = TRAINERS[args.trainer]
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{package} cannot be imported: pip install 'hermes-rl[{args.trainer}]'")
    from environments.launch import configure_logging
    from environments.rollouts.blocking import BlockingRollouts
    from environments.rollouts.rollouts import Rollouts
    from environments.trainers.checks.exactness import SamplesItself, corrupted, judge

    configure_logging()
    with contextlib.redirect_stdout(sys.stderr):  # what trainers print is not the answer
        trainer = getattr(importlib.import_module(module), view)(args.model)
        own = {"model": trainer.backend, "tokenizer": trainer.tokenizer} if isinstance(trainer, SamplesItself) else {}
        with BlockingRollouts(Rollouts(args.config, args.settings, **own)) as rollouts:
            items = (item for item, _ in zip(rollouts.items(), range(int(args.groups)), strict=False))
            samples = [sample for item in items for sample in rollouts.group(item)]
        found = {"samples": judge(trainer, samples)}
        found |= {control: judge(trainer, corrupted(samples, control)) for control in args.control}
    print(_as_json(found) if args.json else "\n".join(f"{name}: {one.sentence()}" for name, one in found.items()))
    return 0 if [one.exact for one in found.values()] == [True] + [False] * len(args.control) else 1


def _as_json(found: dict[str, Exactness]) -> str:
    return json.dumps({name: {**vars(one), "exact": one.exact} for name, one in found.items()})
