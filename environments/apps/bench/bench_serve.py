"""`hermes-rl bench serve`: how long delivery of large groups keeps the event loop of an environment busy.

A real run-api and a trainer in processes of their own; in this one an environment whose groups cost nothing to make, so
that what is measured is checking, encoding, compressing and sending.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_loop import own_process
from environments.apps.cli.bench import Figure, Report

if TYPE_CHECKING:
    from environments.atropos.atropos_env import AtroposEnv

HELP = "event-loop stall of an environment that serves large groups to a real run-api"
TICK_S = 0.005
STALL_TARGET_MS = 50.0
PROMPT_SHARE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--sequences", type=int, default=16, help="sequences in a group (default 16)")
    parser.add_argument("--tokens", type=int, default=16_000, help="tokens in a sequence (default 16000)")
    parser.add_argument("--groups", type=int, default=16, help="groups to deliver (default 16)")


def measure(args: argparse.Namespace) -> Report:
    """Serve the groups and watch the loop."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    run_api = [str(Path(sys.executable).with_name("run-api")), "--host", "127.0.0.1", "--port", str(port)]
    api = subprocess.Popen(run_api, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        lags, seconds, delivered = own_process.run(_serve(args, url))
    finally:
        api.terminate()
        api.wait()
    lags.sort()
    settings = {"sequences": args.sequences, "tokens": args.tokens, "groups": args.groups}
    figures = (
        Figure("stall_p50_ms", 1000 * lags[len(lags) // 2], "ms"),
        Figure("stall_p99_ms", 1000 * lags[int(len(lags) * 0.99)], "ms", STALL_TARGET_MS),
        Figure("stall_max_ms", 1000 * lags[-1], "ms"),
        Figure("groups_per_s", delivered / seconds, "1/s"),
        Figure("undelivered", float(args.groups - delivered), "groups", 0.0),
    )
    return Report("serve", settings, figures)


async def _serve(args: argparse.Namespace, url: str) -> tuple[list[float], float, int]:
    from environments.atropos.api import until_up

    env = _environment(args, url)
    await until_up(url)
    trainer = [
        sys.executable,
        "-m",
        "environments.apps.bench.bench_trainer",
        url,
        str(args.sequences),
        str(args.groups),
    ]
    pulling = await asyncio.create_subprocess_exec(*trainer)
    lags: list[float] = []
    watching = asyncio.create_task(_watch(lags))
    began = time.monotonic()
    try:
        await env.env_manager()
        await pulling.wait()
    finally:
        watching.cancel()
        if pulling.returncode is None:
            pulling.kill()
            await pulling.wait()
    delivered = env.outbox.delivery.groups if env.outbox is not None else 0
    return lags, time.monotonic() - began, delivered


async def _watch(lags: list[float]) -> None:
    """How much later than asked the loop comes back, over and over."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - asked - TICK_S)


def _environment(args: argparse.Namespace, url: str) -> AtroposEnv:
    from environments.atropos.atropos_env import AtroposEnv, AtroposEnvConfig

    class Ready(AtroposEnv):
        """Groups that are made beforehand."""

        name = "bench"
        given = 0

        async def setup(self) -> None:
            self.group = _group(args.sequences, args.tokens)

        async def get_next_item(self) -> int | None:
            self.given += 1
            return self.given if self.given <= args.groups else None

        async def collect_trajectories(self, item: int) -> tuple[dict[str, Any], list[Any]]:
            return {**self.group, "generation_params": {"group_id": f"bench-{item}"}}, []

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            return None

    config = AtroposEnvConfig(
        rollout_server_url=url, group_size=args.sequences, total_steps=-1, max_batches_offpolicy=4
    )
    return Ready(config, [])


def _group(sequences: int, tokens: int) -> dict[str, Any]:
    dice = random.Random(0)
    prompt = tokens // PROMPT_SHARE
    rows = [[dice.randrange(150_000) for _ in range(tokens)] for _ in range(sequences)]
    return {
        "tokens": rows,
        "masks": [[-100] * prompt + row[prompt:] for row in rows],
        "inference_logprobs": [[1.0] * prompt + [-dice.random() for _ in row[prompt:]] for row in rows],
        "scores": [float(number) for number in range(sequences)],
    }
