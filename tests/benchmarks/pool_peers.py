"""The pool beside its peers: `echo hi` one at a time, many at once, and sixteen sleeps, with what is installed here.

    python tests/benchmarks/pool_peers.py [--slots 16] [--seconds 3] [--json]

Peers are optional (`pip install swe-rex mini-swe-agent inspect-ai`, bubblewrap, docker, podman); one that is missing is
a row that says so. The local backends of the first three do not isolate: the figures show what isolation costs here.
Engines are started for the run, with a storage of their own (tests/support/container_engines.py).
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from environments.apps.bench.bench_pool import run_control
from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.pool.metrics import percentile
from support import container_engines
from support.containers import Unavailable

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


class InThreads:
    """A program that runs each command, started from one thread per slot."""

    async def open(self, slots):
        self._threads = ThreadPoolExecutor(slots)

    async def run(self, slot, command):
        await asyncio.get_running_loop().run_in_executor(self._threads, self.call, slot, command)

    async def close(self):
        self._threads.shutdown()


class Bubblewrap(InThreads):
    """A sandbox per command: nothing of it is kept for the next one."""

    name, isolation = "bwrap per command", "namespaces"
    VIEW = ("--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")

    async def open(self, slots):
        if shutil.which("bwrap") is None:
            raise Unavailable("no bwrap here")
        await super().open(slots)

    def call(self, slot, command):
        subprocess.run(["bwrap", *self.VIEW, "bash", "-c", command], check=True, capture_output=True)


class EngineExec(InThreads):
    """`docker exec` or `podman exec` into a container per slot."""

    isolation = "container"

    def __init__(self, name, start):
        self.name = f"{name} exec"
        self._start = start

    async def open(self, slots):
        self._stack = contextlib.ExitStack()
        self._engine = self._stack.enter_context(self._start())
        run = ["run", "--detach", "--network=none", "--volume=/usr:/usr:ro", container_engines.IMAGE, "sleep", "600"]
        self._containers = [self._engine.run(*run) for _ in range(slots)]
        await super().open(slots)

    def call(self, slot, command):
        self._engine.run("exec", self._containers[slot], "bash", "-c", command)

    async def close(self):
        await super().close()
        self._engine.run(
            "rm", "--force", "--time=0" if self._engine.kind == "podman" else "--volumes", *self._containers
        )
        self._stack.close()


async def measure(peer, slots, seconds):
    """One row, or why there is none."""
    try:
        await peer.open(slots)
    except (ImportError, Unavailable) as error:
        return {"peer": peer.name, "missing": str(error)}
    try:
        for slot in range(slots):
            await peer.run(slot, COMMAND)
        times = []
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() < ends_s:
            began_s = time.perf_counter()
            await peer.run(0, COMMAND)
            times.append((time.perf_counter() - began_s) * 1000)
        began_s = time.perf_counter()
        done = await asyncio.gather(*(_loop(peer, slot, began_s + seconds) for slot in range(slots)))
        rate = sum(done) / (time.perf_counter() - began_s)
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


async def _loop(peer, slot, ends_s):
    count = 0
    while time.perf_counter() < ends_s:
        await peer.run(slot, COMMAND)
        count += 1
    return count


def table(rows):
    """For the docs."""
    bare = rows[0]
    lines = [
        "| | isolated by | p50 ms | over bare | p99 ms | a second | over bare | sixteen sleeps of 0.2 s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "missing" in row:
            lines.append(f"| {row['peer']} | not run: {row['missing']} |")
            continue
        p50, rate = row["exec_p50_ms"] / bare["exec_p50_ms"], row["exec_per_s"] / bare["exec_per_s"]
        figures = row["exec_p50_ms"], f"{p50:.2f}", row["exec_p99_ms"], row["exec_per_s"], f"{rate:.2f}"
        lines.append(
            f"| {row['peer']} | {row['isolation']} | {' | '.join(map(str, figures))} | {row['sleeps_wall_s']} s |"
        )
    return "\n".join(lines)


async def main(args):
    engines = [EngineExec("docker", container_engines.docker), EngineExec("podman", container_engines.podman)]
    rows = []
    for peer in (Control(), OurPool(), MiniSweAgent(), Inspect(), SweRex(), Bubblewrap(), *engines):
        rows.append(await measure(peer, args.slots, args.seconds))
        print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=2) if args.json else table(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    asyncio.run(main(parser.parse_args()))
