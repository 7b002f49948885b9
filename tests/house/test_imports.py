"""Imports point one way (environments, agent_loop, tool_parsers and sandbox_pool); only environments knows Atropos."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "environments": {"environments", "agent_loop", "tool_parsers", "sandbox_pool"},
    "agent_loop": {"agent_loop", "tool_parsers", "sandbox_pool"},
    "tool_parsers": {"tool_parsers"},
    "sandbox_pool": {"sandbox_pool"},
}
FORBIDDEN = {
    "environments": set(),
    "agent_loop": {"atroposlib"},
    "tool_parsers": {"atroposlib", "openai"},
    "sandbox_pool": {"atroposlib", "openai"},
}


def modules():
    return [
        pytest.param(path, room, id=str(path.relative_to(ROOT)))
        for room in MAY_IMPORT
        for path in sorted((ROOT / room).rglob("*.py"))
    ]


def imported_roots(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], node.lineno


@pytest.mark.parametrize(("path", "room"), modules())
def test_imports_point_one_way(path, room):
    for name, line in imported_roots(path):
        assert name not in set(MAY_IMPORT) - MAY_IMPORT[room], f"{path}:{line}: {room} must not import {name}"
        assert name not in FORBIDDEN[room], f"{path}:{line}: {room} must not import {name}"


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize(("path", "room"), modules())
def test_the_library_does_not_import_its_apps(path, room):
    if (ROOT / "environments" / "apps") in path.parents:
        return
    for name, line in imported_modules(path):
        assert not f"{name}.".startswith("environments.apps."), f"{path}:{line}: {name} is an app"


@pytest.mark.parametrize("path", sorted((ROOT / "sandbox_pool" / "server").rglob("*.py")), ids=lambda p: p.name)
def test_the_slot_server_needs_the_standard_library_only(path):
    optional = {"orjson", "uvloop", "compression", "zstandard"}
    build_time = {"hatchling"}
    for name, line in imported_roots(path):
        known = name in sys.stdlib_module_names or name in {"sandbox_pool", "__future__"} | optional | build_time
        assert known, f"{path}:{line}: {name} is not in the standard library"
