"""Hosts x slots x rollouts on paper: how many rollouts a second, and which part is full first.

    python tests/benchmarks/simulate_scale.py                     the table of docs/scale.md
    python tests/benchmarks/simulate_scale.py --hosts 100 --slots 100 --workers 8 --tokens 1000
    python tests/benchmarks/simulate_scale.py --check             what can be run here, beside what the model says of it

Every part is a queue with as many servers as it has cores, every rollout goes through the parts as a real one does, and
what each step takes was measured (`Costs`). The model server is a delay: how many GPUs there are is not our question.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent_loop import own_process
from benchmarks.client_scale import measure as measure_leases
from environments.apps.bench.bench_loop import bench_server, play_all, play_rollout
from sandbox_pool import PoolConfig, SlotPool
from support.pool_fake_host import FakePlace


@dataclass(frozen=True)
class Costs:
    """Seconds of CPU of each step, but where said otherwise; docs/scale.md names the command behind each."""

    turn: float = 0.9e-3
    """Client: one turn, over HTTP."""
    lease: float = 0.14e-3
    """The process that has the pool: one lease, taken and given back."""
    lent: float = 0.5e-3
    """The same process, when a worker asks for it."""
    sent_token: float = 0.02 / 256_000
    """The process that sends groups: one token of a sequence, checked and encoded."""
    command: float = 1.2e-3
    """Host: one command that does nothing."""
    slot: float = 6e-3
    """Host: one lease's whole cycle."""
    token: float = 1 / 175_000
    """run-api: one token of a sequence, taken and handed to the trainer."""
    start: float = 2.0
    """Elapsed seconds until a host serves."""
    start_interval: float = 0.0
    """Elapsed seconds between two creates."""


PLACES = {
    "local": Costs(start=0.5),
    "ssh": Costs(start=3.0),
    "nomad": Costs(start=4.0, start_interval=0.05),
    "modal": Costs(start=8.0, start_interval=0.2),
}
"""What differs is how hosts come: a rollout costs the same everywhere."""


@dataclass(frozen=True)
class Shape:
    """What runs."""

    hosts: int = 4
    slots: int = 32
    """Of each host."""
    cores: int = 8
    """Of each host."""
    workers: int = 1
    rollouts: int = 512
    """At once."""
    turns: int = 8
    tokens: int = 16_000
    """Of a sequence, at its end."""
    latency_s: float = 1.0
    """Of the model, each turn."""
    work_s: float = 0.0
    """CPU of a command of the agent itself."""


class Clock:
    """Runs what was planned, in the order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (self.now + seconds, next(self._order), then))

    def run(self, over: Callable[[], bool]) -> None:
        while self._planned and not over():
            self.now, _, then = heapq.heappop(self._planned)
            then()


@dataclass
class Part:
    """A queue with some servers: event loops, cores, or slots."""

    clock: Clock
    servers: int
    used_s: float = 0.0
    _free: int = field(init=False)
    _line: deque[Callable[[], None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._free = self.servers

    def take(self, then: Callable[[], None]) -> None:
        if self._free:
            self._free -= 1
            then()
        else:
            self._line.append(then)

    def give(self) -> None:
        if self._line:
            self._line.popleft()()
        else:
            self._free += 1

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        def begin() -> None:
            self.used_s += seconds
            self.clock.after(seconds, end)

        def end() -> None:
            self.give()
            then()

        self.take(begin)


@dataclass(frozen=True)
class Outcome:
    """What a shape gives when it has settled."""

    rollouts_per_s: float
    busy: dict[str, float]
    """Share of each part that is used."""

    @property
    def full(self) -> str:
        """The part with least room."""
        return max(self.busy, key=lambda name: self.busy[name])


Step = tuple[str, float]
"""Which part, and for how long; `model` is a delay."""


def steps(shape: Shape, costs: Costs) -> Iterator[Step]:
    """One rollout: agent, verifier, delivery. `slot` and `free` are a lease's begin and end."""
    lease = costs.lease + (costs.lent if shape.workers > 1 else 0.0)
    for commands in (shape.turns, 3):
        yield "pool", lease
        yield "slot", 0.0
        yield "host", costs.slot
        for _ in range(commands):
            if commands == shape.turns:
                yield "model", shape.latency_s
                yield "client", costs.turn
            yield "host", costs.command + (shape.work_s if commands == shape.turns else 0.0)
        yield "free", 0.0
    yield "client", shape.tokens * costs.sent_token
    yield "run-api", shape.tokens * costs.token


def simulate(shape: Shape, costs: Costs, rollouts: int = 4000, seed: int = 0) -> Outcome:
    """Run so many rollouts; the first quarter fills the queues and does not count."""
    clock, dice = Clock(), random.Random(seed)
    loops = [Part(clock, 1) for _ in range(shape.workers)]
    pool = loops[0] if shape.workers == 1 else Part(clock, 1)
    hosts = [Part(clock, shape.cores) for _ in range(shape.hosts)]
    slots, api = Part(clock, shape.hosts * shape.slots), Part(clock, 1)
    ended, settled = 0, (0.0, 0, {})  # type: tuple[float, int, dict[str, float]]

    def used() -> dict[str, float]:
        parts = {"client": loops, "hosts": hosts, "run-api": [api], "pool": [pool]}
        if pool is loops[0]:
            del parts["pool"]
        return {name: sum(p.used_s for p in of) / sum(p.servers for p in of) for name, of in parts.items()}

    def play(number: int) -> None:
        nonlocal ended, settled
        loop, host = loops[number % len(loops)], dice.choice(hosts)
        todo = steps(shape, costs)

        def go() -> None:
            nonlocal ended, settled
            step = next(todo, None)
            if step is None:
                ended += 1
                if ended == rollouts // 4:
                    settled = clock.now, ended, used()
                play(ended)
                return
            name, seconds = step
            match name:
                case "model":
                    clock.after(seconds * dice.uniform(0.5, 1.5), go)
                case "slot":
                    slots.take(go)
                case "free":
                    slots.give()
                    go()
                case _:
                    {"client": loop, "pool": pool, "host": host, "run-api": api}[name].work(seconds, go)

        go()

    for number in range(shape.rollouts):
        play(number)
    clock.run(lambda: ended >= rollouts)
    since, before, used_before = settled
    elapsed_s = clock.now - since
    busy = {name: (value - used_before[name]) / elapsed_s for name, value in used().items()}
    rate = (ended - before) / elapsed_s
    held = shape.turns * shape.latency_s + 2 * costs.slot + (shape.turns + 3) * costs.command
    busy["slots"] = min(1.0, rate * held / slots.servers)
    return Outcome(rate, busy)


