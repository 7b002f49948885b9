"""Places where slot servers can run besides this machine. Tokens are looked for, never shown."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from urllib.parse import urlsplit

from environments.apps.doctor.endpoint import http_status
from environments.apps.doctor.findings import Finding, ask

_NOMAD_DEFAULT = "http://127.0.0.1:4646"
_TRY_MODAL = "hermes-rl pool check --provider modal"


async def nomad() -> Finding:
    """Is there a Nomad agent at NOMAD_ADDR?"""
    address = os.environ.get("NOMAD_ADDR", _NOMAD_DEFAULT)
    shown = urlsplit(address)._replace(netloc=urlsplit(address).netloc.rpartition("@")[2]).geturl()
    token = "token set" if os.environ.get("NOMAD_TOKEN") else "no token"
    status = await http_status(f"{address.rstrip('/')}/v1/status/leader")
    if status is None:
        return Finding("nomad", "missing", f"{shown} does not answer", "set NOMAD_ADDR, or start `nomad agent -dev`")
    if status != 200:
        return Finding(
            "nomad", "limited", f"{shown} answers HTTP {status}, {token}", "check NOMAD_TOKEN and the agent's log"
        )
    return Finding("nomad", "ok", f"{shown}, {token}")


async def modal() -> Finding:
    """Is the Modal SDK installed, and does it have a token?"""
    if importlib.util.find_spec("modal") is None:
        return Finding("modal", "missing", "SDK not installed", "pip install 'hermes-rl[modal]'")
    version = importlib.metadata.version("modal")
    if _has_modal_token():
        return Finding("modal", "ok", f"SDK {version}, token found; try it: {_TRY_MODAL}")
    return Finding("modal", "missing", f"SDK {version}, no token", f"modal token new, then {_TRY_MODAL}")


def _has_modal_token() -> bool:
    config = Path(os.environ.get("MODAL_CONFIG_PATH", "~/.modal.toml")).expanduser()
    return bool(os.environ.get("MODAL_TOKEN_ID")) or config.is_file()


async def docker() -> Finding:
    """Docker's client and a running engine."""
    answer = await ask("docker", "info", "--format", "{{.ServerVersion}}")
    if answer is None:
        return Finding("docker", "missing", "not installed, or no answer in time", "install Docker Engine")
    code, line = answer
    if code:
        return Finding("docker", "missing", "client installed, no engine answers", "start dockerd")
    return Finding("docker", "ok", f"engine {line}")


async def podman() -> Finding:
    """Podman needs no daemon."""
    return _by_version("podman", await ask("podman", "--version"), "apt-get install podman")


async def apptainer() -> Finding:
    """Apptainer, or Singularity under its old name."""
    answer = await ask("apptainer", "--version") or await ask("singularity", "--version")
    return _by_version("apptainer", answer, "install Apptainer from its makers' packages")


async def ssh() -> Finding:
    """The ssh client starts slot servers on other machines."""
    return _by_version("ssh", await ask("ssh", "-V"), "apt-get install openssh-client")


def _by_version(subject: str, answer: tuple[int, str] | None, fix: str) -> Finding:
    if answer is None:
        return Finding(subject, "missing", "not installed", fix)
    code, line = answer
    return Finding(subject, "limited" if code else "ok", line or f"exit code {code}")
