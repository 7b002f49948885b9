"""The part of Nomad's HTTP interface that a pool needs. Requests are repeated only where that is safe.

Every call here may be repeated: reads, deletes, registering the same job again, and dispatches, which carry an
idempotency token. So a lost answer or a cluster without a leader is waited out up to `api_timeout_s`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from sandbox_pool.errors import SandboxError
from sandbox_pool.providers.nomad.nomad_options import NomadOptions

Json = dict[str, Any]
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 2.0
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 20.0
STREAM_SILENCE_S = 40.0
"""The event stream says `{}` every 10 s; one that is silent for so long is dead."""


class NomadError(SandboxError):
    """Nomad refused a request, or could not be reached."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NomadApi:
    """One cluster, one namespace, one token."""

    def __init__(self, options: NomadOptions) -> None:
        self._options = options
        self._base = options.address.rstrip("/")
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        """Close the connections of this loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def register(self, job: Json) -> None:
        """Make the job known, or leave it as it is when it is the same."""
        await self._call("PUT", "/v1/jobs", body={"Job": job})

    async def dispatch(self, job_id: str, token: str, meta: dict[str, str], prefix: str) -> Json:
        """One child of a parameterized job; the same token gives the same child: DispatchedJobID, EvalID."""
        body = {"Meta": meta, "IdPrefixTemplate": prefix}
        answer = await self._call(
            "PUT", f"/v1/job/{quote(job_id, safe='')}/dispatch", body=body, query={"idempotency_token": token}
        )
        return dict(answer)

    async def deregister(self, job_id: str, *, purge: bool) -> None:
        """Stop a job, with `purge` also forget it and all its allocations; one that is not there is fine."""
        query = {"purge": "true" if purge else "false"}
        try:
            await self._call("DELETE", f"/v1/job/{quote(job_id, safe='')}", query=query)
        except NomadError as error:
            if error.status != 404:
                raise

    async def jobs(self, prefix: str) -> list[Json]:
        """Jobs whose id begins so, with their Meta."""
        return list(await self._call("GET", "/v1/jobs", query={"prefix": prefix, "meta": "true"}))

    async def evaluations(self, job_id: str) -> list[Json]:
        """The scheduler's evaluations of a job."""
        return list(await self._call("GET", f"/v1/job/{quote(job_id, safe='')}/evaluations"))

    async def allocations_of(self, job_id: str) -> list[Json]:
        """Every allocation a job of this id ever had."""
        return list(await self._call("GET", f"/v1/job/{quote(job_id, safe='')}/allocations", query={"all": "true"}))

    async def allocations(self, job_prefix: str) -> list[Json]:
        """Allocations of all jobs whose id begins so."""
        query = {"filter": f'JobID matches "^{job_prefix}"', "task_states": "true"}
        return list(await self._call("GET", "/v1/allocations", query=query))

    async def allocation(self, alloc_id: str) -> Json | None:
        """One allocation in full; None when there is none."""
        try:
            return dict(await self._call("GET", f"/v1/allocation/{alloc_id}"))
        except NomadError as error:
            if error.status == 404:
                return None
            raise

    async def collect(self, alloc_id: str) -> None:
        """Have its node remove the files of an allocation that has ended."""
        await self._call("GET", f"/v1/client/allocation/{alloc_id}/gc", retry_for_s=0.0)

    async def log_tail(self, alloc_id: str, task: str, kind: str, size: int) -> str:
        """The end of what a task wrote to stdout or stderr."""
        query = {"task": task, "type": kind, "plain": "true", "origin": "end", "offset": str(size)}
        text = await self._call("GET", f"/v1/client/fs/logs/{alloc_id}", query=query, retry_for_s=0.0, as_text=True)
        return str(text)

    async def events(self, topics: list[str]) -> AsyncIterator[Json]:
        """The event stream from now on, one batch at a time; heartbeats come as empty batches. Ends by raising."""
        query = [("topic", topic) for topic in topics] + list(self._query({}).items())
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=STREAM_SILENCE_S)
        try:
            async with self._session().get(
                f"{self._base}/v1/event/stream", params=query, headers=self._headers(), timeout=timeout
            ) as response:
                if response.status != 200:
                    raise _refusal("GET", "/v1/event/stream", response.status, await response.text())
                yield {}
                buffer = b""
                async for chunk in response.content.iter_any():
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield json.loads(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise NomadError(f"the event stream of {self._base} broke: {error!r}") from error
        raise NomadError(f"the event stream of {self._base} ended")

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        query: dict[str, str] | None = None,
        retry_for_s: float | None = None,
        as_text: bool = False,
    ) -> Any:
        deadline_s = time.monotonic() + (self._options.api_timeout_s if retry_for_s is None else retry_for_s)
        pause_s = RETRY_FIRST_S
        while True:
            try:
                status, text = await self._once(method, path, body, query or {})
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = NomadError(f"Nomad at {self._base} does not answer: {str(error) or type(error).__name__}")
            else:
                if status == 200:
                    return text if as_text else json.loads(text) if text else None
                failure = _refusal(method, path, status, text)
                if not _is_temporary(status, text):
                    raise failure
            if time.monotonic() + pause_s > deadline_s:
                raise failure
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MOST_S)

    async def _once(self, method: str, path: str, body: Json | None, query: dict[str, str]) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        # `encoded`: ids of dispatched jobs contain a quoted slash, which must stay quoted.
        url = URL(f"{self._base}{path}", encoded=True).update_query(self._query(query))
        async with self._session().request(
            method,
            url,
            json=body,
            headers=self._headers(),
            timeout=timeout,
            server_hostname=self._options.tls_server_name,
        ) as response:
            return response.status, await response.text(errors="replace")

    def _query(self, query: dict[str, str]) -> dict[str, str]:
        region = {"region": self._options.region} if self._options.region else {}
        return {"namespace": self._options.namespace, **region, **query}

    def _headers(self) -> dict[str, str]:
        token = self._options.acl_token()
        return {"X-Nomad-Token": token} if token else {}

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            tls = self._options.tls()
            # Nomad allows 100 connections per address: many pools of one machine must fit.
            connector = aiohttp.TCPConnector(limit=8, ssl=True if tls is None else tls)
            session = self._sessions[loop] = aiohttp.ClientSession(connector=connector)
        return session


def _is_temporary(status: int, text: str) -> bool:
    """Whether a refusal is temporary: elections, restarts, limits."""
    return status in (429, 502, 503, 504) or (status == 500 and ("leader" in text.lower() or "EOF" in text))


def _refusal(method: str, path: str, status: int, text: str) -> NomadError:
    said = text.strip()[:500] or "nothing"
    if status == 500 and "not found" in said:
        status = 404  # Nomad's answer to a dispatch of a removed job
    if status == 403:
        said += " (the ACL token is missing, expired or not allowed to do this)"
    return NomadError(f"Nomad refused {method} {path} with {status}: {said}", status)
