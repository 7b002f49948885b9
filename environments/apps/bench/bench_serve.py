"""`hermes-rl bench serve`: how long delivery of large groups keeps the event loop of an environment busy.

A real run-api and a trainer run in processes of their own. The groups of the environment in this process cost nothing
to make, so that what is measured is checking, encoding, compressing and sending.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from agent_loop import own_process
from environments.apps.cli.bench import Figure, Report
from environments.apps.reference_trainer.trainer_api import request_json
from environments.errors import at_least

if TYPE_CHECKING:
    from environments.atropos.atropos_env import AtroposEnv

HELP = "event-loop stall of an environment that serves large groups to a real run-api"
TICK_S = 0.005
STALL_TARGET_MS = 50.0
PROMPT_SHARE = 4
PAUSE_S = 0.05
TIMEOUT_S = 300.0
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""As trainers should ask."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=at_least(1), default=16, help="sequences in a group (default 16)")
    parser.add_argument("--tokens", type=at_least(2), default=16_000, help="tokens in a sequence (default 16000)")
    parser.add_argument("--groups", type=at_least(1), default=16, help="groups to deliver (default 16)")


def measure(args: argparse.Namespace) -> Report:
    from agent_loop.local_models.cpu_model.llama_server import free_port
    from environments.apps.learn.child_process import run_api_command

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    api = subprocess.Popen(run_api_command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
    trainer = [sys.executable, "-P", "-m", "environments.apps.bench.bench_serve"]
    trainer += [url, str(args.sequences), str(args.groups)]
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
    """Measure again and again how much later than asked the event loop comes back."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - asked - TICK_S)


def _environment(args: argparse.Namespace, url: str) -> AtroposEnv:
    from environments.atropos.atropos_env import AtroposEnv, AtroposEnvConfig

    class Ready(AtroposEnv):
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


def pull_batches(url: str, batch_size: int, batches: int) -> None:
    """A trainer that registers, takes this many batches and throws them away."""
    names = {"wandb_group": "bench", "wandb_project": "bench", "checkpoint_dir": ""}
    numbers = {"max_token_len": -1, "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": batches}
    request_json("POST", f"{url}/register", {**names, **numbers, "batch_size": batch_size}, timeout_s=TIMEOUT_S)
    got = 0
    while got < batches:
        if request_json("GET", f"{url}/batch", headers=UNCOMPRESSED, timeout_s=TIMEOUT_S)["batch"]:
            got += 1
        else:
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    pull_batches(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
