"""All the server knows: apps, images, secrets, sandboxes, tokens; and what is to go wrong."""

from __future__ import annotations

import collections
import secrets
import ssl
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpclib import Status
from modal_proto import api_pb2

from .backends import Namespaces
from .faults import Faults, Limits, error
from .sandbox import Sandbox
from .tokens import Tokens


def new_id(prefix: str, length: int = 22) -> str:
    """As Modal's: the SDK tells V1 from V2 sandboxes by the length."""
    return prefix + "-" + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


@dataclass
class Image:
    """A recipe that was asked for. Nothing is built: every image is this machine's root, with what is kept here."""

    image_id: str
    definition: api_pb2.Image
    """Its recipe: `dockerfile_commands` without those of the images it stands on, `build_args`, `secret_ids`, ..."""
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    built: bool = False
    failure: str = ""
    builds: int = 0
    """How often its build was begun."""


@dataclass
class World:
    """Changed by the emulator's loop; faults, limits and the tables that tests fill may be changed from anywhere."""

    root: Path
    backend: type[Namespaces]
    credentials: tuple[str, str]
    faults: Faults
    limits: Limits
    tunnel_context: ssl.SSLContext
    router_url: str = ""
    accepts_credentials: bool = True
    apps: dict[tuple[str, str], str] = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)
    """Published names, in the full form `environment/name:tag`, and their images."""
    image_failures: dict[str, str] = field(default_factory=dict)
    """A part of a recipe, and what its build dies of."""
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    """By name; the id is `st-` and the name."""
    sandboxes: dict[str, Sandbox] = field(default_factory=dict)
    ended: list[Sandbox] = field(default_factory=list)
    """Those the server has forgotten."""
    router_tokens: Tokens = field(default_factory=Tokens)
    """For the workers."""
    auth_tokens: Tokens = field(default_factory=Tokens)
    """For V2 calls of the control plane, in addition to the credentials."""
    replies: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Answers to calls that are done once however often they are sent."""
    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    requests: collections.deque[tuple[str, Any]] = field(default_factory=lambda: collections.deque(maxlen=2000))

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """Or NOT_FOUND."""
        if sandbox_id not in self.sandboxes:
            raise error(Status.NOT_FOUND, f"Sandbox not found: {sandbox_id}")
        return self.sandboxes[sandbox_id]

    def task(self, task_id: str) -> Sandbox:
        """The sandbox that is this task, or NOT_FOUND."""
        for sandbox in self.sandboxes.values():
            if sandbox.task_id == task_id:
                return sandbox
        raise error(Status.NOT_FOUND, f"Task not found: {task_id}")

    def running(self) -> list[Sandbox]:
        """Registered and not ended."""
        return [sandbox for sandbox in self.sandboxes.values() if sandbox.running]

    def secret_env(self, ids: Iterable[str], sources: Iterable[Any]) -> dict[str, str]:
        """The variables of secrets, given by id or inline."""
        env: dict[str, str] = {}
        for secret_id in ids:
            env |= self.secrets.get(secret_id.removeprefix("st-"), {})
        for source in sources:
            inline = source.WhichOneof("source") == "env"
            env |= dict(source.env.contents) if inline else self.secret_env([source.secret_id], ())
        return env

    def check_credentials(self, metadata: Any) -> None:
        """Of a call to the control plane."""
        given = (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret"))
        if not self.accepts_credentials or given != self.credentials:
            raise error(Status.UNAUTHENTICATED, "Token validation failed.")
        auth_token = metadata.get("x-modal-auth-token")
        if auth_token and not self.auth_tokens.valid(auth_token):
            raise error(Status.UNAUTHENTICATED, "Auth token is invalid or expired.")

    def check_router_token(self, metadata: Any) -> None:
        """Of a call to a worker."""
        if not self.router_tokens.valid((metadata.get("authorization") or "").removeprefix("Bearer ")):
            raise error(Status.UNAUTHENTICATED, "invalid or expired token")
