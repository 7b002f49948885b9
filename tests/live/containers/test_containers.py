"""The slot server inside real containers: which isolation it finds there, and that it keeps what that level promises.

All checks of `sandbox_pool/conformance` run in each container, but for those that look at the machine from outside.
Prepared by tests/live/containers/prepare.sh; then `pytest -m slow tests/live/containers`.
"""

import asyncio
import contextlib
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.client.host_client import HostInfo
from sandbox_pool.conformance import CheckResult, all_checks, run_checks
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.conformance.runner import GROUPS
from support.containers import Unavailable, docker_engine, gvisor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SLOW = ("hundred_megabytes", "many_small_files", "says_that_it_is_alive")
"""Checks of code that no place changes."""


NO_LIMITS = frozenset({"memory", "pids", "cpu"})
SYS_ADMIN = ("--cap-add", "SYS_ADMIN")


@dataclass(frozen=True)
class Place:
    """A kind of container, and the isolation that is found there."""

    engine: object
    isolation: str
    variant: str
    missing: frozenset[str]
    run: tuple[str, ...] = ()
    at_once: int = 4


PLACES = {
    "docker": Place(docker_engine, "landlock", "", frozenset({"memory", "cpu", "disk", "loopback"})),
    "docker-sys-admin": Place(docker_engine, "namespaces", "nouser", NO_LIMITS, run=SYS_ADMIN),
    "gvisor": Place(gvisor, "namespaces", "nouser", NO_LIMITS | {"tty"}, at_once=2),
}
CASES = [
    pytest.param(name, check, id=f"{name}-{check.id}")
    for name, place in PLACES.items()
    for check in all_checks()
    if check.group in GROUPS and not any(slow in check.id for slow in SLOW)
]


@dataclass
class Outcome:
    """What was seen in one container."""

    info: HostInfo | None = None
    results: dict[str, CheckResult] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    unavailable: str = ""


PROBES = {
    "secret": "cat /hermes/server.pyz /hermes/log 2>&1 | head -c 100; ls /var/hermes 2>&1",
    "semaphores": "python3 -c 'import multiprocessing as m; l = m.Lock(); l.acquire(); print(m.Queue, l)' 2>&1",
    "privileges": "unshare -Ur true; mount -t tmpfs x /mnt; grep -E 'NoNewPrivs|CapEff' /proc/self/status",
}


async def look_at(place: Place, options: dict[str, object], wanted: list[object]) -> Outcome:
    """Everything that is looked at in one container, in one life of its server."""
    folder = Path(tempfile.mkdtemp(prefix="hrl-c-"))
    config = PoolConfig(
        provider="support.containers:ContainerProvider",
        provider_options={**options, "folder": str(folder), "run": list(place.run)},
        slots_per_host=12,
        max_hosts=1,
        start_attempts=1,
        state_dir=folder / "state",
    )
    outcome = Outcome()
    try:
        async with SlotPool.from_config(config) as pool:
            async with pool.lease("probe") as box:
                outcome.info = box.host_info
                outcome.outputs = {name: (await box.exec(command)).output for name, command in PROBES.items()}
            context = CheckContext(pool, outcome.info, on_this_machine=False)
            results = [result async for result in run_checks(wanted, context, place.at_once)]
            outcome.results = {result.id: result for result in results}
            context.close()
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """One container per place, seen once."""
    selected = [item.callspec.params for item in request.session.items if item.module is request.module]
    found: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        engines: dict[object, dict[str, object] | str] = {}
        for name in dict.fromkeys(params["place"] for params in selected):
            place = PLACES[name]
            if place.engine not in engines:
                try:
                    engines[place.engine] = stack.enter_context(place.engine())
                except Unavailable as error:
                    engines[place.engine] = str(error)
            options = engines[place.engine]
            wanted = [params["check"] for params in selected if params["place"] == name and "check" in params]
            found[name] = (
                Outcome(unavailable=options)
                if isinstance(options, str)
                else asyncio.run(look_at(place, options, wanted))
            )
    return found


def seen_at(place: str, outcomes: dict[str, Outcome]) -> Outcome:
    """What was seen there; skips when there is no such container here."""
    if outcomes[place].unavailable:
        pytest.skip(outcomes[place].unavailable)
    return outcomes[place]


@pytest.mark.parametrize("place", PLACES)
def test_the_strongest_possible_level_is_found_and_said(place: str, outcomes: dict[str, Outcome]) -> None:
    info = seen_at(place, outcomes).info
    expected = PLACES[place]
    assert (info.isolation, info.variant, set(info.missing)) == (
        expected.isolation,
        expected.variant,
        set(expected.missing),
    ), info.isolation_reason
    assert all(reason for _, reason in info.rejected)


@pytest.mark.parametrize("place", PLACES)
def test_files_of_the_server_and_of_the_container_are_out_of_reach(place: str, outcomes: dict[str, Outcome]) -> None:
    output = seen_at(place, outcomes).outputs["secret"]
    assert "PK" not in output
    assert "layers" not in output
    assert "helper" not in output


@pytest.mark.parametrize("place", PLACES)
def test_semaphores_of_multiprocessing_work(place: str, outcomes: dict[str, Outcome]) -> None:
    assert "<Lock(owner=MainProcess)>" in seen_at(place, outcomes).outputs["semaphores"]


@pytest.mark.parametrize("place", PLACES)
def test_privileges_of_the_container_are_not_the_slots(place: str, outcomes: dict[str, Outcome]) -> None:
    output = seen_at(place, outcomes).outputs["privileges"]
    assert output.count("not permitted") + output.count("permission denied") + output.count("must be superuser") == 2
    effective = int(output.partition("CapEff:\t")[2].split()[0], 16)
    assert effective & (1 << 21 | 1 << 12 | 1 << 19) == 0, "SYS_ADMIN, NET_ADMIN or SYS_PTRACE is left"
    assert "NoNewPrivs:\t1" in output or place.startswith("gvisor")


@pytest.mark.parametrize(("place", "check"), CASES)
def test_promise(place: str, check: object, outcomes: dict[str, Outcome]) -> None:
    result = seen_at(place, outcomes).results[check.id]
    if result.verdict == "not promised":
        pytest.skip(f"not promised here: {result.detail}")
    assert result.verdict == "passed", f"{result.promise} {result.detail}"
