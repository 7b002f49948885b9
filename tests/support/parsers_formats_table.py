"""Prints the table of formats for `tool_parsers/FORMATS.md`: `python tests/support/parsers_formats_table.py`."""

from __future__ import annotations

from tool_parsers.formats import GRAMMARS


def formats_table() -> str:
    lines = ["| grammar | parser | also called | written by |", "|---|---|---|---|"]
    for grammar, forms in GRAMMARS.items():
        lines += [f"| {grammar} | `{form.name}` | {', '.join(form.aliases)} | {form.models} |" for form in forms]
    return "\n".join(lines)


if __name__ == "__main__":
    print(formats_table())
