"""Writes the `hermes_tools` module of one execution: the fixed part, and a function for each tool it may call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from agent_loop.tools.tool import Tool


@lru_cache(maxsize=4)
def script_source(name: str) -> str:
    """Text of a file of the `script` folder."""
    return files("agent_loop.tools.script").joinpath(name).read_text("utf-8")


def signature(tool: Tool) -> str:
    """How a script calls the tool: `read_file(path, offset=1, limit=500)`."""
    return f"{tool.name}({', '.join(_parameter(tool, name) for name in tool.script_parameters)})"


def _parameter(tool: Tool, name: str) -> str:
    schema: dict[str, Any] = tool.parameters["properties"][name]
    if name in tool.parameters.get("required", ()) and "default" not in schema:
        return name
    return f"{name}={schema.get('default')!r}"


def describe(tools: Sequence[Tool]) -> str:
    """The lines of the tool's description that say what a script may call."""
    if not tools:
        return "  (none are enabled)"
    return "\n".join(f"  {signature(tool)} -> dict" for tool in tools)


def stub_module(tools: Sequence[Tool], socket_path: str, token: str) -> str:
    """Source of `hermes_tools.py`."""
    parts = [script_source("hermes_tools_base.py"), f"_agent.update(socket={socket_path!r}, token={token!r})\n"]
    parts.extend(_function(tool) for tool in tools)
    return "\n\n".join(parts)


def _function(tool: Tool) -> str:
    passed = ", ".join(f"{name}={name}" for name in tool.script_parameters)
    summary = tool.schema["description"].split("\n", 1)[0]
    return f"def {signature(tool)}:\n    {summary!r}\n    return _call({tool.name!r}, {passed})\n"
