"""YAML and flags into a validated model.

Flags win over the file, the file over hermes-agent's TERMINAL_* variables, and these over the model's defaults.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from environments.config.flags import Flag, apply_flags, parse_flags
from environments.config.hermes_agent import translate
from environments.config.yaml_file import KeyPath, YamlFile, find_config, read_yaml
from environments.errors import ConfigError
from sandbox_pool.errors import did_you_mean
from sandbox_pool.terminal_env import Taken, terminal_settings

log = logging.getLogger(__name__)

MASK = "***"
LARGEST_NUMBER = 2**53
"""What every reader of JSON gives back as it was."""
_SECRET_NAME = re.compile(r"(^|_)(api_?key|token|secret|password|passwd|credentials?|private_key)s?$", re.IGNORECASE)
_NOT_TEXT = re.compile("[\\0\ud800-\udfff]")
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
    if isinstance(value, Enum):
        return value.value  # as a YAML file spells it
    if isinstance(value, BaseModel | Mapping):
        return masked(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_mask(name, item) for item in value]
    return value


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
        inner, *notes = typing.get_args(annotation)
        # A field that holds subclasses has keys that only its own validator knows.
        return [] if any(type(note).__name__ == "SerializeAsAny" for note in notes) else _alternatives(inner)
    if origin is typing.Union or origin is types.UnionType:
        return [found for arg in typing.get_args(annotation) for found in _alternatives(arg)]
    return [annotation]


Model = TypeVar("Model", bound=BaseModel)

_TEXT_WANTED = frozenset({"string_type"})
_PROVIDER = ("env", "pool", "provider")


def load_config(
    model: type[Model],
    source: str | Path | None = None,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Model:
    """Read a config (a path or the name of a shipped one), apply dotted flags, and validate.

    With `environ`, its TERMINAL_* variables set what neither the file nor a flag does.
    """
    file = read_yaml(find_config(source)) if source is not None else YamlFile(Path("defaults"), {})
    settings = parse_flags(flags)
    data = copy.deepcopy(file.data)
    for flag in settings:
        _drop_other_names(model, data, flag.path)
    apply_flags(data, settings)
    for unknown in list(unknown_keys(model, data)):
        if said := translate(data, unknown.path):
            log.warning("%s: %s", _where(unknown.path, file, settings), said)
            continue
        name, parent = str(unknown.path[-1]), unknown.path[:-1]
        inside = f" in {_dotted(parent)!r}" if parent else ""
        where = _where(unknown.path, file, settings)
        raise ConfigError(f"{where}: unknown key {name!r}{inside}; {did_you_mean(name, unknown.valid)}")
    if environ is not None:
        added = _from_variables(data, environ)
        chosen = f"{_where(_PROVIDER, file, settings)} says {_dotted(_PROVIDER)}: {_value_at(data, _PROVIDER)}"
        _say_variables(added, environ.get("TERMINAL_ENV"), chosen)
        settings = [*added, *settings]
    loaded = _validate(model, data, file, settings)
    for path, reason in _out_of_range(data, loaded):
        if any(flag.text is None and flag.path == path for flag in settings):
            raise ConfigError(f"{_where(path, file, settings)}: it needs a value")
        raise ConfigError(f"{_where(path, file, settings)}: {_dotted(path)} {reason}")
    return loaded


def _drop_other_names(model: type[BaseModel], data: Any, path: KeyPath) -> None:
    """A flag wins over the file, whichever name of the setting the file has."""
    for part in path[:-1]:
        known = _alternatives(_fields_by_key(model).get(str(part)))
        models = [kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseModel)]
        data = data.get(part) if isinstance(data, dict) else None
        if len(models) != 1:
            return
        model = models[0]
    if not isinstance(data, dict):
        return
    for name, info in model.model_fields.items():
        if path[-1] in (names := {name, info.validation_alias}):
            for other in names - {path[-1]}:
                data.pop(other, None)


def _from_variables(data: dict[str, Any], environ: Mapping[str, str]) -> list[Flag]:
    """What TERMINAL_* variables set and `data` does not, put into it."""
    chosen = _value_at(data, _PROVIDER)
    try:
        taken = terminal_settings(environ, None if chosen is None else str(chosen))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    added = [
        Flag(path, item.value, str(item.value), item.variable)
        for item in taken
        if _value_at(data, path := _run_path(item)) is None
    ]
    apply_flags(data, added)
    return added


def _say_variables(added: list[Flag], named: str | None, chosen: str) -> None:
    if named and all(flag.path != _PROVIDER for flag in added):
        log.warning("TERMINAL_ENV=%s does not choose the provider: %s", named, chosen)
    if added:
        said = [f"{flag.name} -> {_dotted(flag.path)}: {_mask(str(flag.path[-1]), flag.value)}" for flag in added]
        log.info("from the environment: %s", "; ".join(said))


def _run_path(item: Taken) -> KeyPath:
    """Where a run's config has a setting of the pool."""
    if item.path == ("exec_timeout_s",):
        return ("env", "terminal_timeout")
    if item.path[0] == "spec":
        return ("env", "sandbox", *item.path[1:])
    return ("env", "pool", *item.path)


