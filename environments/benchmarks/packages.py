"""What benchmarks need: their packages, or one sentence that says what to install; and what models are told."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import yaml

from environments.errors import ConfigError


def needed(module: str, install: str) -> ModuleType:
    """The module; ConfigError with `install` when its package, or one that it imports, is not there."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        missing = top if error.name in (None, top) else f"{top} (and {error.name}, which it imports)"
        raise ConfigError(f"this benchmark needs the package {missing}: {install}") from error


def folder_of(package: str, install: str) -> Path:
    """Where a package lies, without importing it; ConfigError as above."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"this benchmark needs the package {package}: {install}")
    return Path(found.submodule_search_locations[0])


@cache
def prompts() -> dict[str, str]:
    """Texts of prompts.yaml."""
    loaded: dict[str, str] = yaml.safe_load((files("environments.benchmarks") / "prompts.yaml").read_text("utf-8"))
    return loaded
