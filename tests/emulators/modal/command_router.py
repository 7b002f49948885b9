"""The worker's side: commands in a sandbox, their input and output, and the sandbox's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from grpclib import Status
from modal_proto import task_command_router_pb2 as router_pb2

from .faults import Befallen, error
from .process import Process
from .rpc import streaming, unary
from .worker import first_of
from .world import World


class CommandRouter:
    """The RPCs of the task command router. All of them go over the network to the worker of their sandbox."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def to_worker(self, request: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do it if, when and for as long as the worker of the sandbox is reached."""
        return await self._world.task(self._target(request).task_id).worker.reached(work)

    @staticmethod
    def _target(request: Any) -> Any:
        return request.start if isinstance(request, router_pb2.TaskExecStdinWriteStreamRequest) else request

    def _process(self, request: Any) -> Process:
        process = self._world.task(request.task_id).execs.get(request.exec_id)
        if process is None:
            raise error(Status.NOT_FOUND, f"exec {request.exec_id} not found")
        if process.lost:
            raise error(Status.NOT_FOUND, f"task {request.task_id} not found")
        return process

    @unary("TaskExecStart")
    async def start(self, request: router_pb2.TaskExecStartRequest) -> router_pb2.TaskExecStartResponse:
        secrets = self._world.secret_env(request.secret_ids, request.secret_sources)
        await self._world.task(request.task_id).exec(request, {**dict(request.env), **secrets})
        return router_pb2.TaskExecStartResponse()

    @unary("TaskExecPoll")
    async def poll(self, request: router_pb2.TaskExecPollRequest) -> router_pb2.TaskExecPollResponse:
        return router_pb2.TaskExecPollResponse(**self._process(request).status())

    @unary("TaskExecWait")
    async def wait(self, request: router_pb2.TaskExecWaitRequest) -> router_pb2.TaskExecWaitResponse:
        await self._process(request).done.wait()
        return router_pb2.TaskExecWaitResponse(**self._process(request).status())

    @unary("TaskExecStdinWrite")
    async def write(self, request: router_pb2.TaskExecStdinWriteRequest) -> router_pb2.TaskExecStdinWriteResponse:
        await self._process(request).write(request.offset, request.data, request.eof)
        return router_pb2.TaskExecStdinWriteResponse()

    @unary("TaskExecStdinStatus")
    async def stdin(self, request: router_pb2.TaskExecStdinStatusRequest) -> router_pb2.TaskExecStdinStatusResponse:
        process = self._process(request)
        return router_pb2.TaskExecStdinStatusResponse(
            num_bytes_written=process.stdin_offset, closed=process.stdin_closed
        )

    @streaming("TaskExecStdinWriteStream")
    async def write_stream(self, request: Any, stream: Any, faults: Befallen) -> None:
        if request.WhichOneof("payload") != "start":
            raise error(Status.INVALID_ARGUMENT, "the first message must be start")
        process, offset = self._process(request.start), request.start.offset
        while (message := await stream.recv_message()) is not None:
            if message.WhichOneof("payload") == "end":
                await process.write(offset, b"", True)
                break
            await process.write(offset, message.data, False)
            offset += len(message.data)
        await faults.after()
        await stream.send_message(router_pb2.TaskExecStdinWriteStreamResponse())

    @streaming("TaskExecStdioRead")
    async def read(self, request: router_pb2.TaskExecStdioReadRequest, stream: Any, faults: Befallen) -> None:
        process, worker = self._process(request), self._world.task(request.task_id).worker
        sent_bytes = 0
        async for chunk in (process.err if request.file_descriptor else process.out).chunks(request.offset):
            await worker.gate()
            part = chunk[: faults.left_bytes(sent_bytes)]
            await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=part))
            sent_bytes += len(part)
            if faults.left_bytes(sent_bytes) == 0:
                raise faults.cut()
        self._process(request)

    @streaming("SandboxStdioReadV2")
    async def read_entry(self, request: Any, stream: Any, faults: Befallen) -> None:
        entry, offset = self._world.task(request.task_id).entry, request.offset
        async for chunk in (entry.err if request.file_descriptor else entry.out).chunks(offset):
            await stream.send_message(router_pb2.SandboxStdioReadV2Response(data=chunk, starting_offset=offset))
            offset += len(chunk)

    @unary("SandboxStdinWriteV2")
    async def write_entry(self, request: Any) -> router_pb2.SandboxStdinWriteV2Response:
        sandbox = self._world.task(request.task_id)
        with sandbox.activity.busy():
            await sandbox.entry.write(request.offset, request.data, request.eof)
        return router_pb2.SandboxStdinWriteV2Response()

    @unary("SandboxWaitUntilReady")
    async def wait_until_ready(self, request: Any) -> router_pb2.SandboxWaitUntilReadyTcrResponse:
        sandbox = self._world.task(request.task_id)
        if not sandbox.definition.HasField("readiness_probe"):
            raise error(Status.INVALID_ARGUMENT, "Sandbox has no readiness probe")
        await first_of(sandbox.ready, sandbox.ended, timeout_s=request.timeout)
        if sandbox.ready.is_set():
            return router_pb2.SandboxWaitUntilReadyTcrResponse(ready_at=sandbox.ready_at)
        if not sandbox.running:
            raise error(Status.FAILED_PRECONDITION, "Sandbox finished before it was ready")
        raise error(Status.DEADLINE_EXCEEDED, "not ready in time")
