"""Environments by name: the shipped ones, and any class as `module:Class`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from environments.config.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv

SHIPPED = {
    "terminal_tasks": "environments.terminal_tasks.env:TerminalTasksEnv",
    "code_tasks": "environments.code_tasks.env:CodeTasksEnv",
}


def find_environment(name: str) -> type[HermesAgentBaseEnv]:
    """The class of this name; ConfigError with the nearest name when there is none."""
    place = SHIPPED.get(name, name)
    module_name, _, class_name = place.partition(":")
    if not class_name:
        raise ConfigError(f"unknown environment {name!r}; {did_you_mean(name, list(SHIPPED))}, or give module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError(f"environment {name!r}: there is no module {module_name!r}") from error
    found = getattr(module, class_name, None)
    from environments.base import HermesAgentBaseEnv

    if not (isinstance(found, type) and issubclass(found, HermesAgentBaseEnv)):
        raise ConfigError(f"environment {name!r}: {module_name} has no HermesAgentBaseEnv called {class_name!r}")
    return found