def _value_at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _out_of_range(data: Any, loaded: Any, at: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """What every model takes and no setting means: where it stands, and what is wrong with it."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            inner = loaded.get(key) if isinstance(loaded, Mapping) else getattr(loaded, str(key), None)
            yield from _out_of_range(value, inner, (*at, key))
    elif isinstance(data, list) and isinstance(loaded, list | tuple) and len(data) == len(loaded):
        for index, (value, inner) in enumerate(zip(data, loaded, strict=True)):
            yield from _out_of_range(value, inner, (*at, index))
    elif reason := _misfit(data, loaded):
        yield at, reason


def _misfit(data: Any, loaded: Any) -> str | None:
    if isinstance(data, bool) and not isinstance(loaded, bool) and isinstance(loaded, int | float):
        return "is a number, not true or false"
    if isinstance(loaded, float) and not math.isfinite(loaded):
        return f"is a finite number (got {loaded})"
    if isinstance(loaded, int) and abs(loaded) > LARGEST_NUMBER:
        return f"is at most {LARGEST_NUMBER} (got {loaded})"
    if isinstance(loaded, str) and _NOT_TEXT.search(loaded):
        return f"holds a character that no text has (got {_short(loaded)})"
    return None


class Origins:
    """Where the settings of a loaded config come from."""

    def __init__(self, source: str | Path, flags: Sequence[str], environ: Mapping[str, str]) -> None:
        self._file = read_yaml(find_config(source))
        self._flags = parse_flags(flags)
        data = copy.deepcopy(self._file.data)
        apply_flags(data, self._flags)
        self._flags = [*_from_variables(data, environ), *self._flags]

    def of(self, path: KeyPath) -> str:
        """`flag --name`, the name of a variable, `file:line`, or `default`."""
        if any(_starts_with(path, flag.path) or _starts_with(flag.path, path) for flag in self._flags):
            return _where(path, self._file, self._flags)
        nearest = next((path[:length] for length in range(len(path), 0, -1) if path[:length] in self._file.lines), None)
        # A value in the file may stand for several settings; a section in it says nothing of those it leaves out.
        is_section = any(
            len(other) > len(nearest or ()) and _starts_with(other, nearest or ()) for other in self._file.lines
        )
        return self._file.where(path) if nearest == path or (nearest is not None and not is_section) else "default"


def _validate(model: type[Model], data: dict[str, Any], file: YamlFile, flags: list[Flag]) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        details = _as_written(error.errors(include_url=False), data)
    if as_text := [flag for flag in flags if _wants_text(flag, details)]:
        # `--model 123` for a text field: YAML saw a number, the field wants what was typed.
        apply_flags(data, [Flag(flag.path, flag.text, flag.text, flag.name) for flag in as_text])
        return _validate(model, data, file, [flag for flag in flags if flag not in as_text])
    raise ConfigError(_sentence(details, file, flags))


def _as_written(details: list[ErrorDetails], data: Any) -> list[ErrorDetails]:
    """Errors at the keys of the data. Where one of several types may stand, pydantic names the type as well, and says
    what is wrong with each: what is said of a whole section goes when something in it is named."""
    for detail in details:
        place, path = data, []
        for part in detail["loc"]:
            if not _holds(place, part) and detail["type"] != "missing":
                continue
            path.append(part)
            place = place[part] if _holds(place, part) else None
        detail["loc"] = tuple(path)
    named = [detail["loc"] for detail in details]
    return [d for d in details if not any(len(o) > len(d["loc"]) and _starts_with(o, d["loc"]) for o in named)]


def _holds(place: Any, part: str | int) -> bool:
    return part in place if isinstance(place, Mapping) else isinstance(place, list) and part in range(len(place))


def _wants_text(flag: Flag, details: list[ErrorDetails]) -> bool:
    if flag.text is None or isinstance(flag.value, str):
        return False
    return any(_starts_with(d["loc"], flag.path) and d["type"] in _TEXT_WANTED for d in details)


def _sentence(details: list[ErrorDetails], file: YamlFile, flags: list[Flag]) -> str:
    first = details[0]
    loc = first["loc"]
    if alone := [flag for flag in flags if flag.text is None and _starts_with(loc, flag.path)]:
        return f"flag {alone[-1].name}: it needs a value"
    reason = first["msg"].removeprefix("Value error, ")
    silent = first["type"] in ("missing", "value_error") or any(is_secret_name(str(part)) for part in loc)
    got = "" if silent else f" (got {_short(first['input'])})"
    more = f" [and {len(details) - 1} more]" if len(details) > 1 else ""
    name = f"{_dotted(loc)}: " if loc else ""
    return f"{_where(loc, file, flags)}: {name}{reason[:1].lower()}{reason[1:]}{got}{more}"


def _where(path: KeyPath, file: YamlFile, flags: list[Flag]) -> str:
    for flag in reversed(flags):
        if _starts_with(path, flag.path) or _starts_with(flag.path, path):
            return f"flag {flag.name}" if flag.name.startswith("-") else flag.name
    return file.where(path)


def _starts_with(path: KeyPath, prefix: KeyPath) -> bool:
    return tuple(map(str, path[: len(prefix)])) == tuple(map(str, prefix))


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
