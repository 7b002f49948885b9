"""What this machine can do for hermes-rl: one finding per subject, each with the fix where something is missing.

All checks run at once. One that crashes is reported as a finding. Tokens are looked for, never shown.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from environments.config.loader import masked
from sandbox_pool.errors import PlaceUnreachable

if TYPE_CHECKING:
    from sandbox_pool.client.host_client import HostInfo

Status = Literal["ok", "limited", "missing", "broken"]
"""`limited`: works at a lower level. `missing`: optional and not there. `broken`: the main job cannot run."""

ANSWER_WITHIN_S = 5.0
START_WITHIN_S = 30.0
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu")
_NOMAD_DEFAULT = "http://127.0.0.1:4646"
_RUN_API_DEFAULT = "http://127.0.0.1:8000"
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w.-]+)\])?[^;]*;.*extra == ['\"]([\w.-]+)['\"]")
TRY = "hermes-rl pool check --provider"
PLACES = ("nomad", "modal", "docker", "podman", "apptainer", "slurm", "ssh", "daytona")
"""Subjects that are names of providers."""


@dataclass(frozen=True)
class Finding:
    subject: str
    status: Status
    detail: str
    fix: str = ""


async def isolation() -> Finding:
    """Lease one slot of a private pool and report the level it was built at, and why not a stronger one."""
    from sandbox_pool import PoolConfig, SandboxError, SlotPool

    if not _on_linux():
        return Finding("isolation", "missing", "slots of this machine need Linux", "take a provider that is ok below")
    with tempfile.TemporaryDirectory(prefix="hermes-rl-doctor-") as state:
        config = PoolConfig(slots_per_host=1, max_hosts=1, state_dir=Path(state), start_timeout_s=START_WITHIN_S)
        try:
            async with SlotPool.from_config(config) as pool, pool.lease("doctor") as slot:
                return _level_finding(slot.host_info)
        except SandboxError as error:
            return Finding("isolation", "broken", f"no slot could be built: {error}", "see `hermes-rl pool status`")


def _on_linux() -> bool:
    return sys.platform == "linux"


def _level_finding(info: HostInfo) -> Finding:
    level = f"{info.isolation} ({info.variant})" if info.variant else info.isolation
    lacking = f"; cannot limit {', '.join(info.missing)}" if info.missing else ""
    detail = f"{level}: {info.isolation_reason}{lacking}"
    if not info.rejected:
        return Finding("isolation", "limited" if info.missing else "ok", detail)
    better, why = info.rejected[0]
    return Finding("isolation", "limited", detail, f"for {better}: {why}")


async def python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", f"{version} at {sys.executable}")
    return Finding("python", "broken", f"{version} is not supported", "use Python 3.11, 3.12 or 3.13")


async def compiler() -> Finding:
    """Where no wheel brought the slot server's helper, a C compiler has to build it."""
    from sandbox_pool.server.build.helper_build import MACHINES, WHAT_TO_INSTALL, compilers, find_helper

    machines = (platform.machine(),) if _on_linux() else MACHINES
    for machine in machines:
        if helper := find_helper(machine):
            return Finding("compiler", "ok", f"not needed: the slot helper is there, {helper}")
    for machine in machines:
        if commands := compilers(machine):
            return Finding("compiler", "ok", shlex.join(commands[0]))
    detail = f"none, and it has to build the slot helper for {' or '.join(machines)}"
    return Finding("compiler", "broken", detail, WHAT_TO_INSTALL)


async def cgroups() -> Finding:
    """Memory, process and CPU limits of slots need a cgroup hierarchy we may write to."""
    if not _on_linux():
        return Finding("cgroups", "missing", "only Linux has them; the hosts that slots run on have their own")
    if (_CGROUP_ROOT / "cgroup.controllers").is_file():
        present = set((_CGROUP_ROOT / "cgroup.controllers").read_text().split())
        return _cgroup_finding("v2", _CGROUP_ROOT, present)
    mounted = {name for name in _CONTROLLERS if (_CGROUP_ROOT / name).is_dir()}
    if mounted:
        return _cgroup_finding("v1", _CGROUP_ROOT / sorted(mounted)[0], mounted)
    return Finding("cgroups", "limited", "none mounted: slots are limited by rlimits and tmpfs sizes only")


