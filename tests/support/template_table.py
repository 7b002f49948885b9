"""The table of agent_loop/TEMPLATES.md: what the recorder found out about each published template.

`python tests/support/template_table.py` writes it anew; a test checks that it is true.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "agent_loop" / "TEMPLATES.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
COLUMNS = (
    "template",
    "verdict",
    "turn ends with",
    "traits",
    "thinking when re-rendered",
    "re-render extends the prompt",
)


def rows() -> list[tuple[str, ...]]:
    """One row per template."""
    from agent_loop.model.tokens.probe import probe_template
    from agent_loop.model.tokens.template import TemplateRefused
    from support.template_cases import template_cases

    table = []
    for case in template_cases():
        try:
            traits = probe_template(case.tokenizer(), case.source).traits
        except TemplateRefused as refused:
            table.append((case.name, f"refused: {cell(str(refused))}", "", "", "", ""))
            continue
        if not traits.tools:
            table.append((case.name, f"no tools: {cell(traits.no_tools_because)}", "", "", "", ""))
            continue
        ends = " or ".join(dict.fromkeys(f"`{e}`" for e in (traits.call_end, traits.answer_end)))
        verdict = "exact" if traits.glue == "local" else "exact, whole conversation rendered"
        table.append((case.name, verdict, cell(ends), trait_words(traits), traits.thinking, yes(traits.prefix_stable)))
    return table


def trait_words(traits) -> str:
    """The traits that are not the usual ones."""
    words = [
        ("stop token opens the next message", bool(traits.role_marker_ends)),
        ("results merged", traits.merged_results),
        ("no generation prompt after results", not traits.prompt_after_results),
        ("starts inside thinking", traits.starts_in_thinking),
        ("arguments as text", traits.shape.arguments == "string"),
        ("one call per turn", not traits.shape.parallel_calls),
        ("nine-character call ids", traits.shape.short_call_ids),
        ("writes no schemas", not traits.schemas),
    ]
    return ", ".join(word for word, applies in words if applies)


def yes(value: bool) -> str:
    return "yes" if value else "no"


def cell(text: str) -> str:
    """Text that does not break a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(table: list[tuple[str, ...]]) -> str:
    """The table between its two marks."""
    lines = [" | ".join(row) for row in (COLUMNS, ("---",) * len(COLUMNS), *table)]
    return "\n".join([BEGIN, *(f"| {line} |" for line in lines), END])


def written() -> str:
    """The table as the document has it."""
    text = DOCUMENT.read_text("utf-8")
    return text[text.index(BEGIN) : text.index(END) + len(END)]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    document = DOCUMENT.read_text("utf-8")
    DOCUMENT.write_text(document.replace(written(), markdown(rows())), "utf-8")
