"""`hermes-rl rescore RUN`: run the rewards of a stored run again, without the agents."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from environments.consoles import PIPE_WIDTH, new_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_loop.records.record import RolloutRecord
    from environments.runs.rescoring import Rescored

EXAMPLE = "hermes-rl rescore runs/terminal_tasks-eval"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run of process or evaluate")
    parser.add_argument("--config", metavar="NEW", help="config of the new reward (default: that of the run)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the new scores go (default RUN/rescored)")


def run(args: argparse.Namespace) -> int:
    """Score again, store, and print old against new."""

    from agent_loop import own_process
    from environments.launch import configure_logging
    from environments.rollouts.evaluation import store_records
    from environments.runs.comparison import compare, read_run, render
    from environments.runs.rescoring import changed

    configure_logging()
    old = read_run(args.run)
    found = own_process.run(_rescore(args, old))
    out: Path = args.out or args.run / "rescored"
    store_records(out / "rollouts.jsonl", found.records)
    console = new_console(pipe_width=PIPE_WIDTH, emoji=False, markup=False)
    console.print(render(compare(old, found.records, "old", "new")))
    for before, after in changed(old, found.records):
        print(f"{after.item_id} {after.rollout_id}: {before.verifier_score} -> {after.verifier_score}")
    for why, count in found.skipped.items():
        print(f"{count} rollouts keep their old score: {why}")
    print(f"{found.scored} of {len(old)} rollouts scored again: {out}")
    return 0 if found.scored else 1


async def _rescore(args: argparse.Namespace, old: Sequence[RolloutRecord]) -> Rescored:
    import orjson

    from environments.launch import load_environment
    from environments.runs.progress import progress_for
    from environments.runs.rescoring import rescore, stored_run
    from environments.runs.validation import shared_pool

    stored = stored_run(args.run)
    if args.config is not None:
        env = load_environment(args.config, args.settings)
    else:
        with tempfile.NamedTemporaryFile(suffix=".yaml") as file:  # settings of the run, below those of this call
            file.write(orjson.dumps({"environment": stored["environment"], "env": stored["env"]}))
            file.flush()
            env = load_environment(file.name, args.settings)
    async with shared_pool(env) as env.pool:
        with progress_for() as progress:
            return await rescore(env, args.run, stored["verb"], old, progress)
