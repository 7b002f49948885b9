"""`hermes-rl offer CONFIG --to NAME`: an environment as a server, for trainers that call environments."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import signal
import socket
import sys

from environments.errors import UsageError, at_least

EXAMPLE = "hermes-rl offer terminal_tasks --to openenv --port 8600"
TAKES_SETTINGS = True
SERVERS = {
    "openenv": ("openenv", "environments.trainers.servers.openenv", "openenv_app", False),
    "nemo-gym": ("fastapi", "environments.trainers.servers.nemo_gym", "nemo_gym_app", True),
}
"""Name -> the package it needs, what makes its application, and whether the config's model samples."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file or shipped config, as for serve")
    parser.add_argument("--to", required=True, choices=sorted(SERVERS), help="whose protocol is spoken")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=at_least(0), default=0, help="the port (default: any free one)")
    parser.add_argument(
        "--items", type=at_least(1), default=64, help="for openenv: items of the split `train` (default 64)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; slots of clients that are still there are given back."""
    package, module, make, samples = SERVERS[args.to]
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{package} cannot be imported: pip install 'hermes-rl[{args.to}]'")
    import uvicorn

    from environments.launch import configure_logging
    from environments.rollouts.blocking import BlockingRollouts
    from environments.rollouts.rollouts import Rollouts
    from environments.rollouts.tool_session import NoModel

    configure_logging()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn gives the signal back when it has ended
    own = Rollouts(args.config, args.settings, model=None if samples else NoModel())
    with _listening(args.host, int(args.port)) as sock, BlockingRollouts(own) as rollouts:
        app = getattr(importlib.import_module(module), make)(rollouts, int(args.items))
        host, port = sock.getsockname()[:2]
        print(f"{own.env.name} for {args.to} at http://{host}:{port}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])
    return 0


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), reuse_port=False)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
