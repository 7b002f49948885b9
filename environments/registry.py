"""Environments by name: the shipped ones, and any class as `module:Class`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from environments.errors import ConfigError
from sandbox_pool.errors import did_you_mean

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv

SHIPPED = {
    "terminal_tasks": "environments.terminal_tasks.terminal_env:TerminalTasksEnv",
    "code_tasks": "environments.code_tasks.code_env:CodeTasksEnv",
}


def find_environment(name: str, folders: Sequence[Path] = ()) -> type[HermesAgentBaseEnv]:
    """The class of this name; ConfigError names the nearest one when it does not exist.

    A module that is not installed is looked for in `folders`, which an installed command does not search by itself.
    """
    place = SHIPPED.get(name, name)
    module_name, _, class_name = place.partition(":")
    if not class_name:
        raise ConfigError(f"unknown environment {name!r}; {did_you_mean(name, list(SHIPPED))}, or give module:Class")
    for folder in folders:
        if name not in SHIPPED and str(folder) not in sys.path:
            sys.path.append(str(folder))
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
