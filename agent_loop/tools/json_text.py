"""The one way tool results become text: always valid JSON, always encodable as UTF-8."""

from __future__ import annotations

import json
import math
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
