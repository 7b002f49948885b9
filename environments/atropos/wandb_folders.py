"""Imports wandb with its temporary folders among ours: it makes two on import, and a killed run would leave them.

To be imported before wandb is.
"""

from __future__ import annotations

import contextlib
import importlib

from sandbox_pool.errors import StateError
from sandbox_pool.owned_folders import make_owned_folder, temporary_files_in

with contextlib.ExitStack() as _stack:
    with contextlib.suppress(StateError):  # its folders then stand where they always do
        _stack.enter_context(temporary_files_in(make_owned_folder("wandb-")))
    with contextlib.suppress(ImportError):  # whoever needs it says so
        importlib.import_module("wandb")