def _cgroup_finding(version: str, folder: Path, present: set[str]) -> Finding:
    lacking = [name for name in _CONTROLLERS if name not in present]
    if not os.access(folder, os.W_OK):
        return Finding(
            "cgroups",
            "limited",
            f"{version}, not writable for this user: limits by rlimits",
            "run as root, or delegate a cgroup",
        )
    if lacking:
        return Finding("cgroups", "limited", f"{version}, without {', '.join(lacking)}")
    return Finding("cgroups", "ok", f"{version} with {', '.join(_CONTROLLERS)}")


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
        return Finding("modal", "missing", "SDK not installed", "pip install modal")
    version = importlib.metadata.version("modal")
    if _has_modal_token():
        return Finding("modal", "ok", f"SDK {version}, token found")
    return Finding("modal", "missing", f"SDK {version}, no token", f"modal token new, then {TRY} modal")


def _has_modal_token() -> bool:
    config = Path(os.environ.get("MODAL_CONFIG_PATH", "~/.modal.toml")).expanduser()
    return bool(os.environ.get("MODAL_TOKEN_ID")) or config.is_file()


async def docker() -> Finding:
    return await _engine("docker", "start dockerd, or set DOCKER_HOST")


async def podman() -> Finding:
    """Slots need the API of podman, which its socket serves."""
    whose = "" if os.getuid() == 0 else " --user"
    return await _engine("podman", f"systemctl{whose} start podman.socket, or set CONTAINER_HOST")


async def _engine(kind: str, fix: str) -> Finding:
    """Asks the engine that the provider would use, and whether it has the image."""
    if importlib.util.find_spec("aiodocker") is None:
        return Finding(kind, "missing", "client library not installed", f"pip install 'hermes-rl[{kind}]'")
    from sandbox_pool.providers.docker.docker_engine import IMAGE, UNREACHABLE, DockerOptions, open_engine

    try:
        async with open_engine(kind, DockerOptions(api_timeout_s=ANSWER_WITHIN_S)) as engine:
            version = (await engine.version())["Version"]
            known = {tag for each in await engine.images.list() for tag in each.get("RepoTags") or ()}
    except (PlaceUnreachable, *UNREACHABLE) as error:
        return Finding(kind, "missing", f"no engine answers: {error}", fix)
    if any(f"/{tag}".endswith(f"/{IMAGE}") for tag in known):
        return Finding(kind, "ok", f"engine {version} with the image {IMAGE}")
    build = "hermes-rl pool images build" + (f" --provider {kind}" if kind != "docker" else "")
    return Finding(kind, "limited", f"engine {version} without the image {IMAGE}", f"{build}, or name another image")


async def apptainer() -> Finding:
    """Apptainer, or Singularity under its old name."""
    names = ("apptainer", "singularity")
    answers = [(name, answer) for name in names if (answer := await ask(name, "--version"))]
    if not answers:
        return Finding("apptainer", "missing", "not installed", "install Apptainer from its makers' packages")
    name, (code, line) = answers[0]
    if code:
        return Finding("apptainer", "limited", line or f"exit code {code}", f"see what `{name} --version` says")
    option = "" if name == "apptainer" else f" --option apptainer={name}"
    return Finding("apptainer", "ok", f"{line}; try it: {TRY} apptainer --option image=FILE.sif{option}")


