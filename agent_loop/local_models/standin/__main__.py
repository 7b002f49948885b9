"""The stand-in as a process of its own, until interrupted.

python -m agent_loop.local_models.standin --policy good --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from agent_loop import own_process
from agent_loop.local_models.standin.policies import POLICIES, named_policy, slow
from agent_loop.local_models.standin.server import StandIn


async def serve(args: argparse.Namespace) -> None:
    """Serve until cancelled; the first line of output is the address."""
    policy = named_policy(args.policy) if args.say is None else lambda _: args.say
    if args.latency_s:
        policy = slow(policy, args.latency_s)
    async with StandIn(policy, host=args.host, port=args.port, seed=args.seed, keep_log=False) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> int:
    """Read the flags and serve."""
    parser = argparse.ArgumentParser(prog="python -m agent_loop.local_models.standin", description=__doc__)
    parser.add_argument("--policy", default="good", choices=sorted(POLICIES))
    parser.add_argument("--say", metavar="TEXT", help="this turn every time, instead of a policy")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.0, help="delay of every answer")
    try:
        own_process.run(serve(parser.parse_args()))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
