"""Lists of texts in a provider's options: given as a list, or as text from a command line or a variable, `a,b`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator


def _as_list(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