async def slurm() -> Finding:
    """`srun` starts slot servers on the nodes of an allocation."""
    answer = await ask("srun", "--version")
    if answer is None:
        return Finding("slurm", "missing", "no srun", "run on a machine of a Slurm cluster")
    if answer[0]:
        return Finding("slurm", "missing", answer[1] or "srun fails", "run on a machine of a Slurm cluster")
    if job := os.environ.get("SLURM_JOB_ID"):
        return Finding("slurm", "ok", f"{answer[1]}, in job {job}")
    return Finding("slurm", "missing", f"{answer[1]}, not in an allocation", f"salloc --nodes=2, then {TRY} slurm")


async def ssh() -> Finding:
    """The ssh client starts slot servers on other machines."""
    found = _by_version("ssh", await ask("ssh", "-V"), "apt-get install openssh-client")
    if found.status != "ok":
        return found
    return replace(found, detail=f"{found.detail}; try it: hermes-rl pool check --provider ssh --option machines=NAME")


async def daytona() -> Finding:
    """Is Daytona's SDK installed, and is there a key?"""
    if importlib.util.find_spec("daytona") is None:
        return Finding("daytona", "missing", "SDK not installed", "pip install 'hermes-rl[daytona]'")
    version = importlib.metadata.version("daytona")
    if os.environ.get("DAYTONA_API_KEY"):
        return Finding("daytona", "ok", f"SDK {version}, key found")
    return Finding("daytona", "missing", f"SDK {version}, no key", f"set DAYTONA_API_KEY, then {TRY} daytona")


def _by_version(subject: str, answer: tuple[int, str] | None, fix: str) -> Finding:
    if answer is None:
        return Finding(subject, "missing", "not installed", fix)
    code, line = answer
    return Finding(subject, "limited" if code else "ok", line or f"exit code {code}")


async def model() -> Finding:
    """The real model that demo and learn run on the CPU: llama.cpp and its weights."""
    from agent_loop.local_models.cpu_model.weights import CpuModelMissing, smollm2_gguf

    fix = "hermes-rl model get"
    if importlib.util.find_spec("xllamacpp") is None:
        return Finding(
            "model",
            "missing",
            "no llama.cpp (xllamacpp): the demo plays scripted policies only",
            f"pip install xllamacpp gguf && {fix}",
        )
    try:
        return Finding("model", "ok", str(smollm2_gguf()))
    except CpuModelMissing:
        return Finding("model", "missing", "llama.cpp is here, the weights of SmolLM2 are not", fix)


async def extras() -> Finding:
    """Optional packages, by the extra that brings them."""
    try:
        packages = _extra_packages(importlib.metadata.requires("hermes-rl") or [])
    except importlib.metadata.PackageNotFoundError:
        return Finding("extras", "missing", "hermes-rl is not installed, so its extras are not known", "pip install .")
    here = {name for name, wanted in packages.items() if all(map(_is_installed, wanted))}
    detail = f"installed: {', '.join(sorted(here)) or 'none'}"
    absent = sorted(packages.keys() - here)
    if not absent:
        return Finding("extras", "ok", detail)
    return Finding("extras", "missing", f"{detail}; not: {', '.join(absent)}", "pip install 'hermes-rl[NAME]'")


def _extra_packages(requirements: list[str]) -> dict[str, set[str]]:
    """Extra -> the packages it brings, those of extras that it names among them."""
    direct: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for match in filter(None, map(_REQUIREMENT.match, requirements)):
        package, other, extra = match.groups()
        direct.setdefault(extra, set()).update([] if package == "hermes-rl" else [package])
        named.setdefault(extra, set()).update([other] if other and package == "hermes-rl" else [])
    direct.pop("dev", None)
    return {name: found.union(*(direct.get(other, ()) for other in named[name])) for name, found in direct.items()}


def _is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


