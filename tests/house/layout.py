"""How easily a place is found: `python tests/house/layout.py` prints the figures that `test_layout.py` asserts.

The ways (which files one call or one group passes through) are measured on real runs: a local slot, the stand-in as the
model, a real run-api. Only files of the client's process count.
"""

from __future__ import annotations

import ast
import asyncio
import math
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
NEVER_S = 3600.0
"""Background work is not on the way; on a slow machine it would run meanwhile every time."""
FEWEST_RUNS, MOST_RUNS = 3, 8
PACKAGES = ("hermes_rl", "environments", "agent_loop", "tool_parsers", "sandbox_pool")
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))


def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name; a package's own name for its `__init__`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, *, at_import: bool = False) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of a module; with `at_import` only of those that run when it is imported."""
    tree = ast.parse(path.read_text())
    nodes = _runs_at_import(tree) if at_import else ast.walk(tree)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def _runs_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _runs_at_import(node)


def modules_per_folder() -> Counter[str]:
    """How many modules each folder holds, `__init__` and `__main__` aside."""
    places = (path for path in modules().values() if path.name not in ("__init__.py", "__main__.py"))
    return Counter(str(path.parent.relative_to(ROOT)) for path in places)


def names_used_twice() -> list[str]:
    """Module names that two modules of one package share."""
    counted = Counter((name.split(".")[0], path.name) for name, path in modules().items() if "__" not in path.name)
    return sorted(f"{package}: {name}" for (package, name), times in counted.items() if times > 1)


def single_importers() -> list[str]:
    """Modules that exactly one other module imports: each should be worth a file of its own."""
    every = modules()
    users: dict[str, set[str]] = {name: set() for name in every}
    for name, path in every.items():
        for module, what in imports(name, path):
            for target in {module, f"{module}.{what}"} & users.keys() - {name}:
                users[target].add(name)
    return sorted(name for name, by in users.items() if len(by) == 1 and every[name].name != "__init__.py")


def cycles() -> list[str]:
    """Modules that cannot be imported without importing themselves."""
    every = modules()
    edges: dict[str, set[str]] = {}
    for name, path in every.items():
        targets = {t for m, w in imports(name, path, at_import=True) for t in (f"{m}.{w}", m) if t in every}
        # A name taken from a package's own module needs that module, not the package around it.
        edges[name] = {t for t in targets if not name.startswith(f"{t}.")} - {name}
    return sorted(name for name in every if _reaches(name, name, edges))


def _reaches(start: str, goal: str, edges: dict[str, set[str]]) -> bool:
    seen: set[str] = set()
    ahead = list(edges[start])
    while ahead:
        if (name := ahead.pop()) == goal:
            return True
        if name not in seen:
            seen.add(name)
            ahead.extend(edges[name])
    return False


def private_imports() -> list[str]:
    """Names that begin with an underscore and are imported from another package."""
    found = []
    for name, path in modules().items():
        for module, what in imports(name, path):
            root = module.split(".")[0]
            hidden = any(part.startswith("_") and not part.startswith("__") for part in (*module.split("."), what))
            if hidden and root in PACKAGES and root != name.split(".")[0]:
                found.append(f"{name}: {module}.{what}")
    return found


def lines_of_source() -> int:
    """Lines of Python in the packages."""
    return sum(len(path.read_text().splitlines()) for path in modules().values())


class Way:
    """Files of ours that ran while it was entered. What plays the model (the stand-in) is not on the way."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> Way:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            place = path.relative_to(ROOT)
            if place.parts[0] in PACKAGES and "standin" not in place.parts:
                self.files.add(str(place))


async def every_time(way: Callable[[], Awaitable[set[str]]], few: float = math.inf) -> list[str]:
    """The files that are on a way in each of several runs: the others are background work that ran meanwhile. A busy
    machine has so much of it that more runs are needed to see that `few` are enough."""
    found = await way()
    for run in range(2, MOST_RUNS + 1):
        found &= await way()
        if run >= FEWEST_RUNS and len(found) <= few:
            break
    return sorted(found)


async def way_of_a_call() -> set[str]:
    """One call of the terminal, from the turn that asks for it to the message that answers, in a leased slot."""
    from agent_loop import HermesAgentLoop
    from agent_loop.tools import SandboxTools
    from sandbox_pool import PoolConfig, SlotPool
    from support.loop_servers import ScriptedServer, call, calls, says

    way = Way()
    with tempfile.TemporaryDirectory() as state:
        config = PoolConfig(slots_per_host=1, state_dir=Path(state), health_interval_s=NEVER_S)
        async with SlotPool(config) as pool, pool.lease("way") as sandbox, SandboxTools(sandbox, ["terminal"]) as tools:
            server = ScriptedServer(calls(call("terminal", {"command": "echo found"})), says("done"))
            loop = HermesAgentLoop(server, runtime=tools)
            with way:
                result = await loop.run([{"role": "user", "content": "look"}])
    assert "found" in result.messages[2]["content"]
    return way.files


async def way_of_a_group() -> set[str]:
    """One group from its start to the POST that delivers it to a real run-api."""
    from agent_loop.local_models.standin import StandIn
    from environments.atropos.api import RolloutApi
    from environments.launch import load_environment
    from environments.runs import status
    from support.atropos_api import Trainer, run_api
    from support.env_serve import ServedEnv, play

    way = Way()
    with tempfile.TemporaryDirectory() as folder, run_api() as api:
        trainer = Trainer(api.url, batch_size=4, max_token_len=8193)
        await asyncio.to_thread(trainer.register)
        async with StandIn(play) as standin:
            settings = ServedEnv(Path(folder), "finite", api.url, standin.url, items=1).path
            env = load_environment(settings, ["--env.pool.health_interval_s", str(NEVER_S)])
            run_group, send_group = env.collect_trajectories, RolloutApi.send_group

            async def from_here_on(item: Any) -> Any:
                way.__enter__()
                return await run_group(item)

            async def up_to_here(api: RolloutApi, body: bytes) -> str:
                answer = await send_group(api, body)
                way.__exit__()
                return answer

            env.collect_trajectories = from_here_on
            never = mock.patch.object(status, "EVERY_S", NEVER_S)
            with never, mock.patch.object(RolloutApi, "send_group", up_to_here):
                await env.env_manager()
        await asyncio.to_thread(trainer.pull_until, 1)
    return way.files


def main() -> None:
    """Print every figure."""
    folder, most = modules_per_folder().most_common(1)[0]
    call, group = (asyncio.run(every_time(way)) for way in (way_of_a_call, way_of_a_group))
    rows = {
        "lines of source": lines_of_source(),
        "modules": len(modules()),
        f"most modules in a folder ({folder})": most,
        "module names used twice": len(names_used_twice()),
        "modules with a single importer": len(single_importers()),
        "modules in a cycle": len(cycles()),
        "private names imported": len(private_imports()),
        "files on the way of a terminal call": len(call),
        "files on the way of a group": len(group),
    }
    for name, value in rows.items():
        print(f"{name:48}{value:>8,}")
    if "--list" in sys.argv:
        print("\n".join(("", *single_importers(), "", *call, "", *group)))


if __name__ == "__main__":
    main()
