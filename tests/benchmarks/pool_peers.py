"""The pool beside its peers: `echo hi` one at a time, many at once, and sixteen sleeps, with what is installed here.

    python tests/benchmarks/pool_peers.py [--slots 16] [--rounds 50] [--json]

Peers are optional (`pip install swe-rex mini-swe-agent inspect-ai`); one that is missing is a row that says so. None of
them isolates with its local backend: the figures show what isolation costs, or does not cost, here.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from environments.apps.bench.bench_pool import run_control
from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.pool.metrics import percentile

COMMAND = "echo hi"


class OurPool:
    """Leased slots, through the real client and server."""

    name = "hermes-rl slot"

    async def open(self, slots):
        self._stack = contextlib.AsyncExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        config = PoolConfig(slots_per_host=slots, max_hosts=1, state_dir=folder / "state")
        pool = await self._stack.enter_async_context(SlotPool.from_config(config))
        self.boxes = [await pool.acquire(f"t{n}") for n in range(slots)]
        self.isolation = self.boxes[0].isolation

    async def run(self, slot, command):
        assert (await self.boxes[slot].exec(command)).exit_code == 0

    async def close(self):
        await self._stack.aclose()


class Control:
    """Bare subprocesses, no sandbox at all."""

    name, isolation = "subprocess.run in threads", "none"

    async def open(self, slots):
        self._threads = ThreadPoolExecutor(slots)

    async def run(self, slot, command):
        import subprocess

        call = run_control if command == COMMAND else lambda: subprocess.run(["bash", "-c", command], check=True)
        await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def close(self):
        self._threads.shutdown()


class SweRex:
    """A session of SWE-ReX's local runtime per slot."""

    name, isolation = "SWE-ReX local session", "none"

    async def open(self, slots):
        from swerex.runtime.abstract import CreateBashSessionRequest
        from swerex.runtime.local import LocalRuntime

        self._runtimes = [LocalRuntime() for _ in range(slots)]
        for runtime in self._runtimes:
            await runtime.create_session(CreateBashSessionRequest())

    async def run(self, slot, command):
        from swerex.runtime.abstract import BashAction

        await self._runtimes[slot].run_in_session(BashAction(command=command))

    async def close(self):
        for runtime in self._runtimes:
            await runtime.close()


class MiniSweAgent:
    """mini-swe-agent's local environment, one thread per slot."""

    name, isolation = "mini-swe-agent local", "none"

    async def open(self, slots):
        from minisweagent.environments.local import LocalEnvironment

        self._environments = [LocalEnvironment() for _ in range(slots)]
        self._threads = ThreadPoolExecutor(slots)

    async def run(self, slot, command):
        execute = self._environments[slot].execute
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, execute, {"command": command})
        except TypeError:
            await asyncio.get_running_loop().run_in_executor(self._threads, execute, command)

    async def close(self):
        self._threads.shutdown()


class Inspect:
    """inspect-ai's local sandbox."""

    name, isolation = "inspect-ai local", "none"

    async def open(self, slots):
        from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

        self._sandboxes = [LocalSandboxEnvironment() for _ in range(slots)]

    async def run(self, slot, command):
        await self._sandboxes[slot].exec(["bash", "-c", command])

    async def close(self):
        for sandbox in self._sandboxes:
            sandbox.directory.cleanup()


async def measure(peer, slots, rounds):
    """One row, or why there is none."""
    try:
        await peer.open(slots)
    except ImportError as error:
        return {"peer": peer.name, "missing": str(error)}
    try:
        await peer.run(0, COMMAND)
        times = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            await peer.run(0, COMMAND)
            times.append((time.perf_counter() - began_s) * 1000)
        began_s = time.perf_counter()
        await asyncio.gather(*(_loop(peer, slot, rounds // 4) for slot in range(slots)))
        rate = slots * (rounds // 4) / (time.perf_counter() - began_s)
        began_s = time.perf_counter()
        await asyncio.gather(*(peer.run(slot, "sleep 0.2") for slot in range(slots)))
        sleeps_s = time.perf_counter() - began_s
    finally:
        await peer.close()
    return {
        "peer": peer.name,
        "isolation": peer.isolation,
        "exec_p50_ms": round(percentile(sorted(times), 0.5), 2),
        "exec_p99_ms": round(percentile(sorted(times), 0.99), 2),
        "exec_per_s": round(rate, 1),
        "sleeps_wall_s": round(sleeps_s, 2),
    }


async def _loop(peer, slot, rounds):
    for _ in range(rounds):
        await peer.run(slot, COMMAND)


async def main(args):
    rows = []
    for peer in (Control(), OurPool(), SweRex(), MiniSweAgent(), Inspect()):
        rows.append(await measure(peer, args.slots, args.rounds))
        if not args.json:
            print(rows[-1], flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    asyncio.run(main(parser.parse_args()))
