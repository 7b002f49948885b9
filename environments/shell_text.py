"""Shell text that set-ups and reference solutions are written in."""

from __future__ import annotations


def heredoc(path: str, body: str) -> str:
    """A command that writes a text to a file, whatever is in it."""
    return f"cat > {path} <<'END_OF_TEXT'\n{body}END_OF_TEXT"
