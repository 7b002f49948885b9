"""Hatch build hook: compiles the slot helper into the wheel where there is a C compiler, and goes on without it."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SlotHelperHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the compiled helper to wheels; an editable install builds it on first use instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is assembled."""
        if self.target_name != "wheel" or version == "editable":
            return
        building = _load_building(Path(self.root))
        prebuilt = building.prebuilt()
        # Outside the source tree: a build must leave nothing in a checkout.
        compiled = building.cache_dir() / prebuilt.name
        problem = building.compile_helper(compiled)
        if problem is not None:
            self.app.display_warning(f"slot helper not compiled, slots will be slower: {problem}")
            return
        build_data["force_include"][str(compiled)] = str(prebuilt.relative_to(self.root))
        build_data["pure_python"] = False
        # A static program: of this platform, but of no particular Python.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load_building(root: Path) -> Any:
    """By path: the package itself can not be imported before its dependencies are installed."""
    path = root / "sandbox_pool" / "server" / "build" / "helper_build.py"
    spec = importlib.util.spec_from_file_location("slot_helper_building", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
