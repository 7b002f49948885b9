"""`hermes-rl demo`: a real model and scripted policies on the same tasks, in isolated slots on this machine."""

from __future__ import annotations

import argparse

from environments.consoles import new_console
from environments.errors import at_least

EXAMPLE = "hermes-rl demo --tasks 11"
TAKES_SETTINGS = True
CONFIG = "learn/smollm2"
OWN_SETTINGS = ("--env.group_size", "4", "--env.rollout_tries", "1", "--env.limits.rollout_timeout_s", "60")

PIPE_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pathlib import Path

    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default runs/demo")
    parser.add_argument(
        "--tasks",
        type=at_least(1),
        default=11,
        metavar="N",
        help="tasks for each policy (default 11: one of each kind)",
    )
    parser.add_argument(
        "--seconds", type=at_least(0, float), default=60.0, metavar="S", help="time for the real model (default 60)"
    )
    parser.add_argument("--no-model", action="store_true", help="scripted policies only")


def run(args: argparse.Namespace) -> int:
    """Run the demo; exit code 1 when something stored is not exact."""
    console = new_console(pipe_width=PIPE_WIDTH)
    console.print("starting: slots, policies, model (a few seconds)", markup=False)
    from agent_loop import own_process
    from environments.apps.demo.demo_run import DemoPlan, run_demo
    from environments.launch import load_environment

    env = load_environment(CONFIG, [*OWN_SETTINGS, *args.settings])
    plan = DemoPlan(env.config, env.server_configs[0], args.out, args.tasks, not args.no_model, args.seconds)
    return own_process.run(run_demo(plan, console))
