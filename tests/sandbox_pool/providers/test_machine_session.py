"""The process that leads to a machine, and what is asked through it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sandbox_pool.providers.machines.machine_session import (
    Machine,
    MachineOptions,
    MachineUnreachable,
    SessionFolder,
)

LEADS_THERE = """
import json, os, sys, time
print('hermes-rl machine {"cores": 1, "memory_mb": 0, "node": "n"}', flush=True)
for line in sys.stdin:
    if not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        os.close(1)
        time.sleep(60)
    print(json.dumps({"id": json.loads(line)["id"], "ok": "answered"}), flush=True)
"""
"""The first one falls silent when it is asked something, and does not end; the next ones answer."""


class Local(Machine):
    end_s = 0.2

    def __init__(self, marker: Path, folder: SessionFolder) -> None:
        super().__init__("local", MachineOptions(), folder)
        self._marker = marker

    def command(self, python: list[str]) -> list[str]:
        return [sys.executable, "-c", LEADS_THERE, str(self._marker)]


async def test_what_is_asked_while_a_silent_connection_ends_goes_over_a_new_one(tmp_path: Path) -> None:
    folder = SessionFolder("test")
    machine = Local(tmp_path / "fell-silent", folder)
    try:
        with pytest.raises(MachineUnreachable, match="ended"):
            await machine.ask("list")
        assert await machine.ask("list", within_s=30) == "answered"
    finally:
        await machine.close()
        folder.remove()
