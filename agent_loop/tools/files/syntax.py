"""Checks the syntax of a file that was just written, so that the model learns of a mistake at once.

Only formats that parse in this process without running anything, and only small files: the check must never cost the
rollout much. `None` means that no error was found, or that there was nothing to check.
"""

from __future__ import annotations

import ast
import json
import tomllib
import warnings
from collections.abc import Callable
from pathlib import PurePosixPath

import yaml

MAX_CHARS = 64_000
MAX_TOML_CHARS = 8_000
MAX_TOML_DOTS = 1_000
"""tomllib takes time that grows with the square of a dotted key's length."""
MAX_YAML_OPENERS = 2_000
"""libyaml takes time that grows with the square of the depth of `[` and `{`, and holds every other thread meanwhile."""


def syntax_error(path: str, text: str) -> str | None:
    """One sentence about the first syntax error, or None."""
    suffix = PurePosixPath(path).suffix.lower()
    check = _CHECKS.get(suffix)
    if check is None or len(text) > MAX_CHARS or _too_slow(suffix, text):
        return None
    try:
        check(text)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, yaml.YAMLError) as error:
        return " ".join(str(error).split())
    except (RecursionError, MemoryError):
        return None
    return None


def _too_slow(suffix: str, text: str) -> bool:
    if suffix == ".toml":
        return len(text) > MAX_TOML_CHARS or text.count(".") > MAX_TOML_DOTS
    return suffix in (".yaml", ".yml") and text.count("[") + text.count("{") > MAX_YAML_OPENERS


def lint(path: str, before: str | None, after: str) -> dict[str, str] | None:
    """What a change did to the syntax of a file, or None when it is fine, as before."""
    problem = syntax_error(path, after)
    had_one = before is not None and syntax_error(path, before) is not None
    if problem is None:
        return {"status": "ok", "output": "The syntax error that the file had is gone."} if had_one else None
    found = {"status": "error", "output": problem}
    return {**found, "note": "The file had a syntax error before this change too."} if had_one else found


def _python(text: str) -> None:
    with warnings.catch_warnings():
        # An invalid escape in the model's code must not become a warning of this process.
        warnings.simplefilter("ignore")
        ast.parse(text)


def _yaml(text: str) -> None:
    for _ in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        pass


_CHECKS: dict[str, Callable[[str], object]] = {
    ".py": _python,
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
}
