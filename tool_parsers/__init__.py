"""Raw model text -> content, reasoning and tool calls, with per-call errors and repair provenance."""

from __future__ import annotations

from tool_parsers.engine import Parser
from tool_parsers.registry import UnknownParser, get_parser, list_parsers, parse
from tool_parsers.schema import Tools
from tool_parsers.spec import Malformed, Parsed, ToolCall

__all__ = ["Malformed", "Parsed", "Parser", "ToolCall", "Tools", "UnknownParser", "get_parser", "list_parsers", "parse"]
