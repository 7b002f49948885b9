"""Every tool by name, the groups of them, and named distributions over the groups for training on varied tool sets.

A new tool is a module in one of the folders here and a line in `_TOOLS`.

A draw is a pure function of the distribution's name and the seed: every rollout of a group, on any machine, gets the
same tools.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from agent_loop.tools import todo
from agent_loop.tools.files import patch, read_file, search_files, write_file
from agent_loop.tools.script import execute_code
from agent_loop.tools.shell import process, terminal
from agent_loop.tools.tool import Tool, ToolsetError
from agent_loop.tools.web import web_tools as web
from sandbox_pool.errors import did_you_mean

_TOOLS = (
    terminal.TOOL,
    process.TOOL,
    read_file.TOOL,
    write_file.TOOL,
    patch.TOOL,
    search_files.TOOL,
    execute_code.TOOL,
    todo.TOOL,
    web.SEARCH_TOOL,
    web.EXTRACT_TOOL,
)
"""In the order the model sees them."""

CATALOG: Mapping[str, Tool] = MappingProxyType({tool.name: tool for tool in _TOOLS})

TOOLSETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(tool.name for tool in _TOOLS if tool.toolset == name)
        for name in dict.fromkeys(tool.toolset for tool in _TOOLS)
    }
)
"""Tools of each set."""

DISTRIBUTIONS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "default": {"terminal": 1.0, "file": 1.0, "code_execution": 1.0, "todo": 1.0, "web": 1.0},
        "balanced": {"terminal": 0.5, "file": 0.5, "code_execution": 0.5, "todo": 0.5, "web": 0.5},
        "development": {"terminal": 0.8, "file": 0.8, "code_execution": 0.6, "todo": 0.6, "web": 0.3},
        "minimal": {"terminal": 1.0},
        "mixed_tasks": {"terminal": 0.92, "file": 0.92, "code_execution": 0.5, "todo": 0.5, "web": 0.35},
        "reasoning": {"todo": 0.9, "code_execution": 0.5, "terminal": 0.2, "file": 0.2},
        "research": {"web": 0.9, "terminal": 0.3, "file": 0.3, "todo": 0.3},
        "safe": {"web": 0.8, "todo": 0.6, "file": 0.4},
        "terminal_only": {"terminal": 1.0, "file": 1.0},
        "terminal_tasks": {"terminal": 0.97, "file": 0.97, "code_execution": 0.5, "todo": 0.3, "web": 0.15},
        "terminal_web": {"terminal": 1.0, "file": 1.0, "web": 1.0},
    }
)
"""Probability of each toolset, drawn independently."""


def resolve(names: Iterable[str], without: Iterable[str] = ()) -> tuple[str, ...]:
    """Tool names for a selection of toolsets and single tools, each once. Raises ToolsetError for unknown ones.

    `without` takes single tools away again, such as `process` from the toolset `terminal`.
    """
    chosen: dict[str, None] = {}
    left_out = set(without)
    if unknown := sorted(left_out - set(CATALOG)):
        raise ToolsetError(f"unknown tool {unknown[0]!r}; tools: {', '.join(sorted(CATALOG))}")
    for name in names:
        if name not in TOOLSETS and name not in CATALOG:
            raise ToolsetError(f"unknown toolset or tool {name!r}; {did_you_mean(name, {*TOOLSETS, *CATALOG})}")
        chosen.update(dict.fromkeys(tool for tool in TOOLSETS.get(name, (name,)) if tool not in left_out))
    if not chosen:
        raise ToolsetError(f"no tools are enabled; choose from the toolsets: {', '.join(TOOLSETS)}")
    return tuple(tool for tool in CATALOG if tool in chosen)


def check_distribution(name: str, distribution: Mapping[str, float]) -> None:
    """Raises ToolsetError for an unknown toolset, a probability outside 0..1, or nothing that could be drawn."""
    for toolset, probability in distribution.items():
        if toolset not in TOOLSETS:
            raise ToolsetError(f"distribution {name!r}: unknown toolset {toolset!r}; valid: {', '.join(TOOLSETS)}")
        if not 0.0 <= probability <= 1.0:
            raise ToolsetError(f"distribution {name!r}: the probability of {toolset} is {probability}, not in 0..1")
    if not any(distribution.values()):
        raise ToolsetError(f"distribution {name!r} gives every toolset probability 0")


def draw(
    name: str,
    seed: str | int,
    *,
    available: Collection[str] = tuple(TOOLSETS),
    distributions: Mapping[str, Mapping[str, float]] = DISTRIBUTIONS,
) -> tuple[str, ...]:
    """Toolsets for one group, out of the available ones. When the dice choose none, the most likely one is taken."""
    if name not in distributions:
        raise ToolsetError(f"unknown distribution {name!r}; valid: {', '.join(sorted(distributions))}")
    check_distribution(name, distributions[name])
    odds = {toolset: chance for toolset, chance in distributions[name].items() if toolset in available and chance}
    if not odds:
        raise ToolsetError(f"distribution {name!r} has none of the available toolsets: {', '.join(available)}")
    dice = random.Random(f"{name}:{seed}")
    rolls = {toolset: dice.random() for toolset in TOOLSETS}
    drawn = tuple(toolset for toolset in TOOLSETS if rolls[toolset] < odds.get(toolset, 0.0))
    return drawn or (max(odds, key=lambda toolset: odds[toolset]),)
