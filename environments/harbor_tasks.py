"""`harbor:PATH`: task folders in Harbor's format (schema 1.4 and older ones) on our slots.

The agent works in a slot of the task's image. `tests/` is put into a fork of what it left, in which none of its
processes runs and /tests and /logs/verifier are new; `tests/test.sh` writes the reward there. A verifier that writes
none, or one that is not a finite number, is an error and never a 0, as in Harbor. What cannot be done here (several
steps, several containers, GPUs, ...) is refused by name before anything is started.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import logging
import os
import re
import shlex
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from environments.base import (
    AgentResult,
    Limits,
    SandboxContext,
    Score,
    ToolContext,
)
from environments.config.settings import Verification
from environments.errors import ConfigError
from environments.listed_items import ListedItemsConfig, ListedItemsEnv
from environments.scoring.verification import AgentFault, CheckTimeout
from sandbox_pool.errors import SandboxFileError, first_invalid
from sandbox_pool.server.network_rules import EGRESS
from sandbox_pool.spec import NetworkRules, SandboxSpec

log = logging.getLogger(__name__)

HOST = "host"
FOLDERS = "/logs/agent /logs/verifier /logs/artifacts"
MOST_REWARD_BYTES = 1 << 20
MOST_REWARD = 1e300
MOST_SOLUTION_BYTES = 48_000
"""The stand-in plays a solution as one command, which has to fit into its turn."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)

NetworkMode = Literal["public", "no-network", "allowlist"]


class _Phase(BaseModel):
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    user: str | int | None = None


class _Agent(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0)


class _Verifier(_Phase):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: Any = None
    collect: list[Any] = []


class _Healthcheck(BaseModel):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class _Environment(BaseModel):
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    healthcheck: _Healthcheck | None = None
    workdir: str | None = None
    network_mode: NetworkMode = "public"
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None


class _Solution(BaseModel):
    env: dict[str, str] = {}


class _TaskFile(BaseModel):
    """What we use of task.toml. Other keys are Harbor's business; it takes unknown ones as well."""

    metadata: dict[str, Any] = {}
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()
    steps: list[Any] | None = None


