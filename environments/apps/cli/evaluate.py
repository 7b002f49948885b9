"""`hermes-rl evaluate CONFIG [--env.key value ...]`; with weights that `learn` made: `evaluate --adapter FILE`."""

from __future__ import annotations

import argparse
import struct
from typing import TYPE_CHECKING

from environments.apps.cli.process import LEARN_CONFIG, add_config, add_run_directory, launch
from environments.errors import UsageError, at_least

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = "hermes-rl evaluate terminal_tasks --env.eval_items 16"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pathlib import Path

    add_config(parser, required=False)
    add_run_directory(parser)
    parser.add_argument(
        "--models", metavar="A,B", help="evaluate each: names at the config's server, or of its servers"
    )
    parser.add_argument(
        "--seeds", type=at_least(1), metavar="N", help="sample everything N times, each from another seed"
    )
    parser.add_argument(
        "--vary", action="append", default=[], metavar="KEY=V,W", help="evaluate with each value of a setting"
    )
    parser.add_argument(
        "--adapter", type=Path, metavar="FILE", help=f"LoRA adapter (GGUF); CONFIG is then {LEARN_CONFIG}"
    )


def run(args: argparse.Namespace) -> int:
    """Run to the end, or until a signal; the same command goes on from there."""
    if args.adapter is not None:
        args.config = args.config or LEARN_CONFIG
        args.settings = [*args.settings, *adapter_settings(args.config, args.adapter)]
    elif args.config is None:
        raise UsageError("name a config: `hermes-rl evaluate CONFIG`, or give --adapter FILE")
    if args.models is None and args.seeds is None and not args.vary:
        return launch(args, "evaluate")
    return _evaluate_grid(args)


def _evaluate_grid(args: argparse.Namespace) -> int:
    """Several models, seeds or settings in one evaluation."""
    from pathlib import Path

    from environments.config.yaml_file import find_config

    find_config(args.config)
    from agent_loop import own_process
    from environments.base import HermesAgentBaseEnv
    from environments.config.settings import RunConfig
    from environments.launch import configure_logging, load_run
    from environments.runs.grid import Combination, combinations, evaluate_grid, servers_of

    configure_logging()
    cells = combinations(args.models, args.seeds, args.vary)

    def make_env(cell: Combination) -> HermesAgentBaseEnv:
        kind, config = load_run(args.config, [*args.settings, *cell.settings()], None, RunConfig)
        return kind(config.env, servers_of(config.servers(), cell.model))

    kind, config = load_run(args.config, args.settings, None, RunConfig)
    out = args.out or config.env.run_dir or Path("runs") / f"{kind.name or kind.__name__}-eval"
    return own_process.run(evaluate_grid(cells, make_env, out, args.fresh))


def adapter_settings(config: str, adapter: Path) -> list[str]:
    """The setting that serves the config's model with this adapter."""
    from agent_loop.local_models.cpu_model.gguf import read_metadata
    from environments.config.yaml_file import find_config, read_yaml

    if not adapter.is_file():
        raise UsageError(f"no adapter at {adapter}: `hermes-rl learn` writes one to runs/learn/adapter.gguf")
    try:
        read_metadata(adapter)
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise UsageError(f"{adapter} is not an adapter in GGUF: {error}") from error
    servers = read_yaml(find_config(config)).data.get("openai")
    if not isinstance(servers, dict) or servers.get("server_type") != "cpu-model":
        raise UsageError(f"--adapter needs a config whose openai.server_type is cpu-model; {config} has another")
    return ["--openai.options.lora", str(adapter.absolute())]
