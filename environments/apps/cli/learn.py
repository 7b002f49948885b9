"""`hermes-rl learn`: a real model learns to use the terminal, on this machine, through the whole pipeline."""

from __future__ import annotations

import argparse

from environments.apps.cli.process import LEARN_CONFIG
from environments.errors import UsageError

EXAMPLE = "hermes-rl learn --minutes 20"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pathlib import Path

    parser.add_argument("--config", default=LEARN_CONFIG, help=f"YAML file or shipped config ({LEARN_CONFIG})")
    parser.add_argument(
        "--trainer",
        choices=("reference", "trl"),
        default="reference",
        help="reference: in JAX, through run-api; trl: TRL's AsyncGRPOTrainer (extra [trl])",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the trainer in total (trainer.steps)")
    parser.add_argument("--minutes", type=float, metavar="M", help="end near this time (learn.minutes)")
    parser.add_argument("--control", choices=("shuffled", "shifted"), help="a negative control, which must not learn")
    parser.add_argument("--out", type=Path, default=Path("runs/learn"), metavar="DIR", help="default runs/learn")
    parser.add_argument("--resume", action="store_true", help="continue after the last step of the run in DIR")
    parser.add_argument("--fresh", action="store_true", help="delete the run in DIR first")
    parser.add_argument("--json", action="store_true", help="one JSON object per event")


def run(args: argparse.Namespace) -> int:
    """Learn; exit code 1 when a process failed, 130 when interrupted."""
    if args.resume and args.fresh:
        raise UsageError("give either --resume or --fresh, not both")
    if args.trainer == "trl" and (args.resume or args.control):
        raise UsageError("--resume and --control are the reference trainer's: leave them out with --trainer trl")
    from environments.config.yaml_file import find_config

    find_config(args.config)  # a wrong name is answered before anything heavy is imported
    from environments.apps.learn.display import display_for
    from environments.apps.learn.learn_run import learn
    from environments.apps.learn.plan import load_plan
    from environments.launch import configure_logging

    configure_logging()
    plan = load_plan(args.config, settings(args), args.out, args.resume, args.fresh, args.trainer)
    return learn(plan, display_for(args.json))


def settings(args: argparse.Namespace) -> list[str]:
    """The short flags as the settings they stand for; given settings win."""
    short = {"trainer.steps": args.steps, "learn.minutes": args.minutes, "trainer.control": args.control}
    return [word for key, value in short.items() if value is not None for word in (f"--{key}", str(value))] + list(
        args.settings
    )
