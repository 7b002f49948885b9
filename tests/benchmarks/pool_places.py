"""Exec and lease on every place that can be had here, over local slots and beside what people use today, in one run.

    PYTHONPATH=tests python tests/benchmarks/pool_places.py [ROUNDS]

Rounds are interleaved, so that other work on the machine meets all of them alike; commands first, then leases. As root
it starts its own dockerd, podman and sshd, and runs the apptainer that tests/live/apptainer/prepare.sh unpacked as an
ordinary user. SWE-ReX is measured where it is installed. A place that cannot be had is a line that says why.
"""

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environments.apps.bench.bench_pool import run_control
from sandbox_pool import PoolConfig, SlotPool
from support import container_engines
from support.apptainer_place import ApptainerPlace
from support.containers import Unavailable
from support.ssh_machines import MISSING, SSHD, Keys, LoopbackMachine


async def timed(work):
    began_s = time.perf_counter()
    await work
    return (time.perf_counter() - began_s) * 1000


async def lease_once(pool):
    async with pool.lease("bench"):
        pass


def containers(name, start, stack, commands):
    """An engine with default options, with SYS_ADMIN, and reached through its exec."""
    engine = stack.enter_context(start())
    commands[f"{name} exec"] = lambda: engine.run("exec", engine.containers()[0], "true")
    capable, through = engine.options(cap_add=["SYS_ADMIN"]), engine.options(data_path="exec")
    choices = {name: engine.options(), f"{name} SYS_ADMIN": capable, f"{name} through exec": through}
    return {place: {"provider": name, "provider_options": options} for place, options in choices.items()}


def apptainer(stack, folder, commands):
    place = ApptainerPlace(folder / "a")
    commands["apptainer exec"] = lambda: place.run("exec", f"instance://{next(iter(place.instances()))}", "true")
    return {"apptainer": {"provider": "apptainer", "provider_options": place.options(), "scratch_dir": place.scratch}}


def ssh(stack, folder, commands):
    if SSHD is None:
        raise Unavailable(MISSING)
    keys = Keys(folder / "k")
    machine = LoopbackMachine(keys, "loopback")
    stack.callback(machine.close)
    command = ["ssh", "-F", str(keys.config), "loopback", "true"]
    commands["ssh loopback true"] = lambda: subprocess.run(command, check=True)
    scratch = folder / "s"
    scratch.mkdir(mode=0o711)
    options = {"machines": ["loopback"], "config": str(keys.config)}
    return {"ssh over loopback": {"provider": "ssh", "provider_options": options, "scratch_dir": scratch}}


async def swe_rex(stack):
    """A call that runs a command in a session of its local runtime."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.runtime.local import LocalRuntime

    runtime = LocalRuntime()
    stack.push_async_callback(runtime.close)
    await runtime.create_session(CreateBashSessionRequest(startup_timeout=60))
    return lambda: runtime.run_in_session(BashAction(command="true"))


def found_places(stack, folder, commands):
    folder.chmod(0o755)
    places = {"local": {}}
    for name, find in {
        "docker": lambda: containers("docker", container_engines.docker, stack, commands),
        "podman": lambda: containers("podman", container_engines.podman, stack, commands),
        "apptainer": lambda: apptainer(stack, folder, commands),
        "ssh": lambda: ssh(stack, folder, commands),
    }.items():
        try:
            places |= find()
        except Unavailable as error:
            print(f"{name}: {error}")
    return places


async def main(rounds):
    async with contextlib.AsyncExitStack() as stack:
        # Short, and open to other users: sockets and slots are in it.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)))
        commands = {"bash -c, no sandbox": run_control}
        places = await asyncio.to_thread(found_places, stack, folder, commands)
        pools, boxes = {}, {}
        for name, fields in places.items():
            config = PoolConfig(state_dir=folder / "state", slots_per_host=2, max_hosts=1, **fields)
            pools[name] = await stack.enter_async_context(SlotPool.from_config(config))
            boxes[name] = await stack.enter_async_context(pools[name].lease("bench"))
        others = {name: lambda call=call: asyncio.to_thread(call) for name, call in commands.items()}
        try:
            others["SWE-ReX session"] = await swe_rex(stack)
        except ImportError as error:
            print(f"SWE-ReX: {error}")
        execs, leases = {name: [] for name in (*places, *others)}, {name: [] for name in places}
        for number in range(rounds):
            for name in places:
                execs[name].append(await timed(boxes[name].exec("true")))
            if number % 20 == 0:  # they are slow
                for name, call in others.items():
                    execs[name].append(await timed(call()))
        # After all commands: a lease leaves work for later, the next slot and the removal of the last one.
        for _ in range(rounds):
            for name in places:
                leases[name].append(await timed(lease_once(pools[name])))
        control = statistics.median(execs["local"])
        print(f"{'place':22} {'isolation':11} {'exec p50':>9} {'x local':>8} {'lease p50':>10}   (ms)")
        for name, taken in execs.items():
            exec_ms = statistics.median(taken)
            level = boxes[name].host_info.isolation if name in boxes else ""
            lease = f"{statistics.median(leases[name]):10.2f}" if name in leases else ""
            print(f"{name:22} {level:11} {exec_ms:9.2f} {exec_ms / control:8.2f} {lease}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
