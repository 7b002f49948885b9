"""Hatchling as the build backend, with a C cross compiler (100 MB) for wheels but not for editable installs.

A wheel is for every machine and carries the helpers of all; an editable install is for this machine only.
"""

from __future__ import annotations

from typing import Any

from hatchling.build import *  # noqa: F403
from hatchling.build import get_requires_for_build_wheel as hatchling_requires

ZIGLANG = "ziglang>=0.15; platform_machine == 'x86_64' or platform_machine == 'aarch64'"


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """PEP 517: what a build front end installs before it builds a wheel."""
    return [*hatchling_requires(config_settings), ZIGLANG]
