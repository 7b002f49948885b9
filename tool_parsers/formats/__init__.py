"""Every format, grouped by grammar."""

from __future__ import annotations

from tool_parsers.formats import headers, json_formats, literal, pairs, python, xml
from tool_parsers.spec import Format

GRAMMARS: dict[str, tuple[Format, ...]] = {
    "A: JSON object between tags": json_formats.TAGGED,
    "B: JSON array after a marker": json_formats.ARRAYS,
    "C: bare JSON": json_formats.BARE,
    "D: header with the name, JSON arguments": headers.FORMATS,
    "E: a tag per parameter": xml.FORMATS,
    "F: key and value tags": pairs.FORMATS,
    "G: Python calls": python.FORMATS,
    "H: own literal": literal.FORMATS,
}

FORMATS: tuple[Format, ...] = tuple(form for forms in GRAMMARS.values() for form in forms)
