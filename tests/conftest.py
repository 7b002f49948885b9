"""What holds for every test."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Both judge the machine, not the code: beside ten busy programs any example can take a second to draw or to run.
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")

HERE = Path(__file__).parent
LONG = [
    HERE / name
    for name in (
        "conformance/test_conformance.py",
        "sandbox_pool/providers/modal/test_modal_traps.py",
        "sandbox_pool/providers/modal/test_modal_exec.py",
        "agent_loop/model/tokens/test_guard.py",
        "house/test_bad_input.py",
        "environments/apps/reference_trainer/test_learner.py",
        "attacks/test_other_users.py",
        "attacks/test_exhaustion.py",
        "agent_loop/tools/shell/test_terminal.py",
        "sandbox_pool/providers/nomad/test_nomad_hosts.py",
        "attacks/test_trees.py",
        "house/test_docs.py",
        "agent_loop/tools/script/test_execute_code.py",
        "attacks/test_verification.py",
        "attacks/test_untrainable.py",
    )
]
"""Each takes half a minute or more, and a file stays with one worker: begun last, it would keep the others waiting."""


@pytest.hookimpl(tryfirst=True)  # before markers choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE / "live"):
            item.add_marker(pytest.mark.ci)
    rank = {path: place for place, path in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
