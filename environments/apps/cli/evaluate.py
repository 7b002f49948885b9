"""`hermes-rl evaluate CONFIG [--env.key value ...]`; with weights that `learn` made: `evaluate --adapter FILE`."""

from __future__ import annotations

import argparse
import struct
from typing import TYPE_CHECKING

from environments.apps.cli.process import LEARN_CONFIG, add_config, add_run_directory, launch
from environments.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = "hermes-rl evaluate terminal_tasks --env.eval_items 16"
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pathlib import Path

    add_config(parser, required=False)
    add_run_directory(parser)
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
    return launch(args, "evaluate")


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
