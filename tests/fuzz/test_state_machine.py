"""Random sequences of lease, exec, snapshot, fork, reset and loss on trees that an agent would make to break them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from agent_loop.local_models.standin.policies import sabotage
from sandbox_pool import SandboxError, SandboxSpec
from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import SandboxDestroyed, SandboxFileError
from support.slot_server import Server, running_server

SPEC = SandboxSpec(memory_mb=256, disk_mb=64, pids=128)
ACTS = [
    act for kind in ("workspace", "trees", "shell", "processes") for act in sabotage()[kind] if "sleep 1" not in act
]
SLOTS = 3


class Slots(RuleBasedStateMachine):
    """Whatever is done to it, a slot is leased clean, a fork has what its snapshot had, and the server stays."""

    server: Server
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[int, Sandbox]] = []
        self.snapshots: list[tuple[str, str]] = []
        self.marks = 0

    def do(self, work: Any) -> Any:
        return self.runner.run(work)

    async def lease(self, snapshot: str | None = None) -> Sandbox:
        free = next(slot.slot for slot in await self.server.client.slots() if slot.state == "free")
        box = await self.server.client.lease(free, task_id=f"t{free}", spec=SPEC, snapshot=snapshot)
        self.held.append((free, box))
        return box

    def one(self, number: int) -> tuple[int, Sandbox]:
        return self.held[number % len(self.held)]

    @precondition(lambda self: len(self.held) < SLOTS)
    @rule()
    def a_new_slot_is_empty(self) -> None:
        box = self.do(self.lease())
        result = self.do(box.exec("ls -A; echo $((6*7)); jobs", timeout_s=20))
        assert (result.output, result.exit_code) == ("42\n", 0)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 9), act=st.sampled_from(ACTS))
    def attack(self, number: int, act: str) -> None:
        with contextlib.suppress(SandboxDestroyed, SandboxFileError):  # the only faults that an agent may cause
            self.do(self.one(number)[1].exec(act, timeout_s=5))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 9), workspace=st.booleans(), keep_state=st.booleans())
    def snapshot(self, number: int, workspace: bool, keep_state: bool) -> None:
        box = self.one(number)[1]
        self.marks += 1
        mark = f"mark-{self.marks}"
        try:
            self.do(box.write_file(f"{box.workdir}/mark", mark.encode()))
            self.snapshots.append((self.do(box.snapshot(workspace=workspace, keep_state=keep_state)), mark))
        except SandboxError:
            return  # there is no workspace any more, or it cannot be written: said, not guessed

    @precondition(lambda self: self.snapshots and len(self.held) < SLOTS)
    @rule(number=st.integers(0, 9))
    def a_fork_has_what_its_snapshot_had(self, number: int) -> None:
        name, mark = self.snapshots[number % len(self.snapshots)]
        box = self.do(self.lease(name))
        assert self.do(box.read_file(f"{box.workdir}/mark")) == mark.encode()

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 9))
    def a_slot_given_back_is_clean(self, number: int) -> None:
        index, box = self.held.pop(number % len(self.held))
        report = self.do(self.server.client.release(index, box.epoch))
        assert report.clean, report.problems
        with pytest.raises(SandboxError):
            self.do(box.exec("true"))

    @precondition(lambda self: self.snapshots)
    @rule(number=st.integers(0, 9))
    def drop(self, number: int) -> None:
        name, _ = self.snapshots.pop(number % len(self.snapshots))
        self.do(self.server.client.drop_snapshot(name))

    @invariant()
    def the_server_answers_and_counts_right(self) -> None:
        states = sorted(slot.state for slot in self.do(self.server.client.slots()))
        assert states == sorted(["leased"] * len(self.held) + ["free"] * (SLOTS - len(self.held)))

    def teardown(self) -> None:
        for index, box in self.held:
            assert self.do(self.server.client.release(index, box.epoch)).clean
        for name, _ in self.snapshots:
            self.do(self.server.client.drop_snapshot(name))
        kept = Path(self.server.directory, "scratch")
        assert [path for path in kept.glob("*/snapshots/*") if not path.name.startswith(".")] == []


@pytest.mark.parametrize("level", ["namespaces-root", "landlock"] if os.geteuid() == 0 else ["namespaces-rootless"])
@pytest.mark.parametrize("examples", [3, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_slots_hold_whatever_is_done_to_them(level: str, examples: int) -> None:
    with asyncio.Runner() as runner:
        starting = running_server("--level", level, slots=SLOTS)
        try:
            server = runner.run(starting.__aenter__())
        except RuntimeError as error:
            pytest.skip(f"this machine cannot do it: {error}")
        Slots.server, Slots.runner = server, runner
        try:
            run_state_machine_as_test(  # type: ignore[no-untyped-call]
                Slots,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=12,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(starting.__aexit__(None, None, None))
