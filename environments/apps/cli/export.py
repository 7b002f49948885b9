"""`hermes-rl export RUN --to FORMAT`: a run in the format of another tool or trainer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from environments.errors import ConfigError, UsageError, at_least

if TYPE_CHECKING:
    from agent_loop.model.tokens.message_shape import MessageShape
    from environments.runs.selection import Chosen, Rules

EXAMPLE = "hermes-rl export runs/terminal_tasks --to openai --max-turns 8 --best 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from agent_loop.outcome import Outcome
    from environments.runs.exports import FORMATS

    says = "; ".join(f"{name}: {form.says}" for name, form in FORMATS.items())
    whole, add = at_least(1, int), parser.add_argument
    add("run", metavar="RUN", type=Path, help="a rollouts.jsonl, or the folder of a run")
    add("--to", required=True, choices=tuple(FORMATS), metavar="FORMAT", help=says)
    add("--out", type=Path, metavar="DIR", help="where to write (default: RUN/FORMAT)")
    solved = ", ".join(name for name, form in FORMATS.items() if form.solved)
    add("--min-score", type=float, metavar="X", help=f"verifier score from X on (default for {solved}: 1)")
    add("--max-score", type=float, metavar="X", help="verifier score up to X")
    add(
        "--outcome",
        action="append",
        default=[],
        choices=tuple(Outcome),
        metavar="NAME",
        help="only rollouts that ended so, such as finished; may be repeated",
    )
    add("--min-turns", type=whole, metavar="N", help="at least N sampled turns")
    add("--max-turns", type=whole, metavar="N", help="at most N sampled turns")
    add("--max-tokens", type=whole, metavar="N", help="at most N tokens in the longest sequence")
    add(
        "--uses",
        action="append",
        default=[],
        metavar="TOOL",
        help="only rollouts that called this tool; may be repeated",
    )
    add(
        "--avoids",
        action="append",
        default=[],
        metavar="TOOL",
        help="only rollouts that never called this tool; may be repeated",
    )
    add("--valid-calls", action="store_true", help="only rollouts without a call that was malformed or refused")
    add("--best", type=whole, metavar="N", help="of each group the N best: by verifier score, reward, fewest turns")
    add("--pairs", type=whole, metavar="N", help="with `--to trl`: up to N preference pairs of each group")
    add("--gap", type=float, default=0.5, metavar="X", help="least difference of a pair's scores (default 0.5)")
    add("--similar", type=float, metavar="X", help="leave out what is similar to a rollout before it from X on, 0 to 1")
    add("--tokenizer", metavar="MODEL", help="shape calls, ids and thinking for this model's chat template")


def run(args: argparse.Namespace) -> int:
    """Choose, write the files, and print how many rollouts they hold and why the others are left out."""
    from environments.runs.exports import export_run
    from environments.runs.report.html_page import UnreadableRun, find_rollouts
    from environments.runs.selection import choose
    from environments.runs.training_data import pyarrow

    source = find_rollouts(args.run)
    if not source.is_file():
        raise UsageError(f"there is no rollouts.jsonl at {args.run}")
    rules, shape = _rules(args), _shape(args.tokenizer)
    if args.to == "parquet":
        pyarrow()  # what is missing is said before a long file is read
    folder: Path = args.out or source.parent / args.to
    try:
        chosen = choose(source, rules)
    except UnreadableRun as error:
        raise UsageError(str(error)) from error
    if not chosen.rollouts:
        raise UsageError(f"{source} holds no rollouts")
    if not (chosen.pairs if rules.pairs else chosen.places):
        raise UsageError(f"none of the {chosen.rollouts} rollouts is exported{_reasons(chosen, rules)}")
    files = export_run(source, chosen, args.to, folder, shape)
    what = f"{len(chosen.pairs)} pairs" if rules.pairs else f"{len(chosen.places)}"
    place = files[0] if len(files) == 1 else f"{len(files)} files in {folder}"
    print(f"{what} of {chosen.rollouts} rollouts in {place}{_reasons(chosen, rules)}")
    return 0


def _rules(args: argparse.Namespace) -> Rules:
    from environments.runs.exports import FORMATS
    from environments.runs.selection import Rules

    form = FORMATS[args.to]
    if args.pairs and args.to != "trl":
        raise UsageError("--pairs goes with --to trl: no other format has preferences")
    if args.pairs and args.best:
        raise UsageError("give either --pairs or --best: a pair needs a rollout that is not the best")
    if args.similar is not None and not 0 < args.similar <= 1:
        raise UsageError(f"--similar: {args.similar:g} is not between 0 and 1")
    if not args.gap > 0:
        raise UsageError(f"--gap: {args.gap:g} is too small: more than 0")
    wants_solved = form.solved and args.min_score is None and args.max_score is None and not args.pairs
    return Rules(
        takes=form.takes,
        min_score=1.0 if wants_solved else args.min_score,
        max_score=args.max_score,
        outcomes=frozenset(args.outcome),
        min_turns=args.min_turns,
        max_turns=args.max_turns,
        max_tokens=args.max_tokens,
        uses=frozenset(args.uses),
        avoids=frozenset(args.avoids),
        valid_calls=args.valid_calls,
        similar=args.similar,
        best=args.best,
        pairs=args.pairs,
        gap=args.gap,
    )


def _shape(model: str | None) -> MessageShape:
    from environments.runs.training_data import AS_OBJECTS

    if model is None:
        return AS_OBJECTS
    from agent_loop.model.tokens.probe import probe_template
    from agent_loop.model.tokens.template import TemplateRefused
    from environments.models import load_tokenizer

    try:
        traits = probe_template(load_tokenizer(model)).traits
    except TemplateRefused as error:
        raise UsageError(f"--tokenizer {model}: {error}") from error
    except ConfigError as error:
        raise UsageError(
            str(error).replace("(openai.tokenizer_name or env.tokenizer_name)", "(--tokenizer)")
        ) from error
    if not traits.tools:
        raise UsageError(f"--tokenizer {model}: its chat template {traits.no_tools_because}")
    return traits.shape


def _reasons(chosen: Chosen, rules: Rules) -> str:
    left_out = +chosen.left_out
    told = [f"{count} {reason}" for reason, count in left_out.most_common()]
    if rules.pairs and not chosen.pairs:
        told.append(f"no group has two rollouts that are {rules.gap:g} apart")
    return f" (left out: {', '.join(told)})" if told else ""
