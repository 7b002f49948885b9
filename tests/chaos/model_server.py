"""The stand-in as a process of its own: `python model_server.py PORT`. It plays `policy` below."""

import asyncio
import random
import re
import sys

from agent_loop import own_process
from agent_loop.local_models.standin import PolicyRequest, StandIn
from agent_loop.local_models.standin.policies import Reply, call

HOG = "python3 -c 'x = bytearray(1 << 30); x[::4096] = b\"1\" * len(x[::4096])'"
"""More memory than a slot of the chaos run has."""
EXTRAS = ("seq 2000", HOG, "(sleep 30 &) ; true", "head -c 3000000 /dev/zero > filler", "kill -9 $$", "exit 3")


def policy(request: PolicyRequest) -> Reply:
    """Right three times in four; on the way something that a model does: much output, much memory, a daemon."""
    found = re.search(r"Write (\d+) into answer.txt", request.text)
    if request.results >= 2 or found is None:
        return Reply(f"Done, request {request.number}.", delay_s=0.05)
    if request.results == 1:
        return Reply(call("terminal", {"command": random.choice(EXTRAS), "timeout": 5}), delay_s=0.05)
    answer = found[1] if request.number % 4 else "wrong"
    return Reply(call("terminal", {"command": f"echo {answer} > answer.txt # {request.number}"}), delay_s=0.05)


async def main() -> None:
    async with StandIn(policy, port=int(sys.argv[1]), keep_log=False):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    own_process.run(main())
