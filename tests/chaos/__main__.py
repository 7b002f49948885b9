"""Everything fails, in the order of a seed, and nothing may be lost: `make chaos CHAOS_SECONDS=600 SEED=7`.

The pipeline is real: run-api, `hermes-rl serve` (with two workers where the seed is odd), slot servers, a model server
that speaks vLLM's protocol; the trainer takes batches and keeps them. Checked all along: each delivered group is, token
for token, one that the environment stored; `verify` finds nothing; no group comes twice; none has a rollout that
infrastructure ended; no untrainable rollout has a score; after each fault a new group arrives within a bound. At the
end: calm throughput is back, and no process, mount, cgroup, file or lease is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import orjson

from agent_loop.outcome import Outcome
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import verify
from chaos.pipeline import Pipeline
from sandbox_pool.faults.machine_faults import full_disk

BOUND_S = 120.0
"""Longest time without a new group after a fault, on a machine where others run as well."""
STARTING_S = 300.0
"""Longest time until the first group: everything imports at once."""
CALM_S, CALM_WINDOWS = 10.0, 6
RECOVERED = 0.3
"""Share of the throughput before the faults that must be back after them: the rest is the machine's own unrest."""


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Checks:
    """What must hold of everything that was delivered and stored so far."""

    stored: Path
    records: dict[str, RolloutRecord] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    _read: int = 0
    _checked: int = 0

    def run(self, groups: list[tuple[float, dict[str, Any]]]) -> None:
        new, self._checked = groups[self._checked :], len(groups)
        self._read_records()
        for _, group in new:
            self._check(group)

    def _read_records(self) -> None:
        if not self.stored.exists():
            return
        with self.stored.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                record = RolloutRecord.from_json(line)
            except (ValueError, orjson.JSONDecodeError):
                self.outcomes["a torn line"] += 1  # of a process that was killed, or a full disk, while it wrote
                continue
            self._check_record(record, line)

    def _check_record(self, record: RolloutRecord, line: bytes) -> None:
        self.outcomes[record.outcome] += 1
        known = {outcome.value: outcome for outcome in Outcome}
        if record.score is not None and not record.trainable:
            raise Broken(f"{record.rollout_id} is not trainable ({record.outcome}) and has the score {record.score}")
        if record.trainable and record.outcome in known and not known[record.outcome].trainable:
            raise Broken(f"{record.rollout_id} ended as {record.outcome} and is called trainable")
        report = verify([line])
        if not report.ok:
            raise Broken(f"verify: {report.violations[0]}")
        self.records[record.rollout_id] = record

    def _check(self, group: dict[str, Any]) -> None:
        told = group["generation_params"]
        self.seen[told["group_id"]] += 1
        if self.seen[told["group_id"]] > 1:
            raise Broken(f"group {told['group_id']} was delivered twice")
        for place, (rollout_id, index) in enumerate(zip(told["rollout_ids"], told["segments"], strict=True)):
            record = self.records.get(rollout_id)
            if record is None:
                raise Broken(f"{rollout_id} was delivered and is not stored")
            if not record.trainable or record.score is None:
                raise Broken(f"{rollout_id} ({record.outcome}) was delivered and is not trainable")
            segment = record.segments[index]
            sent = (group["tokens"][place], group["masks"][place], group["inference_logprobs"][place])
            if sent != (segment.tokens, segment.masks, segment.logprobs) or group["scores"][place] != record.score:
                raise Broken(f"{rollout_id} was delivered with other tokens, masks, logprobs or score than are stored")


class Chaos:
    """Draws faults and lets them happen."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self._pipeline = pipeline
        self._dice = random.Random(seed)
        self.happened: Counter[str] = Counter()
        p = pipeline
        self._faults: dict[str, Callable[[], None]] = {
            "kill the environment": lambda: p.env.signal(signal.SIGKILL),
            "stop the environment for a while": lambda: self._stand_still(p.env.pid),
            "kill run-api": lambda: p.api.signal(signal.SIGKILL),
            "stop run-api for a while": lambda: self._stand_still(p.api.pid),
            "kill the model server": lambda: p.model.signal(signal.SIGKILL),
            "stop the model server for a while": lambda: self._stand_still(p.model.pid),
            "kill a slot server": lambda: self._one_of(p.slot_servers(), self._kill),
            "stop a slot server for a while": lambda: self._one_of(p.slot_servers(), self._stand_still),
            "stop a slot server until it is lost": lambda: self._one_of(p.slot_servers(), self._freeze),
            "kill processes of slots, as an OOM killer does": self._kill_in_slots,
            "cut the lines to the model": p.model_line.cut,
            "cut the lines to run-api": p.api_line.cut,
            "fill the disk of the slots": lambda: self._fill(p.slots_disk),
            "fill the disk of the run": lambda: self._fill(p.run_disk),
            "the clock jumps": self._jump,
        }
        if seed % 2:
            self._faults |= {
                "kill a worker": lambda: self._one_of(p.workers(), self._kill),
                "stop a worker for a while": lambda: self._one_of(p.workers(), self._stand_still),
            }

    def strike(self) -> str:
        """One fault; its name."""
        name = self._dice.choice(list(self._faults))
        self.happened[name] += 1
        with contextlib.suppress(ProcessLookupError):
            self._faults[name]()
        return name

    def pause_s(self) -> float:
        """Until the next one."""
        return self._dice.uniform(0.5, 4.0)

    def _stand_still(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._dice.uniform(0.2, 4.0))
        os.kill(pid, signal.SIGCONT)

    def _freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _one_of(self, pids: list[int], strike: Callable[[int], None]) -> None:
        if pids:
            strike(pids[self._dice.randrange(len(pids))])

    def _kill_in_slots(self) -> None:
        for pid in self._pipeline.slot_servers():
            below = list(descendants(pid))
            self._dice.shuffle(below)
            for victim in below[:3]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)

    def _fill(self, disk: Path) -> None:
        with contextlib.suppress(ValueError), full_disk(disk):  # without a disk of our own nothing is filled
            time.sleep(self._dice.uniform(0.5, 3.0))

    def _jump(self) -> None:
        self._pipeline.clock.write_text(str(self._dice.choice([0, 3600, -3600, 86_400, -86_400, 10**8])))


def descendants(pid: int) -> Iterator[int]:
    """Every process below one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)


