"""A config as it may be shown: secrets are replaced wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr

MASK = "***"
_SECRET_NAME = re.compile(r"(^|_)(api_?key|token|secret|password|passwd|credentials?|private_key)s?$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def masked(value: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a config in which no secret can be read."""
    data = value.model_dump(mode="python") if isinstance(value, BaseModel) else value
    return {str(key): _mask(str(key), inner) for key, inner in data.items()}


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def _mask(name: str, value: Any) -> Any:
    if isinstance(value, SecretStr | SecretBytes):
        return MASK if value.get_secret_value() else ""
    if isinstance(value, str) and value and is_secret_name(name):
        return MASK
    if isinstance(value, str):
        return _URL_LOGIN.sub(f"{MASK}@", value)
    if isinstance(value, BaseModel | Mapping):
        return masked(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_mask(name, item) for item in value]
    return value
