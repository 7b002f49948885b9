"""What the text of a parameter means, beyond its schema: type attributes, wrappers, the template's own newlines."""

from __future__ import annotations

from typing import Any

from tool_parsers.jsonread import Decoded, loads
from tool_parsers.schema import Tools, as_text, fitted, typed, types_of


def without_template_newlines(value: str) -> str:
    """The value without the one newline a template writes on each side of it."""
    if value.startswith("\n"):
        value = value[1:]
    return value[:-1] if value.endswith("\n") else value


def typed_by_attribute(value: str, is_string: bool, schema: Any) -> Any:
    """A value whose tag says whether it is a string; a schema that says otherwise wins."""
    allowed = types_of(schema)
    if is_string:
        return typed(value, schema) if allowed and "string" not in allowed else value
    outcome = loads(value)
    if not isinstance(outcome, Decoded):
        return typed(value, schema)
    if allowed == {"string"}:
        return value if isinstance(outcome.value, str) else as_text(outcome.value)
    return fitted(outcome.value, schema)


def unwrapped(tools: Tools, name: str, arguments: dict[str, Any], wrappers: tuple[str, ...]) -> dict[str, Any]:
    """The arguments inside a single wrapping parameter, unless the tool declares a parameter of that name."""
    if len(arguments) != 1 or name not in tools.parameters:
        return arguments
    ((key, value),) = arguments.items()
    if key not in wrappers or key in tools.properties(name):
        return arguments
    outcome = loads(value) if isinstance(value, str) else None
    inner = outcome.value if isinstance(outcome, Decoded) else value
    return inner if isinstance(inner, dict) else arguments
