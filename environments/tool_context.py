"""`ToolContext`: what `compute_reward(item, result, ctx)` works with.

Every call goes to a *fork*: a fresh slot with the files of the agent's workspace, made on the first call that needs it,
after the agent's processes were stopped. What the agent left in the verifier's own paths is removed there first; tests
are put in afterwards, from the host. `ctx.agent_state` reads what the agent left, untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from environments.frozen import AgentState, FrozenWorkspace
from environments.sandbox_context import CallTool, SandboxContext
from environments.sandboxes import Pool, Sandbox
from sandbox_pool.spec import SandboxSpec

CLEAN_ENVIRONMENT = "export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1; unset PYTHONPATH PYTHONSTARTUP BASH_ENV ENV"
"""Run first in a fork: packages that the agent put beside the workspace must not be picked up."""


class ToolContext(SandboxContext):
    """A frozen workspace and the fork that verification runs in. Owned by the environment, which closes it."""

    def __init__(
        self,
        frozen: FrozenWorkspace,
        pool: Pool,
        spec: SandboxSpec,
        task_id: str,
        verifier_paths: Sequence[str] = (),
        call_tool: CallTool | None = None,
    ) -> None:
        self._frozen = frozen
        self._pool = pool
        self._spec = spec
        self._task_id = task_id
        self._verifier_paths = tuple(verifier_paths)
        self._call_tool = call_tool
        self._stack = AsyncExitStack()
        self._fork: Sandbox | None = None
        self._making = asyncio.Lock()

    @property
    def task_id(self) -> str:
        """The rollout this context belongs to."""
        return self._task_id

    @property
    def agent_state(self) -> AgentState:
        """The workspace as the agent left it, read-only."""
        return self._frozen.agent_state

    async def sandbox(self) -> Sandbox:
        """The fork, made on first use."""
        async with self._making:
            if self._fork is None:
                self._fork = await self._make_fork()
            return self._fork

    async def put_tests(self, files: Mapping[str, bytes | str]) -> None:
        """Write files from the host over whatever the agent had at these paths, a directory or a symlink included."""
        await self.remove(*files)
        for path, data in files.items():
            await self.write_file(path, data)

    async def release_fork(self) -> None:
        """Give the fork back, and the snapshot it came from. The frozen copy is its owner's to remove."""
        await self._stack.aclose()
        if self._frozen.layer is not None:
            layer, self._frozen.layer = self._frozen.layer, None
            await self._pool.drop_snapshot(layer)

    async def close(self) -> None:
        """Give the fork back and remove the frozen copy."""
        try:
            await self.release_fork()
        finally:
            await self._frozen.close()

    async def _make_fork(self) -> Sandbox:
        task_id = f"{self._task_id}/verify"
        if self._frozen.layer is not None:
            fork = await self._stack.enter_async_context(self._pool.lease_from(self._frozen.layer, task_id))
        else:
            fork = await self._stack.enter_async_context(self._pool.lease(task_id, self._spec))
            await self._frozen.put_into(fork)
        context = SandboxContext(fork)
        await context.exec(CLEAN_ENVIRONMENT)
        await context.remove(*self._verifier_paths)
        return fork