async def run_api() -> Finding:
    """Atropos' server between trainer and environments: installed, and does one run at the default address?"""
    program = Path(sys.executable).with_name("run-api")
    if not program.exists():
        return Finding("run-api", "broken", f"{program} is not there", "pip install --force-reinstall atroposlib")
    running = await http_status(f"{_RUN_API_DEFAULT}/info") == 200
    return Finding("run-api", "ok", f"{program}; {'one runs' if running else 'none runs'} at {_RUN_API_DEFAULT}")


async def endpoints(settings: Mapping[str, Any]) -> list[Finding]:
    """One finding for each model server and each tokenizer named anywhere in a config."""
    urls = dict.fromkeys(_values(settings, "base_url"))
    tokenizers = dict.fromkeys(_values(settings, "tokenizer_name"))
    asked = [_endpoint(url) for url in urls] + [asyncio.to_thread(_tokenizer, name) for name in tokenizers]
    return list(await asyncio.gather(*asked))


async def _endpoint(url: str) -> Finding:
    shown = masked({"base_url": url})["base_url"]
    root = url.rstrip("/").removesuffix("/v1")
    for probe in (f"{root}/health", f"{root}/v1/models"):
        status = await http_status(probe)
        if status == 200:
            return Finding("endpoint", "ok", f"{shown} answers")
    if status is None:
        return Finding("endpoint", "broken", f"{shown} does not answer", "start the model server, or correct base_url")
    return Finding("endpoint", "limited", f"{shown} answers HTTP {status}", "check the address and the API key")


def _tokenizer(name: str) -> Finding:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(name, local_files_only=not Path(name).exists())
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0][:120]
        return Finding("tokenizer", "broken", f"{name}: {reason}", "download it once, or give a local folder")
    return Finding("tokenizer", "ok", name)


def _values(settings: Any, key: str) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            if name == key and isinstance(value, str) and value:
                yield value
            else:
                yield from _values(value, key)
    elif isinstance(settings, list):
        for value in settings:
            yield from _values(value, key)


async def http_status(url: str) -> int | None:
    """Status of a GET, or None when nothing answers there."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError, ValueError, OSError):
        return None


async def ask(*argv: str) -> tuple[int, str] | None:
    """Exit code and first line of a program's answer; None when it is not installed or does not answer in time."""
    if shutil.which(argv[0]) is None:
        return None
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), ANSWER_WITHIN_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    lines = output.decode(errors="replace").strip().splitlines()
    return process.returncode or 0, lines[0] if lines else ""


CHECKS: tuple[Callable[[], Awaitable[Finding]], ...] = (
    python,
    compiler,
    isolation,
    cgroups,
    model,
    extras,
    run_api,
    nomad,
    modal,
    docker,
    podman,
    apptainer,
    slurm,
    ssh,
    daytona,
)


async def run_checks(settings: Mapping[str, Any] | None = None) -> list[Finding]:
    """All findings in the order of CHECKS; with settings, also the endpoints and tokenizers that they name."""
    findings = await asyncio.gather(*(_finding_of(check) for check in CHECKS))
    return [*findings, *(await endpoints(settings) if settings else [])]


def _as_place(finding: Finding) -> Finding:
    """A program that is there is of no use without a provider that uses it."""
    from sandbox_pool.providers.base import provider_names

    name = finding.subject
    if name not in PLACES:
        return finding
    if name not in provider_names():
        fix = f"use {', '.join(provider_names())}"
        return Finding(name, "missing", f"{finding.detail}; this version has no provider {name!r}", fix)
    if finding.status == "ok" and TRY not in finding.detail:
        return replace(finding, detail=f"{finding.detail}; try it: {TRY} {name}")
    return finding


async def _finding_of(check: Callable[[], Awaitable[Finding]]) -> Finding:
    try:
        return _as_place(await check())
    except Exception as error:  # noqa: BLE001  one strange subject must not hide the others: the fault is reported
        subject = getattr(check, "__name__", "?").replace("_", "-")
        return Finding(subject, "broken", f"could not be checked: {type(error).__name__}: {error}")
