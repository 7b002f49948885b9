"""A server that answers as Nomad 1.10.5 did when it was recorded, and runs dispatched tasks as plain processes.

The shapes and texts of all answers come from `recording.json`, taken from a live agent; only ids, states and ports are
filled in. It exists for machines without Nomad, and for faults that a live cluster cannot be made to have on demand.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
import uuid
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

RECORDING = json.loads(
    (Path(__file__).parents[1] / "sandbox_pool" / "providers" / "nomad" / "recording.json").read_text()
)


def recorded(name):
    return copy.deepcopy(RECORDING[name]["body"])


def free_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


class RecordedNomad:
    """State of the cluster, and switches for what goes wrong."""

    def __init__(self, tls=None):
        self.tls = tls
        self.jobs = {}
        self.children = {}
        self.allocations = {}
        self.calls = []
        self.tokens = None
        self.full = False
        self.leaderless = 0
        self.silent = False
        self.stuck = False
        self.lose = []
        """Parts of paths; a request whose path has the first of them is done, but its answer is lost."""
        self._streams = set()
        self._index = 100
        self._processes = {}

    async def __aenter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="hrl-rec-"))
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        self.address = f"{'https' if self.tls else 'http'}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        for alloc_id in list(self._processes):
            await self._end(alloc_id)
        await self._runner.cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)

    def count(self, method, part):
        return sum(each[0] == method and part in each[1] for each in self.calls)

    async def _answer(self, request):
        path = unquote(request.raw_path.partition("?")[0])
        self.calls.append((request.method, request.raw_path))
        if self.tokens is not None and request.headers.get("X-Nomad-Token") not in self.tokens:
            return self._refuse("forbidden")
        if self.leaderless:
            self.leaderless -= 1
            return web.Response(status=500, text="No cluster leader")
        body = await request.json() if request.can_read_body else None
        answer = await self._route(request, path, body)
        if self.lose and self.lose[0] in path:
            self.lose.pop(0)
            request.transport.abort()
        return answer

    @staticmethod
    def _refuse(name):
        return web.Response(status=RECORDING[name]["status"], text=RECORDING[name]["body"])

    async def _route(self, request, path, body):
        if path == "/v1/event/stream":
            return await self._events(request)
        if path == "/v1/jobs":
            return self._register(body) if request.method == "PUT" else self._list_jobs(request.query["prefix"])
        if path == "/v1/allocations":
            return web.json_response([self._shown("allocations", each) for each in self.allocations.values()])
        parts = path.split("/")
        if path.startswith("/v1/allocation/"):
            found = self.allocations.get(parts[3])
            return web.json_response(self._full(found)) if found else self._refuse("allocation_missing")
        if path.startswith("/v1/client/"):
            return web.json_response(None)
        # Ids of children have a slash, which must arrive quoted: everything else is another endpoint.
        job_id, _, verb = request.raw_path.partition("?")[0].removeprefix("/v1/job/").partition("/")
        return await self._job(request, unquote(job_id), verb, body)

    async def _job(self, request, job_id, verb, body):
        if verb == "dispatch":
            return await self._dispatch(request, job_id, body)
        if verb == "allocations":
            mine = [each for each in self.allocations.values() if each["JobID"] == job_id]
            return web.json_response([self._shown("allocations_of", each) for each in mine])
        if verb == "evaluations":
            return web.json_response(recorded("evaluations_full" if self.full else "evaluations"))
        assert request.method == "DELETE"
        return await self._deregister(job_id, request.query["purge"] == "true")

    def _register(self, body):
        if "Job" not in body:
            return self._refuse("bare_job")
        self.jobs[body["Job"]["ID"]] = body["Job"]
        return web.json_response(recorded("register"))

    def _list_jobs(self, prefix):
        stub = next(job for job in recorded("jobs") if "/" in job["ID"])
        shown = [{**stub, "ID": each, "Meta": None, "ParentID": "", "Status": "running"} for each in self.jobs]
        for child, data in self.children.items():
            shown.append({**stub, "ID": child, "Meta": data["meta"], "Status": data["status"]})
        return web.json_response([job for job in shown if job["ID"].startswith(prefix)])

    async def _dispatch(self, request, parent, body):
        if parent not in self.jobs:
            return self._refuse("dispatch_missing")
        token = request.query["idempotency_token"]
        for child, data in self.children.items():
            if data["token"] == token:
                return web.json_response({**recorded("dispatch_again"), "DispatchedJobID": child})
        child = f"{parent}/dispatch-{body['IdPrefixTemplate']}-1794811838-{uuid.uuid4().hex[:8]}"
        self.children[child] = {"meta": body["Meta"], "token": token, "status": "pending"}
        if not self.full:
            await self.place(child)
        return web.json_response({**recorded("dispatch"), "DispatchedJobID": child})

    async def place(self, child):
        """Run the child's task, as a node would."""
        alloc_id = str(uuid.uuid4())
        job = self.jobs[child.partition("/")[0]]
        task = job["TaskGroups"][0]["Tasks"][0]
        port = free_port()
        values = {
            "NOMAD_IP_slot": "127.0.0.1",
            "NOMAD_PORT_slot": str(port),
            "NOMAD_TASK_DIR": str(self.folder / alloc_id),
            "NOMAD_ALLOC_ID": alloc_id,
            **{f"NOMAD_META_{key}": value for key, value in self.children[child]["meta"].items()},
        }

        def fill(text):
            for key, value in values.items():
                text = text.replace(f"${{{key}}}", value)
            return text

        environment = {key: fill(value) for key, value in task["Env"].items()}
        with (self.folder / f"{alloc_id}.log").open("wb") as log:
            self._processes[alloc_id] = await asyncio.create_subprocess_exec(
                sys.executable,
                *(fill(argument) for argument in task["Config"]["args"]),
                env={"PATH": os.environ["PATH"], **environment},
                stdout=log,
                stderr=log,
            )
        self.children[child]["status"] = "running"
        self.allocations[alloc_id] = {
            "ID": alloc_id,
            "JobID": child,
            "port": port,
            "client": "running",
            "desired": "run",
        }
        self._tell(alloc_id)
        return alloc_id

    async def _deregister(self, job_id, purge):
        if job_id not in self.jobs and job_id not in self.children:
            return self._refuse("deregister_missing")
        for alloc_id, data in list(self.allocations.items()):
            if data["JobID"] == job_id:
                data["desired"] = "stop"
                if not self.stuck:
                    await self._end(alloc_id)
                    data["client"] = "complete"
                self._tell(alloc_id)
                if purge:
                    del self.allocations[alloc_id]
        if purge:
            self.jobs.pop(job_id, None)
            self.children.pop(job_id, None)
        elif job_id in self.children:
            self.children[job_id]["status"] = "dead"
        return web.json_response(recorded("deregister"))

    async def _end(self, alloc_id):
        process = self._processes.pop(alloc_id, None)
        if process is not None and process.returncode is None:
            process.terminate()
            await process.wait()

    def change(self, alloc_id, client="running", desired="run"):
        """The cluster says something new of an allocation; its process goes on."""
        self.allocations[alloc_id].update(client=client, desired=desired)
        self._tell(alloc_id)

    def _shown(self, form, data):
        running = data["client"] == "running"
        task = {"slot-server": {"State": "running" if running else "dead", "Events": []}}
        fields = {
            "ID": data["ID"],
            "JobID": data["JobID"],
            "ClientStatus": data["client"],
            "DesiredStatus": data["desired"],
            "TaskStates": task,
            "ModifyIndex": data.get("index", self._index),
        }
        shape = RECORDING[form]["body"]
        return {**copy.deepcopy(shape[0] if isinstance(shape, list) else shape), **fields}

    def _full(self, data):
        shown = self._shown("allocation", data)
        shown["AllocatedResources"]["Shared"]["Ports"][0]["Value"] = data["port"]
        return shown

    def _tell(self, alloc_id):
        self._index += 1
        self.allocations[alloc_id]["index"] = self._index
        batch = copy.deepcopy(RECORDING["events"][-1])
        batch["Index"] = self._index
        event = batch["Events"][0]
        event["Payload"]["Allocation"] = {
            **event["Payload"]["Allocation"],
            **self._shown("allocation", self.allocations[alloc_id]),
        }
        for stream in () if self.silent else list(self._streams):
            stream.put_nowait({**batch, "Events": [event]})

    async def _events(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        queue = asyncio.Queue()
        self._streams.add(queue)
        with contextlib.suppress(ConnectionError):
            while True:
                try:
                    batch = await asyncio.wait_for(queue.get(), 0.2)
                except TimeoutError:
                    batch = {}
                if batch is None:
                    break
                await response.write(json.dumps(batch).encode() + b"\n")
        self._streams.discard(queue)
        return response

    def cut_streams(self):
        for stream in list(self._streams):
            stream.put_nowait(None)


def token_hash(token):
    return hashlib.sha256(token.encode()).hexdigest()
