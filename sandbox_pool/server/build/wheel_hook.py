"""Hatch build hook: puts the slot helpers for all machines into the wheel, so that its users need no compiler."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SlotHelperHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the compiled helpers to wheels; an editable install builds its own on first use instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is assembled."""
        if self.target_name != "wheel" or version == "editable":
            return
        helper_build = _load_helper_build(Path(self.root))
        for machine in helper_build.MACHINES:
            try:
                # In the cache directory: a build must leave nothing in a checkout.
                helper = helper_build.get_helper(machine)
            except helper_build.HelperMissing as error:
                self.app.display_warning(f"{error}; users on {machine} will need a compiler")
                continue
            inside = helper_build.SOURCES.relative_to(self.root) / helper.name
            build_data["force_include"][str(helper)] = str(inside)


def _load_helper_build(root: Path) -> Any:
    """By path: the package itself cannot be imported before its dependencies are installed."""
    path = root / "sandbox_pool" / "server" / "build" / "helper_build.py"
    spec = importlib.util.spec_from_file_location("helper_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
