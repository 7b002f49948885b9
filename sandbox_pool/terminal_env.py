"""hermes-agent's TERMINAL_* variables, read as settings of a pool: each with the variable it comes from.

A provider's own variables (TERMINAL_NOMAD_ADDRESS, TERMINAL_DOCKER_IMAGE) count only when that provider is used, as in
hermes-agent: people keep those of several backends in one `.env`. Variables for what every pool does (persistent
shells, reuse of containers) pass in silence; those that ask for what slots do not do are named in a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "sandbox": "nomad",
    "modal": "modal",
    "daytona": "daytona",
}
"""TERMINAL_ENV -> provider."""
FieldPath = tuple[str, ...]
Convert = Callable[[str], Any]
Target = tuple[FieldPath, Convert]


@dataclass(frozen=True)
class Taken:
    """One setting of a `PoolConfig` that a variable gives."""

    variable: str
    path: FieldPath
    value: Any


def _whole(text: str) -> int:
    return int(float(text))


def _yes(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError


def _home_path(text: str) -> Path:
    return Path(text).expanduser()


def _image(text: str) -> str:
    return str(_home_path(text)) if text.startswith("~") else text


def _driver(text: str) -> str:
    return PROVIDERS.get(text.lower(), text)


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _variables(text: str) -> dict[str, str]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError
    return {str(name): str(value) for name, value in found.items()}


KINDS: dict[Convert, str] = {
    float: "a number",
    int: "a whole number",
    _whole: "a number",
    _yes: "true or false",
    _variables: "a JSON object of names and values",
}


def _option(name: str, convert: Convert = str) -> Target:
    return ("provider_options", name), convert


IMAGE: Target = (("spec", "image"), _image)
SIZES: dict[str, Target] = {
    "SLOTS": (("slots_per_host",), int),
    "MIN": (("min_hosts",), int),
    "MAX": (("max_hosts",), int),
}
COMMON: dict[str, Target] = {
    "TERMINAL_TIMEOUT": (("exec_timeout_s",), float),
    "TERMINAL_LIFETIME_SECONDS": (("idle_s",), float),
    "TERMINAL_SCRATCH_DIR": (("scratch_dir",), _home_path),
    "TERMINAL_SANDBOX_DIR": (("scratch_dir",), _home_path),
    "TERMINAL_MIN_ISOLATION": (("min_isolation",), str),
    "TERMINAL_CONTAINER_CPU": (("spec", "cpu"), float),
    "TERMINAL_CONTAINER_MEMORY": (("spec", "memory_mb"), _whole),
    "TERMINAL_CONTAINER_DISK": (("spec", "disk_mb"), _whole),
}
DOCKER: dict[str, Target] = {"DOCKER_IMAGE": IMAGE, "DOCKER_ENV": (("spec", "env"), _variables)}
OF_PROVIDER: dict[str, dict[str, Target]] = {
    "docker": DOCKER,
    "podman": {**DOCKER, "PODMAN_IMAGE": IMAGE},
    # What hosts run in: an ordinary user cannot have the whole root of one in a slot.
    "apptainer": {"SINGULARITY_IMAGE": _option("image", _image), "APPTAINER_IMAGE": _option("image", _image)},
    "daytona": {"DAYTONA_IMAGE": IMAGE},
    "ssh": {"SSH_KEY": _option("identity_file", _home_path), "SSH_TIMEOUT": _option("connect_timeout_s", float)},
    "nomad": {
        **{f"NOMAD_{suffix}": target for suffix, target in SIZES.items()},
        "NOMAD_IMAGE": _option("image"),
        "NOMAD_ADDRESS": _option("address"),
        "NOMAD_AUTOSTART": _option("autostart", _yes),
        "NOMAD_TOKEN": _option("token"),
        "NOMAD_NAMESPACE": _option("namespace"),
        "NOMAD_REGION": _option("region"),
        "NOMAD_DRIVER": _option("driver", _driver),
        "NOMAD_JOB_ID": _option("job_prefix"),
        "NOMAD_DATACENTER": _option("datacenters", _texts),
        "NOMAD_CPU": _option("cpu_mhz", _whole),
        "NOMAD_MEMORY": _option("memory_mb", _whole),
        "NOMAD_PRIVILEGED": _option("privileged", _yes),
        "NOMAD_ACQUIRE_TIMEOUT": (("acquire_timeout_s",), float),
    },
    "modal": {
        **{f"MODAL_{suffix}": target for suffix, target in SIZES.items()},
        "MODAL_IMAGE": IMAGE,
        "MODAL_APP_NAME": _option("app"),
        "MODAL_ENVIRONMENT": _option("environment"),
        "MODAL_GPU": _option("gpu"),
        "MODAL_CPU": _option("cpu", float),
        "MODAL_MEMORY": _option("memory_mb", _whole),
        "MODAL_IDLE_TIMEOUT": _option("idle_timeout_s", _whole),
        "MODAL_MAX_LIFETIME": _option("timeout_s", _whole),
        "MODAL_SECRETS": _option("secrets", _texts),
        "MODAL_ENV_VARS": (("spec", "env"), _variables),
        "MODAL_ACQUIRE_TIMEOUT": (("acquire_timeout_s",), float),
        "MODAL_EXEC_TIMEOUT": (("exec_timeout_s",), float),
    },
}
"""Provider -> what follows TERMINAL_ in its variables -> the setting."""
OWN_READERS = frozenset(
    {"TERMINAL_ENV", "TERMINAL_SLOT_BACKEND", "TERMINAL_CWD"}
    | {f"TERMINAL_SSH_{part}" for part in ("HOST", "USER", "PORT")}
)
SILENT = frozenset(
    {
        "TERMINAL_BACKEND",
        "TERMINAL_CONTAINER_PERSISTENT",
        "TERMINAL_PERSISTENT_SHELL",
        "TERMINAL_SSH_PERSISTENT",
        "TERMINAL_LOCAL_PERSISTENT",
        "TERMINAL_MODAL_MODE",
        "TERMINAL_MODAL_WORKSPACE",
        "TERMINAL_DOCKER_PERSIST_ACROSS_PROCESSES",
        "TERMINAL_DOCKER_RUN_AS_HOST_USER",
        "TERMINAL_DOCKER_ORPHAN_REAPER",
    }
)
PORT = "every host listens on a port that Nomad gives it"
NOT_USED = {
    "TERMINAL_NOMAD_PORT": PORT,
    "TERMINAL_NOMAD_RAW_EXEC_PORT": PORT,
    "TERMINAL_NOMAD_SINGULARITY_PORT": PORT,
    "TERMINAL_DOCKER_VOLUMES": "name the folders in env.sandbox.mounts",
    "TERMINAL_DOCKER_FORWARD_ENV": "name what commands may see in env.sandbox.env",
    "TERMINAL_DOCKER_EXTRA_ARGS": "name them in env.pool.provider_options",
    "TERMINAL_DOCKER_MOUNT_CWD_TO_WORKSPACE": "name the folder in env.sandbox.mounts",
    "TERMINAL_MODAL_PROFILES": "name one image in TERMINAL_MODAL_IMAGE, or one per task in its spec",
    "TERMINAL_SUDO": "commands of a slot run as its root",
}
NOMAD_SIF = {f"TERMINAL_NOMAD_{name}_IMAGE": _option("image", _image) for name in ("SINGULARITY", "APPTAINER")}
"""Instead of TERMINAL_NOMAD_IMAGE where the driver is singularity."""
KNOWN = (
    OWN_READERS
    | SILENT
    | {*COMMON, *NOT_USED, *NOMAD_SIF}
    | {f"TERMINAL_{name}" for table in OF_PROVIDER.values() for name in table}
)
OFF = frozenset({"0", "false", "no", "off", "[]", "{}"})
OF_MACHINE = ("/home/", "/Users/", "~", ".")
"""How paths begin that hermes-agent, too, takes for folders of the machine it runs on."""


def terminal_settings(environ: Mapping[str, str], provider: str | None = None) -> list[Taken]:
    """What the variables set, for the provider that is used anyway or else for the one they name.

    ValueError names a variable whose value cannot be read, and a backend that does not exist.
    """
    variables = {
        name: value.strip() for name, value in environ.items() if name.startswith("TERMINAL_") and value.strip()
    }
    named = _provider(variables)
    _warn(variables)
    used = provider or named or "local"
    table = COMMON | {f"TERMINAL_{name}": target for name, target in OF_PROVIDER.get(used, {}).items()}
    if used == "nomad" and _driver(variables.get("TERMINAL_NOMAD_DRIVER", "")) == "apptainer":
        table |= NOMAD_SIF
        if NOMAD_SIF.keys() & variables.keys():
            del table["TERMINAL_NOMAD_IMAGE"]
    taken = [Taken("TERMINAL_ENV", ("provider",), named)] if named and provider is None else []
    # As in hermes-agent, whose tasks install packages and clone repositories. Not here: that would show them this
    # machine's own services.
    taken += [Taken("TERMINAL_ENV", ("spec", "network"), "host")] if named == used != "local" else []
    taken += [
        Taken(name, path, _read(name, variables[name], convert))
        for name, (path, convert) in table.items()
        if name in variables
    ]
    taken += _workdir(variables, used)
    taken += _completed(variables, used, {item.path: item.value for item in taken})
    once = {item.path: item for item in reversed(taken)}
    return [item for item in taken if once[item.path] is item]


def pool_fields(taken: list[Taken]) -> dict[str, Any]:
    """The settings as nested fields of a `PoolConfig`."""
    fields: dict[str, Any] = {}
    for item in taken:
        *parents, last = item.path
        section = fields
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = item.value
    return fields


def _provider(variables: Mapping[str, str]) -> str | None:
    name = variables.get("TERMINAL_ENV", "").lower()
    if name == "slot_pool":
        name = variables.get("TERMINAL_SLOT_BACKEND", "modal").lower()
    if name and name not in PROVIDERS:
        raise ValueError(f"TERMINAL_ENV={name!r} is not a backend of this pool; there are: {', '.join(PROVIDERS)}")
    return PROVIDERS[name] if name else None


def _read(name: str, text: str, convert: Convert) -> Any:
    try:
        return convert(text)
    except ValueError as error:
        shown = "its value" if convert is _variables else repr(text)
        raise ValueError(f"{name}: {shown} is not {KINDS.get(convert, 'valid')}") from error


def _workdir(variables: Mapping[str, str], provider: str) -> Iterator[Taken]:
    cwd = variables.get("TERMINAL_CWD")
    if cwd is None:
        return
    if not cwd.startswith("/") or cwd == "/" or (provider != "ssh" and cwd.startswith(OF_MACHINE)):
        log.warning("TERMINAL_CWD=%s is a folder of this machine, not of a slot: not used", cwd)
        return
    yield Taken("TERMINAL_CWD", ("spec", "workdir"), cwd)


def _completed(variables: Mapping[str, str], provider: str, found: Mapping[FieldPath, Any]) -> Iterator[Taken]:
    """Settings that hermes-agent implies, or makes of several variables."""
    if provider == "ssh" and (host := variables.get("TERMINAL_SSH_HOST")):
        user, port = variables.get("TERMINAL_SSH_USER"), variables.get("TERMINAL_SSH_PORT")
        machine = f"{user}@{host}" if user else host
        machine = f"ssh://{machine}:{_read('TERMINAL_SSH_PORT', port, int)}" if port else machine
        yield Taken("TERMINAL_SSH_HOST", ("provider_options", "machines"), [machine])
        yield Taken("TERMINAL_SSH_HOST", ("provider_options", "check_host_keys"), "accept-new")
    if provider == "nomad" and "TERMINAL_NOMAD_IMAGE" in variables and ("provider_options", "driver") not in found:
        yield Taken("TERMINAL_NOMAD_IMAGE", ("provider_options", "driver"), "docker")
    if provider in ("docker", "podman") and IMAGE[0] in found:  # without it the image would be refused
        yield Taken("TERMINAL_DOCKER_IMAGE", ("provider_options", "cap_add"), ["SYS_ADMIN"])
    if (lifetime := found.get(("provider_options", "timeout_s"))) is not None:
        yield Taken("TERMINAL_MODAL_MAX_LIFETIME", ("provider_options", "drain_s"), min(1800.0, lifetime / 4))
    least = found.get(("min_hosts",))
    if least is not None and ("max_hosts",) not in found:
        yield Taken(f"TERMINAL_{provider.upper()}_MIN", ("max_hosts",), max(4, least))


def _warn(variables: Mapping[str, str]) -> None:
    for name in sorted(variables):
        if name not in KNOWN:
            log.warning("%s is not a variable that is read here; %s", name, did_you_mean(name, KNOWN))
        elif name in NOT_USED and variables[name].lower() not in OFF:
            log.warning("%s has no effect: %s", name, NOT_USED[name])
