"""Every promise of a sandbox, at every isolation level this machine can produce.

The checks are shipped with the package (`sandbox_pool/conformance`); `hermes-rl pool check` runs the same ones against
any provider. One pool per level is shared by all its checks, which run a few at a time as they do in real use.
"""

import asyncio
import os
import pwd
import shutil
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import HostStartFailed, IsolationUnavailable, PoolConfig, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context

ORDINARY_USER = "nobody"
AS_USER = {"user": ORDINARY_USER, "python": "/usr/bin/python3"}
ONCE = ("hundred_megabytes", "many_small_files", "a_flood_does_not_fill_memory", "says_that_it_is_alive")
"""Slow checks of code that no level changes: run at the first level only."""
PLACES_AT_ONCE = 3
PLACES = {
    "root": {"level": "namespaces-root"},
    "rootless": {"level": "namespaces-rootless", **AS_USER},
    "no-user-namespace": {"level": "namespaces-nouser"},
    "landlock": {"level": "landlock"},
    "landlock-as-user": {"level": "landlock", **AS_USER},
    "uid": {"level": "uid"},
    "plain": {"level": "plain"},
}
RARE = ("no-user-namespace", "landlock-as-user", "uid")
"""Ways to a level that few machines take."""
if os.getuid() != 0:
    PLACES = {"user": {}, "landlock": {"level": "landlock"}, "plain": {"level": "plain"}}


def checks_at(place):
    """Checks that are run at this level."""
    if place == next(iter(PLACES)):
        return all_checks()
    return [check for check in all_checks() if not any(name in check.id for name in ONCE)]


async def run_all(place, checks):
    """Results of the checks at one level, by id; or why the level cannot be had here."""
    options = PLACES[place]
    if "user" in options and not any(entry.pw_name == options["user"] for entry in pwd.getpwall()):
        return f"there is no user {options['user']!r} here"
    folder = Path(tempfile.mkdtemp(prefix="hrl-"))
    os.chmod(folder, 0o711)  # noqa: PTH101 - servers of another user pass through
    config = PoolConfig(
        slots_per_host=16,
        max_hosts=1,
        start_attempts=1,
        state_dir=folder / "state",
        scratch_dir=folder / "scratch",
        provider_options=options,
    )
    try:
        async with SlotPool.from_config(config) as pool:
            context = await make_context(pool)
            results = {result.id: result async for result in run_checks(checks, context)}
            context.close()
            return results
    except (IsolationUnavailable, HostStartFailed) as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def outcomes(request):
    """Results by place: all checks that were selected, run before the first of them is looked at."""
    wanted = {}
    for item in request.session.items:
        if item.module is request.module and hasattr(item, "callspec"):
            wanted.setdefault(item.callspec.params["place"], []).append(item.callspec.params["check"])

    async def run_places():
        gate = asyncio.Semaphore(PLACES_AT_ONCE)

        async def run_place(place):
            async with gate:
                return place, await run_all(place, wanted[place])

        return dict(await asyncio.gather(*(run_place(place) for place in wanted)))

    return asyncio.run(run_places())


CASES = [
    pytest.param(place, check, id=f"{place}-{check.id}", marks=[pytest.mark.ci] if place in RARE else [])
    for place in PLACES
    for check in checks_at(place)
]


@pytest.mark.parametrize(("place", "check"), CASES)
@pytest.mark.timeout(300)
def test_promise(place, check, outcomes):
    results = outcomes[place]
    if isinstance(results, str):
        pytest.skip(f"this machine cannot isolate so: {results[:200]}")
    result = results[check.id]
    if result.verdict == "not promised":
        pytest.skip(f"not promised here: {result.detail}")
    assert result.verdict == "passed", f"{result.promise} {result.detail}"


def test_the_suite_states_enough_promises():
    checks = all_checks()
    assert len(checks) >= 80
    assert len({check.id for check in checks}) == len(checks)
    assert all(check.promise.endswith(".") and check.promise != check.name for check in checks)
