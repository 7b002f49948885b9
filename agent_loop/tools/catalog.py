"""Every tool there is, by name. A new tool is a module beside this one and a line here (and in `toolsets.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agent_loop.tools import todo
from agent_loop.tools.files import patch, read_file, search_files, write_file
from agent_loop.tools.script import execute_code
from agent_loop.tools.shell import process, terminal
from agent_loop.tools.tool import Tool
from agent_loop.tools.web import web_tools as web

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
