"""YAML and flags into a validated model; flags win over the file, the file over the model's defaults."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from environments.config.errors import ConfigError, did_you_mean
from environments.config.files import find_config
from environments.config.flags import Flag, apply_flags, parse_flags
from environments.config.masking import is_secret_name
from environments.config.schema import unknown_keys
from environments.config.yaml_file import KeyPath, YamlFile, read_yaml

Model = TypeVar("Model", bound=BaseModel)

_TEXT_WANTED = frozenset({"string_type"})


def load_config(model: type[Model], source: str | Path | None = None, flags: Sequence[str] = ()) -> Model:
    """Read a config (a path or the name of a shipped one), apply dotted flags, and validate."""
    file = read_yaml(find_config(source)) if source is not None else YamlFile(Path("defaults"), {})
    settings = parse_flags(flags)
    data = copy.deepcopy(file.data)
    apply_flags(data, settings)
    for unknown in unknown_keys(model, data):
        name, parent = str(unknown.path[-1]), unknown.path[:-1]
        inside = f" in {_dotted(parent)!r}" if parent else ""
        where = _where(unknown.path, file, settings)
        raise ConfigError(f"{where}: unknown key {name!r}{inside}; {did_you_mean(name, unknown.valid)}")
    return _validate(model, data, file, settings)


def _validate(model: type[Model], data: dict[str, Any], file: YamlFile, flags: list[Flag]) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    if as_text := [flag for flag in flags if _wants_text(flag, details)]:
        # `--model 123` for a text field: YAML saw a number, the field wants what was typed.
        apply_flags(data, [Flag(flag.path, flag.text, flag.text, flag.name) for flag in as_text])
        return _validate(model, data, file, [flag for flag in flags if flag not in as_text])
    raise ConfigError(_sentence(details, file, flags))


def _wants_text(flag: Flag, details: list[ErrorDetails]) -> bool:
    if flag.text is None or isinstance(flag.value, str):
        return False
    return any(_starts_with(d["loc"], flag.path) and d["type"] in _TEXT_WANTED for d in details)


def _sentence(details: list[ErrorDetails], file: YamlFile, flags: list[Flag]) -> str:
    first = details[0]
    loc = first["loc"]
    reason = first["msg"].removeprefix("Value error, ")
    silent = first["type"] in ("missing", "value_error") or any(is_secret_name(str(part)) for part in loc)
    got = "" if silent else f" (got {_short(first['input'])})"
    more = f" [and {len(details) - 1} more]" if len(details) > 1 else ""
    name = f"{_dotted(loc)}: " if loc else ""
    return f"{_where(loc, file, flags)}: {name}{reason[:1].lower()}{reason[1:]}{got}{more}"


def _where(path: KeyPath, file: YamlFile, flags: list[Flag]) -> str:
    for flag in reversed(flags):
        if _starts_with(path, flag.path) or _starts_with(flag.path, path):
            return f"flag {flag.name}"
    return file.where(path)


def _starts_with(path: KeyPath, prefix: KeyPath) -> bool:
    return tuple(map(str, path[: len(prefix)])) == tuple(map(str, prefix))


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
