"""Which keys a model knows, whatever it does with unknown ones itself (atroposlib's models drop them silently)."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from environments.config.yaml_file import KeyPath


@dataclass(frozen=True)
class UnknownKey:
    """A key that no model on its path knows."""

    path: KeyPath
    valid: tuple[str, ...]


def unknown_keys(model: type[BaseModel], data: Mapping[str, Any], at: KeyPath = ()) -> Iterator[UnknownKey]:
    """All keys of nested data that the model has no field for."""
    fields = _fields_by_key(model)
    for key, value in data.items():
        if key in fields:
            yield from _unknown_in_value(fields[key], value, (*at, key))
        elif model.model_config.get("extra") != "allow":
            yield UnknownKey((*at, key), tuple(model.model_fields))


def _fields_by_key(model: type[BaseModel]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        fields[name] = info.annotation
        if isinstance(info.validation_alias, str):
            fields[info.validation_alias] = info.annotation
    return fields


def _unknown_in_value(annotation: Any, value: Any, at: KeyPath) -> Iterator[UnknownKey]:
    if isinstance(value, Mapping):
        yield from _unknown_in_mapping(annotation, value, at)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item_type, *_ in _arguments_of(annotation, (list, tuple, Sequence)):
            for index, inner in enumerate(value):
                yield from _unknown_in_value(item_type, inner, (*at, index))


def _unknown_in_mapping(annotation: Any, value: Mapping[str, Any], at: KeyPath) -> Iterator[UnknownKey]:
    models = [m for m in _alternatives(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]
    if models:
        # In a union the alternative that knows the most keys is the one that was meant.
        yield from min((list(unknown_keys(model, value, at)) for model in models), key=len)
        return
    for _, value_type in _arguments_of(annotation, (dict, Mapping)):
        for key, inner in value.items():
            yield from _unknown_in_value(value_type, inner, (*at, key))


def _arguments_of(annotation: Any, origins: tuple[type, ...]) -> Iterator[tuple[Any, ...]]:
    """Type arguments of each alternative that is such a container: `(int,)` for `list[int] | None`."""
    for item in _alternatives(annotation):
        if typing.get_origin(item) in origins and typing.get_args(item):
            yield typing.get_args(item)


def _alternatives(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin is typing.Union or origin is types.UnionType:
        return [inner for arg in typing.get_args(annotation) for inner in _alternatives(arg)]
    return [annotation]
