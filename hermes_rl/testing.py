"""What tests of your environments and providers need: faults on demand, and recorded rollouts played back.

    from hermes_rl.testing import faulty_pool, replay

Names are imported when they are first used, as those of `hermes_rl` are.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agent_loop.records.tape import Divergence
    from environments.runs.replaying import Replayed, replay
    from sandbox_pool.faults.faulty_provider import Faults, FaultyProvider, Rates, faulty_pool
    from sandbox_pool.faults.machine_faults import full_disk, jumped_clock

__all__ = [
    "Divergence",
    "Faults",
    "FaultyProvider",
    "Rates",
    "Replayed",
    "faulty_pool",
    "full_disk",
    "jumped_clock",
    "replay",
]

_HOMES = {
    "Divergence": "agent_loop.records.tape",
    "Faults": "sandbox_pool.faults.faulty_provider",
    "FaultyProvider": "sandbox_pool.faults.faulty_provider",
    "Rates": "sandbox_pool.faults.faulty_provider",
    "Replayed": "environments.runs.replaying",
    "faulty_pool": "sandbox_pool.faults.faulty_provider",
    "full_disk": "sandbox_pool.faults.machine_faults",
    "jumped_clock": "sandbox_pool.faults.machine_faults",
    "replay": "environments.runs.replaying",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hermes_rl.testing' has no attribute {name!r}")
    from hermes_rl import _imported

    value = globals()[name] = _imported(home, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
