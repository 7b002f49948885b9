"""Raw model text -> content, reasoning and tool calls, with per-call errors and repair provenance."""

from __future__ import annotations

from tool_parsers.registry import Parser, UnknownParser, get_parser, list_parsers, parse
from tool_parsers.result import Malformed, Parsed, ToolCall
from tool_parsers.schema import Tools

__all__ = ["Malformed", "Parsed", "Parser", "ToolCall", "Tools", "UnknownParser", "get_parser", "list_parsers", "parse"]
