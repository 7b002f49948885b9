"""Runs all examinations at once; one that fails is a finding itself, never a crash of the doctor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from environments.apps.doctor import machine as host
from environments.apps.doctor import places as backends
from environments.apps.doctor.endpoint import endpoints
from environments.apps.doctor.findings import Finding
from environments.apps.doctor.machine import isolation

EXAMINATIONS: tuple[Callable[[], Awaitable[Finding]], ...] = (
    host.python,
    host.compiler,
    isolation,
    host.cgroups,
    backends.nomad,
    backends.modal,
    backends.docker,
    backends.podman,
    backends.apptainer,
    backends.ssh,
)


async def examine(settings: Mapping[str, Any] | None = None) -> list[Finding]:
    """All findings in the order above; with settings, also the endpoints and tokenizers they name."""
    findings = await asyncio.gather(*(_safely(examination) for examination in EXAMINATIONS))
    return [*findings, *(await endpoints(settings) if settings else [])]


async def _safely(examination: Callable[[], Awaitable[Finding]]) -> Finding:
    subject = getattr(examination, "__name__", "?")
    try:
        return await examination()
    except Exception as error:  # noqa: BLE001  a doctor that dies of one strange machine helps nobody: the fault is reported
        return Finding(subject, "broken", f"could not be examined: {type(error).__name__}: {error}")
