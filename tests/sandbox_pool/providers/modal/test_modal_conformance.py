"""The same promises as on this machine, kept by slots in sandboxes of an emulated Modal, through the unmodified SDK."""

import pytest

from sandbox_pool import SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context

ONCE = ("hundred_megabytes", "many_small_files", "says_that_it_is_alive")
"""Slow checks of code that no place changes; run by tests/conformance."""
LIMITS = ("memory", "pids", "cpu")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path", [{}, pytest.param({"block_network": True}, marks=pytest.mark.ci)], ids=["tunnel", "exec"]
)
async def test_every_promise_is_kept_but_for_limits_that_need_cgroups(make_config, path):
    checks = [check for check in all_checks() if not any(slow in check.id for slow in ONCE)]
    async with SlotPool.from_config(make_config(path, slots_per_host=16)) as pool:
        context = await make_context(pool)
        results = [result async for result in run_checks(checks, context)]
        context.close()
    assert (context.info.isolation, context.info.variant) == ("namespaces", "nouser")
    assert set(context.info.missing) == set(LIMITS)
    assert {each.id: each.detail for each in results if each.verdict == "failed"} == {}
    excepted = [each for each in results if each.verdict == "not promised"]
    elsewhere = [each for each in excepted if "runs elsewhere" in each.detail]
    no_limit = [each for each in excepted if any(f"no {limit} limit" in each.detail for limit in LIMITS)]
    assert len(excepted) == len(elsewhere) + len(no_limit)
    assert {each.id.partition(".")[0] for each in no_limit} == {"limits"}
