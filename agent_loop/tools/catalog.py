"""Every tool there is, by name. A new tool is a module beside this one and a line here (and in `toolsets.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agent_loop.tools import execute_code, patch, process, read_file, search_files, terminal, todo, web, write_file
from agent_loop.tools.tool import Tool

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

CATALOG: Mapping[str, Tool] = MappingProxyType({tool.name: tool for tool in _TOOLS})