def ready_after_s(hosts: int, costs: Costs, at_once: int) -> float:
    """Elapsed seconds until all hosts serve, `at_once` of them starting at a time."""
    return max(hosts * costs.start_interval, -(-hosts // at_once) * costs.start)


def table() -> None:
    """The shapes of docs/scale.md."""
    print("hosts slots workers at_once tokens  rollouts/s  full            of the next part")
    for hosts, workers, tokens in itertools.product((1, 4, 16, 100), (1, 4), (1_000, 16_000)):
        shape = Shape(hosts=hosts, workers=workers, tokens=tokens, rollouts=min(hosts * 32, 4096))
        show(shape, PLACES["local"])
    print("\nplace   seconds until 100 hosts serve, 16 starting at once")
    for place, costs in PLACES.items():
        print(f"{place:<8}{ready_after_s(100, costs, 16):.0f}")


def show(shape: Shape, costs: Costs) -> None:
    """One line."""
    found = simulate(shape, costs, rollouts=max(2000, 4 * shape.rollouts))
    (first, share), (second, other) = sorted(found.busy.items(), key=lambda part: -part[1])[:2]
    print(
        f"{shape.hosts:>5} {shape.hosts * shape.slots:>5} {shape.workers:>7} {shape.rollouts:>7} {shape.tokens:>6}"
        f"  {found.rollouts_per_s:>10.1f}  {first:<8}{100 * share:>4.0f} %  {second} {100 * other:.0f} %"
    )


async def check(hosts: int, slots: int, at_once: int, turns: int, latency_s: float) -> None:
    """The real pool over stub servers and the real loop over a stub model, beside the model with the costs of today."""
    with tempfile.TemporaryDirectory() as folder:
        leases = await measure_leases(hosts, slots, 5000, Path(folder))
    async with bench_server("in-process", 0.0) as server:
        await play_all(server, 64, turns)  # fills caches
        costs = Costs(
            turn=min([(await play_all(server, 64, turns)).cpu_per_turn_ms for _ in range(3)]) / 1000,
            lease=leases["cpu_ms_per_lease"] / 1000,
            sent_token=0.0,
            command=0.0,
            slot=0.0,
            token=0.0,
        )
    print(f"costs of today: a turn {1000 * costs.turn:.2f} ms, a lease {1000 * costs.lease:.2f} ms of CPU")
    for rollouts in (at_once // 16, at_once // 4, at_once):
        shape = Shape(hosts, slots, 8, 1, rollouts, turns, 0, latency_s)
        said = simulate(shape, costs, rollouts=max(2000, 4 * rollouts))
        wall_s, cpu_s = await played(hosts, slots, rollouts, turns, latency_s)
        print(
            f"{rollouts:>5} at once, {hosts * slots} slots on {hosts} servers: {rollouts * WAVES / wall_s:.1f} a second,"
            f" {rollouts * WAVES / cpu_s:.0f} a second of CPU; the model says {said.rollouts_per_s:.1f} and"
            f" {said.rollouts_per_s / said.busy['client']:.0f}"
        )


WAVES = 3


async def played(hosts: int, slots: int, at_once: int, turns: int, latency_s: float) -> tuple[float, float]:
    """Elapsed seconds, and seconds of CPU, of so many rollouts at once, each followed by the next."""
    place = FakePlace(slots=slots)
    with tempfile.TemporaryDirectory() as folder:
        config = PoolConfig(
            slots_per_host=slots, min_hosts=hosts, max_hosts=hosts, max_starting=hosts, create_interval_s=0.0,
            state_dir=Path(folder), health_interval_s=60.0,
        )  # fmt: skip
        async with bench_server("in-process", latency_s) as server, SlotPool(config, place, place.connect) as pool:

            async def one(number: int) -> None:
                for wave in range(WAVES):
                    for part in (turns, 0):  # agent, verifier
                        async with pool.lease(f"{number}-{wave}-{part}"):
                            if part:
                                await play_rollout(server, turns)

            began, cpu = time.monotonic(), time.process_time()
            await asyncio.gather(*map(one, range(at_once)))
            return time.monotonic() - began, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run what can be run here")
    parser.add_argument("--place", choices=sorted(PLACES), default="local")
    sizes = {name: value for name, value in vars(Shape()).items() if isinstance(value, int | float)}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=None, help=f"({value})")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    if args.check:
        own_process.run(check(100, 100, given.get("rollouts", 1024), given.get("turns", 8), 0.5))
    elif given:
        show(replace(Shape(), **given), PLACES[args.place])
    else:
        table()


if __name__ == "__main__":
    main()
