"""Control plane: sandboxes, made, found, listed, tagged, waited for and ended. V1 twins differ in their ids only."""

from __future__ import annotations

from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib import Status
from modal_proto import api_pb2

from .faults import Befallen, error
from .rpc import streaming, unary
from .sandbox import Identity, Result, Sandbox
from .worker import first_of
from .world import World, new_id


class Sandboxes:
    """The RPCs of the control plane about sandboxes."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def _create(self, request: Any, *, v2: bool) -> Sandbox:
        """The name is taken, and the sandbox found by it, from the start; it runs when this answers."""
        world, definition = self._world, request.definition
        self._check_limits(request.app_id, definition.name)
        image = world.images.get(definition.image_id)
        env = {**(image.env if image else {}),
               **world.secret_env(definition.secret_ids, getattr(request, "secret_sources", ()))}  # fmt: skip
        identity = Identity(new_id("sb", 26 if v2 else 22), new_id("ta", 21) + ("V" if v2 else "1"), request.app_id)
        backend = world.backend(world.root / "sandboxes" / identity.sandbox_id, identity.sandbox_id)
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        sandbox = Sandbox(identity, definition, backend, env, image.workdir if image else "/", tags)
        world.sandboxes[sandbox.id] = sandbox
        try:
            await sandbox.start(world.tunnel_context, world.limits.create_delay_s)
        except BaseException:
            await sandbox.finish(Result.GENERIC_STATUS_INIT_FAILURE)
            raise
        return sandbox

    def _check_limits(self, app_id: str, name: str) -> None:
        limits, running = self._world.limits, self._world.running()
        if name and any(other.name == name and other.app_id == app_id for other in running):
            raise error(Status.ALREADY_EXISTS, f"Sandbox with name '{name}' already exists")
        if limits.create_bucket is not None and (wait_s := limits.create_bucket.take()):
            raise error(Status.RESOURCE_EXHAUSTED, "Sandbox creation rate limit (5/s) exceeded", wait_s)
        if limits.max_sandboxes is not None and len(running) >= limits.max_sandboxes:
            raise error(Status.RESOURCE_EXHAUSTED, "Workspace sandbox limit reached")

    @unary("SandboxCreateV2")
    async def create_v2(self, request: api_pb2.SandboxCreateV2Request) -> api_pb2.SandboxCreateV2Response:
        sandbox = await self._create(request, v2=True)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=sandbox.id, task_id=sandbox.task_id, tunnels=sandbox.tunnels, metadata=self._metadata(sandbox),
            command_router_access=api_pb2.CommandRouterAccess(**self._access()),
        )  # fmt: skip

    @unary("SandboxCreate")
    async def create_v1(self, request: api_pb2.SandboxCreateRequest) -> api_pb2.SandboxCreateResponse:
        sandbox = await self._create(request, v2=False)
        return api_pb2.SandboxCreateResponse(sandbox_id=sandbox.id, metadata=self._metadata(sandbox))

    @unary("SandboxGetTaskId", "SandboxGetTaskIdV2")
    async def task_id(self, request: Any) -> api_pb2.SandboxGetTaskIdResponse:
        sandbox = self._world.sandbox(request.sandbox_id)
        await sandbox.started.wait()
        return api_pb2.SandboxGetTaskIdResponse(task_id=sandbox.task_id, task_result=sandbox.result)

    @unary("SandboxGetCommandRouterAccess")
    async def access_v2(self, request: Any) -> api_pb2.SandboxGetCommandRouterAccessResponse:
        world = self._world
        sandbox = world.sandbox(request.sandbox_id) if request.sandbox_id else world.task(request.task_id)
        return api_pb2.SandboxGetCommandRouterAccessResponse(**self._access_while_running(sandbox))

    @unary("TaskGetCommandRouterAccess")
    async def access_v1(self, request: Any) -> api_pb2.TaskGetCommandRouterAccessResponse:
        sandbox = self._world.task(request.task_id)
        return api_pb2.TaskGetCommandRouterAccessResponse(**self._access_while_running(sandbox))

    def _access_while_running(self, sandbox: Sandbox) -> dict[str, str]:
        if not sandbox.running:
            raise error(Status.FAILED_PRECONDITION, "Sandbox has already shut down")
        return self._access()

    def _access(self) -> dict[str, str]:
        return {
            "url": self._world.router_url,
            "jwt": self._world.router_tokens.issue(self._world.limits.router_token_s),
        }

    @unary("SandboxWait", "SandboxWaitV2")
    async def wait(self, request: Any) -> api_pb2.SandboxWaitResponse:
        sandbox = self._world.sandbox(request.sandbox_id)
        if request.timeout > 0:
            await first_of(sandbox.ended, timeout_s=request.timeout)
        return api_pb2.SandboxWaitResponse(result=sandbox.result, metadata=self._metadata(sandbox))

    @unary("SandboxTerminate", "SandboxTerminateV2")
    async def terminate(self, request: Any) -> api_pb2.SandboxTerminateResponse:
        sandbox = self._world.sandbox(request.sandbox_id)
        before = sandbox.result
        await sandbox.finish(Result.GENERIC_STATUS_TERMINATED, 137)
        return api_pb2.SandboxTerminateResponse(existing_result=before)

    @unary("SandboxList", "SandboxListV2")
    async def list(self, request: api_pb2.SandboxListRequest) -> api_pb2.SandboxListResponse:
        wanted = {(tag.tag_name, tag.tag_value) for tag in request.tags}
        rows = [
            sandbox
            for sandbox in self._world.sandboxes.values()
            if (not request.app_id or sandbox.app_id == request.app_id)
            and (request.include_finished or sandbox.running)
            and wanted <= set(sandbox.tags.items())
            and (not request.before_timestamp or sandbox.created_at < request.before_timestamp)
        ]
        rows.sort(key=lambda sandbox: -sandbox.created_at)
        return api_pb2.SandboxListResponse(sandboxes=[self._info(row) for row in rows[: self._world.limits.page_size]])

    def _info(self, sandbox: Sandbox) -> api_pb2.SandboxInfo:
        task = api_pb2.TaskInfo(id=sandbox.task_id, started_at=sandbox.created_at, result=sandbox.result)
        return api_pb2.SandboxInfo(
            id=sandbox.id, created_at=sandbox.created_at, app_id=sandbox.app_id, name=sandbox.name, task_info=task,
            image_id=sandbox.definition.image_id, timeout_secs=sandbox.definition.timeout_secs, tunnels=sandbox.tunnels,
            tags=self._tags(sandbox), metadata=self._metadata(sandbox),
        )  # fmt: skip

    @unary("SandboxGetFromName", "SandboxGetFromNameV2")
    async def from_name(self, request: Any) -> api_pb2.SandboxGetFromNameResponse:
        app_id = self._world.apps.get((request.environment_name, request.app_name))
        rows = [
            sandbox
            for sandbox in self._world.sandboxes.values()
            if sandbox.app_id == app_id and sandbox.name == request.sandbox_name
        ]
        found = [row for row in rows if row.running] or (rows[-1:] if request.include_terminated else [])
        if not found:
            raise error(Status.NOT_FOUND, f"Sandbox with name '{request.sandbox_name}' not found")
        return api_pb2.SandboxGetFromNameResponse(sandbox_id=found[0].id, metadata=self._metadata(found[0]))

    @unary("SandboxTagsSet", "SandboxTagsSetV2")
    async def set_tags(self, request: Any) -> Empty:
        self._world.sandbox(request.sandbox_id).tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return Empty()

    @unary("SandboxTagsGet", "SandboxTagsGetV2")
    async def get_tags(self, request: Any) -> api_pb2.SandboxTagsGetResponse:
        return api_pb2.SandboxTagsGetResponse(tags=self._tags(self._world.sandbox(request.sandbox_id)))

    @unary("SandboxGetTunnels", "SandboxGetTunnelsV2")
    async def tunnels(self, request: Any) -> api_pb2.SandboxGetTunnelsResponse:
        sandbox = self._world.sandbox(request.sandbox_id)
        await sandbox.started.wait()
        success = Result(status=Result.GENERIC_STATUS_SUCCESS)
        return api_pb2.SandboxGetTunnelsResponse(result=success, tunnels=sandbox.tunnels)

    @streaming("SandboxGetLogs")
    async def logs_v1(self, request: api_pb2.SandboxGetLogsRequest, stream: Any, faults: Befallen) -> None:
        entry, offset = self._world.sandbox(request.sandbox_id).entry, int(request.last_entry_id or 0)
        stdout = request.file_descriptor == api_pb2.FILE_DESCRIPTOR_STDOUT
        async for chunk in (entry.out if stdout else entry.err).chunks(offset):
            offset += len(chunk)
            log = api_pb2.TaskLogs(data=chunk.decode(errors="replace"), file_descriptor=request.file_descriptor)
            await stream.send_message(api_pb2.TaskLogsBatch(entry_id=str(offset), items=[log]))
        await stream.send_message(api_pb2.TaskLogsBatch(entry_id=str(offset), eof=True))

    @unary("SandboxStdinWrite")
    async def stdin_v1(self, request: api_pb2.SandboxStdinWriteRequest) -> api_pb2.SandboxStdinWriteResponse:
        entry = self._world.sandbox(request.sandbox_id).entry
        await entry.write(entry.stdin_offset, request.input, request.eof)
        return api_pb2.SandboxStdinWriteResponse()

    @staticmethod
    def _metadata(sandbox: Sandbox) -> api_pb2.SandboxHandleMetadata:
        return api_pb2.SandboxHandleMetadata(app_id=sandbox.app_id, result=sandbox.result)

    @staticmethod
    def _tags(sandbox: Sandbox) -> list[api_pb2.SandboxTag]:
        return [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in sandbox.tags.items()]
