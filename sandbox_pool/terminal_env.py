"""hermes-agent's TERMINAL_* variables, turned into a `PoolConfig`.

Variables for what this pool always does (persistent shells, reuse of containers) are accepted and have no effect.
`IGNORED` lists them, so that a misspelt name can be told from one of these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandbox_pool.config import PoolConfig
from sandbox_pool.errors import did_you_mean

log = logging.getLogger(__name__)

PROVIDERS = {
    "local": "local",
    "docker": "docker",
    "podman": "podman",
    "singularity": "apptainer",
    "apptainer": "apptainer",
    "ssh": "ssh",
    "nomad": "nomad",
    "modal": "modal",
}
"""TERMINAL_ENV -> provider."""

Convert = Callable[[str], Any]

POOL_FIELDS: dict[str, tuple[str, Convert]] = {
    "TERMINAL_TIMEOUT": ("exec_timeout_s", float),
    "TERMINAL_LIFETIME_SECONDS": ("idle_s", float),
    "TERMINAL_SCRATCH_DIR": ("scratch_dir", Path),
    "TERMINAL_SANDBOX_DIR": ("scratch_dir", Path),
    "TERMINAL_MIN_ISOLATION": ("min_isolation", str),
}
SPEC_FIELDS: dict[str, tuple[str, Convert]] = {
    "TERMINAL_CONTAINER_CPU": ("cpu", float),
    "TERMINAL_CONTAINER_MEMORY": ("memory_mb", int),
    "TERMINAL_CONTAINER_DISK": ("disk_mb", int),
}
SIZE_FIELDS: dict[str, tuple[str, Convert]] = {
    "SLOTS": ("slots_per_host", int),
    "MIN": ("min_hosts", int),
    "MAX": ("max_hosts", int),
}
"""Suffixes of TERMINAL_NOMAD_ and TERMINAL_MODAL_."""
IMAGE_VARIABLES = {
    "docker": "TERMINAL_DOCKER_IMAGE",
    "podman": "TERMINAL_DOCKER_IMAGE",
    "apptainer": "TERMINAL_SINGULARITY_IMAGE",
    "nomad": "TERMINAL_NOMAD_IMAGE",
    "modal": "TERMINAL_MODAL_IMAGE",
}
OPTION_PREFIXES = {"nomad": "TERMINAL_NOMAD_", "modal": "TERMINAL_MODAL_", "ssh": "TERMINAL_SSH_"}
"""Any other variable with such a prefix is an option of that provider, by its lower-case name."""
IGNORED = frozenset(
    {
        "TERMINAL_BACKEND",
        "TERMINAL_SLOT_BACKEND",
        "TERMINAL_CONTAINER_PERSISTENT",
        "TERMINAL_PERSISTENT_SHELL",
        "TERMINAL_SSH_PERSISTENT",
        "TERMINAL_LOCAL_PERSISTENT",
        "TERMINAL_MODAL_MODE",
        "TERMINAL_DOCKER_FORWARD_ENV",
        "TERMINAL_DOCKER_VOLUMES",
        "TERMINAL_DOCKER_MOUNT_CWD_TO_WORKSPACE",
        "TERMINAL_DAYTONA_IMAGE",
        "TERMINAL_NOMAD_AUTOSTART",
    }
)
KNOWN = frozenset(
    {"TERMINAL_ENV", "TERMINAL_CWD", *POOL_FIELDS, *SPEC_FIELDS, *IMAGE_VARIABLES.values(), *IGNORED}
    | {OPTION_PREFIXES[p] + suffix for p in ("nomad", "modal") for suffix in SIZE_FIELDS}
)


def config_from_env(environ: Mapping[str, str]) -> PoolConfig:
    """Build the config; a value that does not parse or a backend that does not exist raises `ValueError`."""
    variables = {name: value for name, value in environ.items() if name.startswith("TERMINAL_") and value != ""}
    provider = _provider(variables)
    _warn_unknown(variables)
    fields: dict[str, Any] = {"provider": provider, **_collect(variables, POOL_FIELDS)}
    prefix = OPTION_PREFIXES.get(provider)
    if prefix and provider != "ssh":
        fields |= _collect(variables, {prefix + suffix: target for suffix, target in SIZE_FIELDS.items()})
    if "max_hosts" not in fields and "min_hosts" in fields:
        fields["max_hosts"] = max(4, fields["min_hosts"])
    if prefix:
        fields["provider_options"] = {
            name.removeprefix(prefix).lower(): value
            for name, value in variables.items()
            if name.startswith(prefix) and name not in KNOWN
        }
    fields["spec"] = _spec(variables, provider)
    return PoolConfig(**fields)


def _provider(variables: Mapping[str, str]) -> str:
    name = variables.get("TERMINAL_ENV", "local").lower()
    if name == "slot_pool":
        name = variables.get("TERMINAL_SLOT_BACKEND", "modal").lower()
    if name not in PROVIDERS:
        raise ValueError(f"TERMINAL_ENV={name!r} is not a backend of this pool; there are: {', '.join(PROVIDERS)}")
    return PROVIDERS[name]


def _spec(variables: Mapping[str, str], provider: str) -> dict[str, Any]:
    spec = _collect(variables, SPEC_FIELDS)
    image = variables.get(IMAGE_VARIABLES.get(provider, ""))
    if image:
        spec["image"] = image
    cwd = variables.get("TERMINAL_CWD", "")
    if cwd.startswith("/"):
        spec["workdir"] = cwd
    elif cwd:
        log.warning("TERMINAL_CWD=%r is a path of this machine's shell, not of a slot: ignored", cwd)
    # hermes-agent gives commands the network; scripts written for it (pip install, git clone) need it.
    spec["network"] = "host"
    return spec


def _collect(variables: Mapping[str, str], table: Mapping[str, tuple[str, Convert]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (field, convert) in table.items():
        if name not in variables:
            continue
        try:
            found[field] = convert(variables[name])
        except ValueError as error:
            raise ValueError(f"{name}={variables[name]!r} is not a valid {convert.__name__}") from error
    return found


def _warn_unknown(variables: Mapping[str, str]) -> None:
    prefixes = tuple(OPTION_PREFIXES.values())
    for name in sorted(set(variables) - KNOWN):
        if name.startswith(prefixes):
            continue
        log.warning("%s is not a variable this pool knows; %s", name, did_you_mean(name, KNOWN))
