"""Our slots for Harbor, without Docker: `harbor run --env environments.trainers.harbor:SlotEnvironment`.

All trials of a process share one pool on this machine, which is open as long as any of them runs. `--ek image=host`
runs tasks in slots without an image, `--ek slots=32` says how many trials fit at a time. Unlike `harbor:PATH`, which
verifies a fork, Harbor's own verifier runs in the slot in which the agent worked.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition

from environments.harbor_tasks import FOLDERS, HOST
from sandbox_pool import SlotPool
from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.config import PoolConfig
from sandbox_pool.server.network_rules import EGRESS
from sandbox_pool.spec import NetworkRules, SandboxSpec

MOST_OUTPUT_CHARS = 10_000_000


class _SharedPool:
    """One pool for all trials; opened by the first and closed by the last."""

    def __init__(self) -> None:
        self._lock, self._stack, self._users = asyncio.Lock(), AsyncExitStack(), 0
        self._pool: SlotPool | None = None

    @asynccontextmanager
    async def opened(self, slots: int) -> AsyncIterator[SlotPool]:
        async with self._lock:
            if self._pool is None:
                config = PoolConfig(provider="local", slots_per_host=slots, max_hosts=1)
                self._pool = await self._stack.enter_async_context(SlotPool.from_config(config))
            self._users += 1
        try:
            yield self._pool
        finally:
            async with self._lock:
                self._users -= 1
                if not self._users:
                    self._pool = None
                    await self._stack.aclose()


class SlotEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A slot that Harbor's agents and verifiers work in."""

    _shared: ClassVar[_SharedPool] = _SharedPool()
    _box: Sandbox

    def __init__(self, *args: Any, image: str | None = None, slots: int = 16, **kwargs: Any) -> None:
        self._image, self._slots = image, int(slots)
        self._stack = AsyncExitStack()
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "hermes-rl-slot"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        lists = {f"network_allowlist{kind}": True for kind in ("", "_hostnames", "_wildcard_hostnames")}
        return EnvironmentCapabilities(disable_internet=True, dynamic_network_policy=True, **lists)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise ValueError("several containers (docker-compose.yaml) are not supported by slots")
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)
        if self._image == HOST and (self.environment_dir / "Dockerfile").exists():
            raise ValueError("image=host, but the task's files come from its Dockerfile")

    def _spec(self) -> SandboxSpec:
        image = self._image or self.task_env_config.docker_image or f"dockerfile:{self.environment_dir.resolve()}"
        said = {
            "image": None if image == HOST else image,
            "memory_mb": self._effective_memory_mb,
            "disk_mb": self._effective_storage_mb,
            "cpu": self._effective_cpus,
            "workdir": self.task_env_config.workdir,
        }
        network = NetworkRules(allow=_hosts(self.network_policy))
        return SandboxSpec(network=network, **{key: value for key, value in said.items() if value is not None})

    async def start(self, force_build: bool) -> None:
        pool = await self._stack.enter_async_context(self._shared.opened(self._slots))
        self._box = await self._stack.enter_async_context(pool.lease(self.session_id, self._spec()))
        made = await self.exec(f"mkdir -p {FOLDERS} /tests /solution && chmod -R a+rwX /logs", user="root")
        assert not made.return_code, f"cannot make Harbor's folders: {made.stderr}"
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        await self._stack.aclose()

    async def _apply_network_policy(self, network_policy: Any) -> None:
        await self._box.allow_hosts(_hosts(network_policy))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in a bash of its own: Harbor's commands leave nothing to the next one but files."""
        who = self._resolve_user(user)
        other = [] if who in (None, "root", 0, "0") else ["runuser", "-u", str(who), "--"]
        done = await self._box.exec(
            shlex.join([*other, "bash", "-c", command]),
            cwd=cwd,
            env=self._merge_env(env),
            timeout_s=timeout_sec,
            merge_stderr=False,
            max_output_chars=MOST_OUTPUT_CHARS,
        )
        if done.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=done.output, stderr=done.stderr, return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._box.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._box.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await self._box.download(source_path, target_path, kind="f")

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._box.download(source_dir, target_dir, kind="d", links=False)  # an agent decides where links lead


def _hosts(policy: Any) -> tuple[str, ...]:
    return {"public": EGRESS, "no-network": ()}.get(policy.network_mode.value, tuple(policy.allowed_hosts))
