"""Every format, grouped by grammar; one module per grammar."""

from __future__ import annotations

from tool_parsers.formats import bare_json, headers, json_arrays, json_tags, literal, pairs, python, xml
from tool_parsers.spec import Format

GRAMMARS: dict[str, tuple[Format, ...]] = {
    "A: JSON object between tags": json_tags.FORMATS,
    "B: JSON array after a marker": json_arrays.FORMATS,
    "C: bare JSON": bare_json.FORMATS,
    "D: header with the name, JSON arguments": headers.FORMATS,
    "E: a tag per parameter": xml.FORMATS,
    "F: key and value tags": pairs.FORMATS,
    "G: Python calls": python.FORMATS,
    "H: own literal": literal.FORMATS,
}

FORMATS: tuple[Format, ...] = tuple(form for forms in GRAMMARS.values() for form in forms)