@dataclass(frozen=True)
class HarborTask:
    """One task folder, checked."""

    folder: Path
    instruction: str
    file: _TaskFile

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """ConfigError names the folder and what is wrong with it, or what of it cannot be done here."""
        try:
            file = _TaskFile.model_validate(tomllib.loads((folder / "task.toml").read_text("utf-8")))
            instruction = without_canary((folder / "instruction.md").read_text("utf-8"))
        except ValidationError as error:
            raise ConfigError(f"{folder / 'task.toml'}: {first_invalid(error, _TaskFile)}") from error
        except ValueError as error:
            raise ConfigError(f"{folder}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{folder}: {Path(str(error.filename)).name}: {error.strerror}") from error
        if reason := _refusal(folder, file):
            raise ConfigError(f"{folder}: {reason}")
        return cls(folder, instruction, file)

    @property
    def has_loose_files(self) -> bool:
        """Whether environment/ is put into the working directory, rather than being what an image is built from."""
        place = self.folder / "environment"
        return place.is_dir() and not (place / "Dockerfile").exists()

    def image(self, instead: str | None) -> str | None:
        """What its slots are made of; `instead` is the setting `env.image`."""
        if instead == HOST:
            if not self.has_loose_files and (self.folder / "environment").is_dir():
                raise ConfigError(f"{self.folder}: env.image is host, but its files come from its Dockerfile")
            return None
        if image := instead or self.file.environment.docker_image:
            return image
        if (self.folder / "environment" / "Dockerfile").is_file():
            return f"dockerfile:{self.folder.resolve() / 'environment'}"
        raise ConfigError(f"{self.folder}: it has neither environment.docker_image nor environment/Dockerfile")

    def hosts(self, phase: _Phase | _Environment) -> tuple[str, ...]:
        """What may be reached in a phase; one that says nothing has the environment's policy."""
        mode, allowed = phase.network_mode, phase.allowed_hosts
        if mode is None:
            return self.hosts(self.file.environment)
        if isinstance(phase, _Environment) and phase.allow_internet is False:
            return ()
        return {"public": EGRESS, "no-network": ()}.get(mode, tuple(allowed or ()))

    def spec(self, base: SandboxSpec, instead: str | None) -> SandboxSpec:
        """The slot, with what the task says over what the config says."""
        place, agent = self.file.environment, self.hosts(self.file.agent)
        closed = not agent and not self.hosts(self.file.verifier)
        said = {
            "image": self.image(instead),
            "user": None if self.file.agent.user is None or instead == HOST else str(self.file.agent.user),
            "network": "none" if closed else NetworkRules(allow=agent),
            "cpu": place.cpus,
            "memory_mb": place.memory_mb or _megabytes(place.memory),
            "disk_mb": place.storage_mb or _megabytes(place.storage),
            "workdir": place.workdir,
            "env": base.env | resolved(place.env, self.folder),
        }
        return base.model_copy(update={key: value for key, value in said.items() if value is not None})

    def content(self) -> str:
        """A hash of what a slot starts with."""
        digest = hashlib.sha256()
        for path in _files(self.folder / "environment"):
            digest.update(f"{path}\0{path.stat().st_mode:o}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def solution(self) -> list[str]:
        """One command that brings solution/ along and runs it; nothing when there is none, or it is too long."""
        folder = self.folder / "solution"
        if not (folder / "solve.sh").is_file():
            return []
        words = [f"export {key}={shlex.quote(value)}" for key, value in self._solution_env().items()]
        for path in _files(folder):
            target = shlex.quote(f"/solution/{path.relative_to(folder)}")
            data = base64.b64encode(path.read_bytes()).decode()
            words.append(f'mkdir -p "$(dirname {target})" && base64 -d > {target} <<< {shlex.quote(data)}')
        command = "\n".join([*words, "chmod -R a+rx /solution && /solution/solve.sh"])
        if len(command) > MOST_SOLUTION_BYTES:
            log.warning("%s: the stand-in cannot play a solution of %d bytes", self.folder, len(command))
            return []
        return [command]

    def _solution_env(self) -> dict[str, str]:
        return {"DEBIAN_FRONTEND": "noninteractive", **resolved(self.file.solution.env, self.folder)}


def _refusal(folder: Path, file: _TaskFile) -> str | None:
    """What of the task cannot be done here, in words."""
    place, verifier = file.environment, file.verifier
    reasons = {
        "it has several steps (steps), which are not supported": bool(file.steps),
        "it has several containers (environment/docker-compose.yaml), which are not supported": (
            folder / "environment" / "docker-compose.yaml"
        ).exists(),
        "environment.os is not linux": place.os.lower() != "linux",
        "it needs GPUs or TPUs, which slots do not have": bool(place.gpus or place.tpu),
        "environment.mcp_servers is not supported; name servers in env.mcp": bool(place.mcp_servers),
        "a verifier in an environment of its own (verifier.environment) is not supported": (
            verifier.environment is not None or verifier.environment_mode == "separate"
        ),
        "verifier.collect is not supported": bool(verifier.collect),
        "trajectory.json (a conversation to go on with) is not supported": (folder / "trajectory.json").exists(),
        ".harborignore is not supported": any(folder.rglob(".harborignore")),
        "there is no tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
        "verifier.user needs an agent that is root": (
            verifier.user not in (None, file.agent.user) and file.agent.user not in (None, "root", 0)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def without_canary(text: str) -> str:
    """An instruction without the marks against training on it, which Harbor does not show to agents either."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
        while lines and not lines[0].strip():
            lines.pop(0)
    return "\n".join(lines)


def resolved(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables of a task, with `${NAME}` and `${NAME:-default}` taken from this machine as in Harbor."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ConfigError(f"{folder}: the variable {match[1]} is not set")
        return found

    return {key: _VARIABLE.sub(value, text) for key, text in env.items()}


def _megabytes(size: str | None) -> int | None:
    """`2G`, `512M`, `64K`, as older tasks write it."""
    if size is None:
        return None
    factors = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    try:
        return max(1, int(float(size.strip()[:-1]) * factors[size.strip().upper()[-1:]]))
    except (KeyError, ValueError):
        raise ConfigError(f"{size!r} is not a size such as 2G or 512M") from None


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def read_tasks(path: Path) -> dict[str, HarborTask]:
    """The task at a path, or all tasks in the folder, by the names of their folders."""
    if (path / "task.toml").is_file():
        return {path.resolve().name: HarborTask.read(path)}
    if not path.is_dir():
        raise ConfigError(f"env.tasks: there is no folder {str(path)!r}")
    found = {one.parent.name: HarborTask.read(one.parent) for one in sorted(path.glob("*/task.toml"))}
    if not found:
        raise ConfigError(f"env.tasks: no task in {str(path)!r}: there is no task.toml in it, nor one folder below")
    return found


class NoReward(ValueError):
    """The verifier wrote no reward that can be read."""


def rewards_in(name: str, data: bytes) -> dict[str, float]:
    """Rewards by name from reward.json or reward.txt; NoReward for anything but finite numbers."""
    if not data.strip():
        raise NoReward(f"the verifier's {name} is empty")
    try:
        found = json.loads(data) if name == "reward.json" else float(data)
    except (ValueError, RecursionError) as error:
        raise NoReward(f"the verifier's {name} cannot be read: {data[:80]!r}") from error
    rewards = found if isinstance(found, dict) else {"reward": found}
    for key, value in rewards.items():
        if not isinstance(value, int | float) or not -MOST_REWARD < value < MOST_REWARD:
            raise NoReward(f"the verifier's {name}: {key} is {str(value)[:80]!r}, not a finite number")
    if not rewards:
        raise NoReward(f"the verifier's {name} names no reward")
    return {key: float(value) for key, value in rewards.items()}


class HarborConfig(ListedItemsConfig):
    """Where the tasks are, and what to run them in."""

    tasks: Path | None = Field(
        default=None, description="A task folder, or a folder of them; `harbor:PATH` on the command line."
    )
    image: str | None = Field(
        default=None, description="An image instead of the tasks' own; `host`: slots without an image."
    )
    verification: Verification = Field(
        default="layer",
        description="As in other environments; Harbor's tasks may change any file of their system, so the whole layer.",
    )
    terminal_timeout: float = Field(default=600.0, gt=0, description="Default timeout of a terminal command.")


class HarborEnv(ListedItemsEnv):
    """Task folders in Harbor's format."""

    name = "harbor"
    env_config_cls = HarborConfig
    config: HarborConfig

    def load_items(self, config: HarborConfig) -> list[dict[str, Any]]:
        if config.tasks is None:
            raise ConfigError("env.tasks is missing: name the tasks as in `hermes-rl evaluate harbor:PATH`")
        self.task_of = read_tasks(config.tasks)
        self._sound: dict[str, bool] = {}
        for task in self.task_of.values():
            task.spec(config.sandbox, config.image)
        return [
            {"id": name, "category": str(task.file.metadata.get("category", ""))} for name, task in self.task_of.items()
        ]

    def format_prompt(self, item: dict[str, str]) -> str:
        return self.task_of[item["id"]].instruction

    def spec(self, item: dict[str, str]) -> SandboxSpec:
        return self.task_of[item["id"]].spec(self.config.sandbox, self.config.image)

    def limits(self, item: dict[str, str]) -> Limits:
        """The task's time is the rollout's deadline."""
        seconds = self.task_of[item["id"]].file.agent.timeout_sec
        return self.config.limits.model_copy(update={"rollout_timeout_s": seconds} if seconds else {})

    def prepare_key(self, item: dict[str, str]) -> str:
        return self.task_of[item["id"]].content()

    async def prepare(self, item: dict[str, str], ctx: SandboxContext) -> None:
        """Harbor's folders, and the files of a task that are in no image."""
        task = self.task_of[item["id"]]
        await _must(ctx, f"mkdir -p {FOLDERS} && chmod -R a+rwX /logs", "cannot make Harbor's folders")
        if task.has_loose_files:
            await ctx.upload_dir(task.folder / "environment", (await ctx.sandbox()).workdir)

    async def start(self, item: dict[str, str], ctx: SandboxContext) -> None:
        """Wait until the task's health check holds."""
        check = self.task_of[item["id"]].file.environment.healthcheck
        if check is None:
            return
        began, failures = time.monotonic(), 0
        while (await ctx.exec(check.command, timeout_s=check.timeout_sec, may_time_out=True)).exit_code != 0:
            starting = time.monotonic() - began < check.start_period_sec
            failures += not starting
            if failures >= check.retries:
                raise RuntimeError(f"the health check of {item['id']} failed {failures} times: {check.command[:200]}")
            await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)

    async def compute_reward(self, item: dict[str, str], result: AgentResult, ctx: ToolContext) -> Score:
        """Run tests/test.sh on what the agent left, and read its reward.

        Where there is none, or none that can be read, the same tests run in a slot that no agent touched: if they write
        one there, the agent is why they did not here.
        """
        try:
            return await self._tested(item, ctx)
        except NoReward as error:
            await ctx.close()  # a verifier that holds one slot and waits for another could wait for ever
            if await self._writes_a_reward(item):
                raise AgentFault(str(error)) from error
            raise

    async def _writes_a_reward(self, item: dict[str, str]) -> bool:
        """Whether the tests of this task do without an agent; asked once."""
        name = item["id"]
        if name not in self._sound:
            async with self.opened_pool().lease(f"harbor-{name}", self.spec(item)) as sandbox:
                ctx = SandboxContext(sandbox)
                try:
                    await self.prepare(item, ctx)
                    await self.start(item, ctx)
                    await self._tested(item, ctx)
                    self._sound[name] = True
                except (NoReward, AgentFault, CheckTimeout, SandboxFileError, RuntimeError) as error:
                    log.warning("the tests of %s give no reward on an untouched slot: %s", name, error)
                    self._sound[name] = False
        return self._sound[name]

    async def _tested(self, item: dict[str, str], ctx: SandboxContext) -> Score:
        """A process that outlives test.sh is stopped before its reward is read, so nothing changes that."""
        task, sandbox = self.task_of[item["id"]], await ctx.sandbox()
        verifier = task.file.verifier
        clean = "rm -rf /tests /logs/verifier; [ ! -L /logs ] || rm -f /logs"
        made = await ctx.exec(f"{clean}; mkdir -p {FOLDERS} && chmod -R a+rwX /logs && [ -z $(ls -A /logs/verifier) ]")
        if made.exit_code != 0:
            raise AgentFault(f"the verifier's folders cannot be made anew: {made.output.strip()[-200:]}")
        await ctx.upload_dir(task.folder / "tests", "/tests")
        laid_out = await ctx.exec("chmod -R a+rX /tests && chmod a+rx /tests/test.sh")
        if laid_out.exit_code != 0:
            raise AgentFault(f"the tests cannot be laid out: {laid_out.output.strip()[-200:]}")
        if task.hosts(verifier) != task.hosts(task.file.agent):
            await sandbox.allow_hosts(task.hosts(verifier))
        user = None if verifier.user in (None, task.file.agent.user) else str(verifier.user)
        await ctx.exec(
            "/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1",
            timeout_s=verifier.timeout_sec,
            env=resolved(verifier.env, task.folder),
            user=user,
        )
        if self.config.verification != "live":
            await sandbox.stop_processes()
        rewards = await self._rewards(ctx)
        whole = rewards.get("reward", sum(rewards.values()) / len(rewards))
        return Score(whole, components=rewards if len(rewards) > 1 else {})

    async def _rewards(self, ctx: SandboxContext) -> dict[str, float]:
        for name in ("reward.json", "reward.txt"):
            try:
                return rewards_in(name, await ctx.read_file(f"/logs/verifier/{name}", max_bytes=MOST_REWARD_BYTES))
            except SandboxFileError as error:
                if error.errno != errno.ENOENT:
                    raise
        said = (await ctx.exec("tail -c 400 /logs/verifier/test-stdout.txt")).output.strip()
        raise NoReward(f"the verifier wrote no reward; it said: {said}")

    def solution(self, item: dict[str, str]) -> Sequence[str | Mapping[str, Any]]:
        return self.task_of[item["id"]].solution()


async def _must(ctx: SandboxContext, command: str, otherwise: str) -> None:
    done = await ctx.exec(command)
    if done.exit_code != 0:
        raise RuntimeError(f"{otherwise}: {done.output.strip()[-200:]}")


if __name__ == "__main__":
    HarborEnv.cli()