def groups_per_s(pipeline: Pipeline, checks: Checks, seconds: float, bound_s: float = BOUND_S) -> float:
    """Throughput without faults."""
    before, began = len(pipeline.trainer.groups), time.monotonic()
    while time.monotonic() - began < seconds or len(pipeline.trainer.groups) - before < 2:
        if time.monotonic() - began > seconds + bound_s:
            raise Broken(f"no throughput: {len(pipeline.trainer.groups) - before} groups in {seconds + bound_s:g} s")
        pipeline.restart_what_ended()
        time.sleep(0.2)
    checks.run(pipeline.trainer.groups)
    return (len(pipeline.trainer.groups) - before) / (time.monotonic() - began)


def wait_for_progress(pipeline: Pipeline, checks: Checks, fault: str) -> float:
    """A group that was not even stored when the fault happened arrives at the trainer; how long that took."""
    checks.run(pipeline.trainer.groups)
    known = {record.group_id for record in checks.records.values()}
    before, began = len(pipeline.trainer.groups), time.monotonic()
    while not any(group["generation_params"]["group_id"] not in known for _, group in pipeline.trainer.groups[before:]):
        if time.monotonic() - began > BOUND_S:
            raise Broken(f"no new group within {BOUND_S:g} s after: {fault}")
        pipeline.restart_what_ended()
        time.sleep(0.1)
    checks.run(pipeline.trainer.groups)
    return time.monotonic() - began


def play(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The whole run; raises `Broken`. What happened, as figures."""
    with Pipeline(folder, seed) as pipeline:
        checks = Checks(pipeline.run_disk / "chaos.jsonl")
        chaos = Chaos(pipeline, seed)
        groups_per_s(pipeline, checks, 1.0, STARTING_S)  # everything has started
        calm = groups_per_s(pipeline, checks, CALM_S)
        end, slowest = time.monotonic() + seconds, (0.0, "")
        while time.monotonic() < end:
            fault = chaos.strike()
            took = wait_for_progress(pipeline, checks, fault)
            print(f"{fault}: next group after {took:.1f} s, {len(pipeline.trainer.groups)} so far", flush=True)
            slowest = max(slowest, (took, fault))
            time.sleep(min(chaos.pause_s(), max(0.0, end - time.monotonic())))
        pipeline.clock.write_text("0")
        wait_for_progress(pipeline, checks, "the end of the faults")
        windows = [groups_per_s(pipeline, checks, CALM_S)]
        while (after := max(windows)) < RECOVERED * calm:  # a connection may still be cut by chance, and a host lost
            if len(windows) == CALM_WINDOWS:
                raise Broken(f"{after:.2f} groups/s after the faults, {calm:.2f} before them")
            windows.append(groups_per_s(pipeline, checks, CALM_S))
        left = pipeline.finish()
        checks.run(pipeline.trainer.groups)
        if left:
            raise Broken(f"left behind: {json.dumps(left, default=str)[:2000]}")
        return {
            "faults": dict(chaos.happened),
            "groups": len(pipeline.trainer.groups),
            "rollouts": dict(checks.outcomes),
            "starts": {program.name: program.starts for program in pipeline.programs},
            "groups_per_s": {"before": round(calm, 2), "after": round(after, 2)},
            "slowest": {"s": round(slowest[0], 1), "after": slowest[1]},
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults happen (default 600)")
    parser.add_argument("--seed", type=int, default=None, help="which faults, when (default: drawn, and printed)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    args = parser.parse_args()
    seed = random.randrange(1 << 31) if args.seed is None else args.seed
    folder = Path(tempfile.mkdtemp(prefix="hermes-chaos-"))
    print(f"seed {seed}, {args.seconds:g} s of faults, in {folder}", flush=True)
    try:
        print(json.dumps(play(folder, args.seconds, seed), indent=2))
    except Broken as error:
        print(f"BROKEN: {error}\nagain: make chaos SEED={seed} CHAOS_SECONDS={args.seconds:g}; logs in {folder}")
        return 1
    if not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
