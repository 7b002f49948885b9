"""What leaves a command on its way to the model: no terminal escapes, no secrets we hold, no more than the budget.

Only output of processes passes here. Contents of files are never altered.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any


def dump(value: Any) -> str:
    """JSON text of any value. Lone surrogates become `?`, NaN and infinities null, unknown objects their `str`."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_without_nan(value), ensure_ascii=False, default=str)
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8") if _has_surrogate(text) else text


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: window titles, hyperlinks
    r"|\x1b[PX^_][^\x1b]*\x1b\\"  # DCS, SOS, PM, APC strings
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|\x1b[ -/]*[0-~]"  # two-character escapes and charset selection
)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<![A-Za-z0-9_])(?:sk-(?:proj-|ant-|or-)?|sk_live_|rk_live_|gh[opsu]_|github_pat_|glpat-|gloas-|gldt-|glrtr?-|glcbt-|glptt-"
    r"|glft-|glimt-|glagent-|glsoat-|glffct-|hf_|npm_|pypi-|r8_|xai-|gsk_|tvly-|fc-|fw[-_]|fpk_|pplx-|dop_v1_|whsec_|shpat_|sq0atp-"
    r"|ya29\.|AGE-SECRET-KEY-1)[A-Za-z0-9_.-]{16,}|\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
    r"|(?<=bot)\d{8,12}:[A-Za-z0-9_-]{30,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{35}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{16,}|(?<=://)[^/\s:@]{1,80}:[^/\s@]{1,200}(?=@)",
    re.DOTALL,
)
"""What keys of common services look like, private keys, JSON web tokens, bearer tokens and passwords in addresses."""
_NAMED_VALUES = re.compile(
    r"((?<![A-Za-z0-9_.-])[A-Za-z0-9_.-]{0,40}?"
    r"(?:api[_-]?key|(?<=_)key|token|secret|password|passwd|(?<=_)pass|(?<=_)pw|credentials?|account_?key)"
    r"(?:=[\"']?|[\"']\s?:\s?[\"']|(?<=-key):\s))"
    r"(?![$<{]|\[REDACTED|[\w.]{0,80}\()([^\s\"'&,;<>(){}]{6,400})",
    re.IGNORECASE,
)
"""A name that says so and its value: `NAME=value`, `"name": "value"`, `x-api-key: value`; not code that looks it up."""
SHORTEST_SECRET = 8
"""Shorter values would be found inside ordinary text."""


def strip_ansi(text: str) -> str:
    """Remove terminal escape sequences; everything else stays byte for byte."""
    if "\x1b" not in text and "\x9b" not in text:
        return text
    return _ESCAPES.sub("", text)


class Redactor:
    """Hides the values of secrets that this process gave to the sandbox, wherever a command prints them.

    With `shapes` also whatever looks like a secret.
    """

    def __init__(self, secrets: Mapping[str, str], *, shapes: bool = False) -> None:
        held = [(name, value) for name, value in secrets.items() if len(value) >= SHORTEST_SECRET]
        # Longest first: a secret that contains another must not be half replaced.
        held.sort(key=lambda pair: (-len(pair[1]), pair[0]))
        self._names = {value: name for name, value in reversed(held)}
        self._shapes = shapes
        self._pattern = re.compile("|".join(re.escape(value) for _, value in held)) if held else None

    @classmethod
    def for_environment(cls, env: Mapping[str, str], names: Iterable[str] = (), *, shapes: bool = False) -> Redactor:
        """Secrets of an environment: variables named here, and those whose name says that they are secret."""
        listed = set(names)
        held = {name: value for name, value in env.items() if name in listed or _SECRET_NAME.search(name)}
        return cls(held, shapes=shapes)

    def __call__(self, text: str) -> str:
        """The text with each held value replaced by `[REDACTED:NAME]`, and what looks like a secret by `[REDACTED]`."""
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: f"[REDACTED:{self._names[match.group()]}]", text)
        if not self._shapes:
            return text
        return _NAMED_VALUES.sub(r"\1[REDACTED]", _SHAPES.sub("[REDACTED]", text))


def cap_bytes(text: str, limit: int, head_share: float = 0.4) -> tuple[str, int]:
    """Keep the first and last bytes of a text up to `limit`; returns the text and how many bytes were left out."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text, 0
    head = data[: int(limit * head_share)].decode("utf-8", "ignore")
    tail_size = limit - int(limit * head_share)
    tail = data[len(data) - tail_size :].decode("utf-8", "ignore") if tail_size else ""
    omitted = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}\n\n... [{omitted:,} bytes left out] ...\n\n{tail}", omitted


def cut_line(line: str, limit: int) -> str:
    """One line, cut at `limit` characters with a mark that says how long it was."""
    return line if len(line) <= limit else f"{line[:limit]}... [line of {len(line):,} characters cut]"
