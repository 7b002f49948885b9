"""`hermes-rl parse`: model text in, content, reasoning and tool calls out, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import UsageError

if TYPE_CHECKING:
    from tool_parsers import Parsed, Parser

EXAMPLE = """echo '<tool_call>{"name": "ls", "arguments": {}}</tool_call>' | hermes-rl parse --parser hermes"""
_STARTS = ("content", "reasoning", "header")
_RECORD_KEYS = ("id", "parser", "input_text", "tools", "start_state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from tool_parsers import list_parsers

    parser.add_argument("--parser", metavar="NAME", help=f"the format: {', '.join(list_parsers())}")
    parser.add_argument("--template", metavar="FILE", type=Path, help="pick the parser for this chat template")
    parser.add_argument("--tools", metavar="FILE", type=Path, help="JSON list of tools (OpenAI shape)")
    parser.add_argument("--start", choices=_STARTS, default="content", help="where the prompt left off")
    parser.add_argument("--strict", action="store_true", help="turn every repair into an error")
    parser.add_argument("--jsonl", action="store_true", help=f"read one record per line: {', '.join(_RECORD_KEYS)}")


def run(args: argparse.Namespace) -> int:
    """Read standard input, print one JSON object (or one line per record)."""
    if args.jsonl:
        if args.tools or args.template:
            raise UsageError("--jsonl takes tools and parsers from the records: leave out --tools and --template")
        return _run_records(_lines(), args.parser, args.strict)
    parser = _parser(args.parser, args.template, args.strict)
    tools = _read_tools(args.tools)
    parsed = parser.parse(_read_text(), tools, args.start)
    print(json.dumps({"parser": parser.name, **_whole(parsed)}, ensure_ascii=False, indent=2))
    return 0


def _parser(name: str | None, template: Path | None, strict: bool) -> Parser:
    from tool_parsers import UnknownParser, get_parser

    if (name is None) == (template is None):
        raise UsageError("give either --parser NAME or --template FILE (`--parser auto` recognises the format)")
    try:
        if template is not None:
            return get_parser(template=_read_file(template), strict=strict)
        return get_parser(name, strict=strict)
    except UnknownParser as error:
        raise UsageError(str(error)) from None


def _run_records(lines: Iterable[str], default: str | None, strict: bool) -> int:
    """One line out per line in; a bad record costs its own line and, at the end, the exit code."""
    bad: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record: Any = None
        try:
            record = _record(line)
            answer = _answer(record, default, strict)
        except UsageError as error:
            bad.append(f"line {number}: {error}")
            known = record.get("id") if isinstance(record, dict) else None
            answer = {"id": known, "content": "", "reasoning": "", "calls": [], "errors": [{"message": bad[-1]}]}
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    if bad:
        raise UsageError(f"{len(bad)} bad record{'s' if len(bad) > 1 else ''}; {bad[0]}")
    return 0


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("input_text"), str):
        raise UsageError("not a record with an `input_text`")
    return record


def _answer(record: Mapping[str, Any], default: str | None, strict: bool) -> dict[str, Any]:
    from tool_parsers import UnknownParser, get_parser

    name, start = record.get("parser") or default, record.get("start_state")
    if not isinstance(name, str):
        raise UsageError("the record names no `parser` and there is no --parser")
    if start is not None and start not in _STARTS:
        raise UsageError(f"`start_state` must be one of {', '.join(_STARTS)} or null, not {start!r}")
    try:
        parser = get_parser(name, strict=strict)
    except UnknownParser as error:
        raise UsageError(str(error)) from None
    tools = record.get("tools")
    parsed = parser.parse(record["input_text"], tools if isinstance(tools, list) else None, start)
    whole = _whole(parsed)
    calls = [{key: call[key] for key in _CALL_KEYS} for call in whole["calls"]]
    return {
        "id": record.get("id"),
        "content": whole["content"],
        "trailing": whole["trailing"],
        "reasoning": whole["reasoning"],
        "calls": calls,
        "errors": whole["errors"],
    }


_CALL_KEYS = ("name", "arguments", "error", "repaired", "declared", "complete")


def _whole(parsed: Parsed) -> dict[str, Any]:
    """Every field of the result; lists instead of tuples, as JSON has them."""
    return asdict(parsed)


def _read_tools(path: Path | None) -> list[Any] | None:
    if path is None:
        return None
    try:
        tools = json.loads(_read_file(path))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(tools, list):
        raise UsageError(f"{path} must hold a JSON list of tools")
    return tools


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def _read_text() -> str:
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _lines() -> Iterable[str]:
    return (line.decode("utf-8", "replace") for line in sys.stdin.buffer)
