"""Packages of a user that have the names of ours."""

from pathlib import Path

PACKAGES = ("environments", "agent_loop", "tool_parsers", "sandbox_pool")


def write_own_packages(folder: Path) -> None:
    """One of each in the folder; importing any of them fails."""
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('the package of the user was imported')\n")
