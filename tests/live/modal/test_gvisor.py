"""Slots in sandboxes that have Modal's own kernel: gVisor, under the emulator, through the unmodified SDK.

Prepared by tests/live/containers/prepare.sh; then `pytest -m slow tests/live/modal`.
"""

import pytest

from sandbox_pool import SandboxSpec, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context
from support.modal_place import emulated_modal, modal_config, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SLOW = ("hundred_megabytes", "many_small_files", "says_that_it_is_alive")
"""Checks of code that no place changes."""
LACKING = {"memory", "pids", "cpu", "tty"}
"""gVisor has no cgroups, and no controlling terminal in a new session."""
AT_ONCE = 2


@pytest.mark.parametrize(("path", "image"), [("tunnel", None), ("exec", None), ("tunnel", "debian:12")])
async def test_every_promise_of_the_namespaces_level_is_kept_but_for_what_gvisor_lacks(tmp_path, path, image):
    checks = [check for check in all_checks() if not any(slow in check.id for slow in SLOW)]
    async with emulated_modal(runtime="gvisor") as modal:
        config = modal_config(tmp_path, {"data_path": path}, slots_per_host=12, spec=SandboxSpec(image=image))
        async with SlotPool.from_config(config) as pool:
            context = await make_context(pool)
            results = [result async for result in run_checks(checks, context, AT_ONCE)]
            context.close()
        await nothing_left(modal)
    assert (context.info.isolation, context.info.variant) == ("namespaces", "nouser")
    assert set(context.info.missing) == LACKING
    assert {each.id: each.detail for each in results if each.verdict == "failed"} == {}
    excepted = [each.detail for each in results if each.verdict == "not promised"]
    named = ("runs elsewhere", "slots have an image", *(f"no {limit} " for limit in LACKING))
    assert [detail for detail in excepted if not any(reason in detail for reason in named)] == []
