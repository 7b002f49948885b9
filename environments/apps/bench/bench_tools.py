"""`hermes-rl bench tools`: what the tools cost on a real sandbox, compared with one plain command in the same run.

Calls of the different tools are interleaved, so that a busy moment of the machine affects all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agent_loop import own_process
from environments.apps.cli.bench import Figure, Report, timed
from environments.errors import at_least

if TYPE_CHECKING:
    from agent_loop.tools import SandboxTools
    from sandbox_pool import Sandbox, SlotPool

LEVELS = ("namespaces", "landlock", "uid", "plain")
HELP = "latency of the tools compared with one plain command, and of calls from inside a script"

NESTED_CALLS = 50
_SCRIPT = f"""
import json, time
from hermes_tools import read_file
times = []
for _ in range({NESTED_CALLS}):
    began = time.perf_counter()
    read_file("bench.txt")
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=at_least(1), default=200, help="calls of each tool (200)")
    parser.add_argument(
        "--scripts", type=at_least(1), default=10, help=f"scripts with {NESTED_CALLS} nested calls each (10)"
    )
    parser.add_argument(
        "--level", choices=LEVELS, help="isolation level of the slot (default: the strongest that works here)"
    )


def measure(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as state_dir:
        return own_process.run(_measure(args, state_dir))


async def _measure(args: argparse.Namespace, state_dir: str) -> Report:
    from agent_loop.tools import SandboxTools
    from sandbox_pool import PoolConfig, SandboxSpec, SlotPool

    options = {"level": args.level} if args.level else {}
    config = PoolConfig.model_validate(
        {"provider": "local", "slots_per_host": 2, "provider_options": options, "state_dir": state_dir}
    )
    async with (
        SlotPool.from_config(config) as pool,
        pool.lease("bench-tools", SandboxSpec()) as sandbox,
        SandboxTools(sandbox, ("terminal", "file", "code_execution")) as tools,
    ):
        await sandbox.write_file("bench.txt", b"".join(b"line %d of the file\n" % n for n in range(200)))
        direct = await _direct(sandbox, tools, args.calls)
        scripts_s, nested_s, direct_s = await _scripts(tools, args.scripts)
        isolation = sandbox.isolation
        figures = _figures(direct, scripts_s, nested_s, direct_s)
    async with SlotPool.from_config(config) as pool:
        figures += await _verification(pool, max(5, args.calls // 5))
    settings = {"calls": args.calls, "scripts": args.scripts, "isolation": isolation}
    return Report("tools", settings, tuple(figures))


async def _verification(pool: SlotPool, times: int) -> list[Figure]:
    """Freeze, fork, one check and clean-up of a small workspace, compared with one plain command of the same slots."""
    from environments.scoring.contexts import FrozenWorkspace, ToolContext

    whole: list[float] = []
    plain: list[float] = []

    async def verify(sandbox: Sandbox) -> None:
        frozen = await FrozenWorkspace.take(sandbox, pool)
        context = ToolContext(pool.lease_from(frozen.start, "bench-verify"), frozen, "bench-verify")
        await context.exec("cat answer.txt")
        await context.close()
        await frozen.close()

    for _ in range(times):
        async with pool.lease("bench-rollout") as sandbox:
            await sandbox.write_file("answer.txt", b"42\n")
            for _ in range(4):
                await asyncio.sleep(0.005)
                plain.append(await timed(lambda: sandbox.exec("echo hi", timeout_s=30)))
            whole.append(await timed(verify, sandbox))
    p50 = statistics.median(whole)
    return [
        Figure("verification_p50", p50 * 1000, "ms"),
        Figure("verification_over_exec", p50 / statistics.median(plain), "x", 15.0),
    ]


async def _direct(sandbox: Sandbox, tools: SandboxTools, calls: int) -> dict[str, list[float]]:
    """Seconds of each call, by tool; `exec` is the control."""
    await sandbox.write_file("patched.txt", b"value = 0\n" + b"some line\n" * 200)
    times: dict[str, list[float]] = {}
    for number in range(calls + 5):
        arguments: dict[str, dict[str, Any]] = {
            "read_file": {"path": "bench.txt"},
            "terminal": {"command": "echo hi"},
            "write_file": {"path": "written.txt", "content": f"number {number}\n" * 200},
            "patch": {"path": "patched.txt", "old_string": f"value = {number}", "new_string": f"value = {number + 1}"},
            "search_files": {"pattern": "line 7 ", "path": "bench.txt"},
        }
        await asyncio.sleep(0.005)  # the slot makes the next shell ready while nothing runs, as between two turns
        times.setdefault("exec", []).append(await timed(lambda: sandbox.exec("echo hi", timeout_s=30)))
        for name, given in arguments.items():
            await asyncio.sleep(0.005)
            times.setdefault(name, []).append(await timed(_call, tools, name, given))
    return {name: values[5:] for name, values in times.items()}  # the first ones warm up


async def _call(tools: SandboxTools, name: str, arguments: dict[str, Any]) -> None:
    outcome = await tools.call(name, arguments, call_id="bench")
    if outcome.error:
        raise RuntimeError(f"{name} failed: {outcome.error}")


async def _scripts(tools: SandboxTools, scripts: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of whole scripts, of nested calls as the script sees them, and of direct calls between the scripts."""
    whole: list[float] = []
    nested: list[float] = []
    direct: list[float] = []
    for _ in range(scripts):
        began = time.perf_counter()
        outcome = await tools.call("execute_code", {"code": _SCRIPT}, call_id="bench")
        whole.append(time.perf_counter() - began)
        if outcome.error:
            raise RuntimeError(f"execute_code failed: {outcome.error}")
        nested += json.loads(json.loads(outcome.text)["output"])
        direct += [await timed(_call, tools, "read_file", {"path": "bench.txt"}) for _ in range(NESTED_CALLS)]
    return whole, nested, direct


def _figures(
    direct: dict[str, list[float]], scripts_s: Sequence[float], nested_s: Sequence[float], direct_s: Sequence[float]
) -> list[Figure]:
    p50 = {name: statistics.median(times) for name, times in direct.items()}
    nested = statistics.median(nested_s)
    figures = [Figure(f"{name}_p50", seconds * 1000, "ms") for name, seconds in p50.items()]
    figures += [
        Figure(f"{name}_over_exec", p50[name] / p50["exec"], "x", 1.5) for name in ("read_file", "write_file", "patch")
    ]
    figures += [Figure(f"{name}_over_exec", p50[name] / p50["exec"], "x") for name in ("terminal", "search_files")]
    figures += [
        Figure("nested_read_file_p50", nested * 1000, "ms"),
        Figure("nested_over_direct", nested / statistics.median(direct_s), "x", 2.0),
        Figure(f"script_with_{NESTED_CALLS}_calls_p50", statistics.median(scripts_s), "s", 0.5),
        Figure(f"script_with_{NESTED_CALLS}_calls_max", max(scripts_s), "s"),
    ]
    return figures
