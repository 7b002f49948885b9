"""Control plane: the account's own things (environment, apps, secrets, mounts), none of which does anything here."""

from __future__ import annotations

from grpclib import Status
from modal_proto import api_pb2

from .faults import error
from .rpc import unary
from .world import World, new_id

BUILDER_VERSION = "2025.06"


class Accounts:
    """What the SDK asks for before and around sandboxes."""

    def __init__(self, world: World) -> None:
        self._world = world

    @unary("ClientHello")
    async def hello(self, request: object) -> api_pb2.ClientHelloResponse:
        return api_pb2.ClientHelloResponse(image_builder_version=BUILDER_VERSION)

    @unary("AuthTokenGet")
    async def auth_token(self, request: object) -> api_pb2.AuthTokenGetResponse:
        return api_pb2.AuthTokenGetResponse(token=self._world.auth_tokens.issue(self._world.limits.auth_token_s))

    @unary("EnvironmentGetOrCreate")
    async def environment(
        self, request: api_pb2.EnvironmentGetOrCreateRequest
    ) -> api_pb2.EnvironmentGetOrCreateResponse:
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER_VERSION, webhook_suffix="")
        metadata = api_pb2.EnvironmentMetadata(name=request.deployment_name or "main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-emulated", metadata=metadata)

    @unary("AppGetOrCreate")
    async def app(self, request: api_pb2.AppGetOrCreateRequest) -> api_pb2.AppGetOrCreateResponse:
        key = (request.environment_name, request.app_name)
        if key not in self._world.apps:
            if request.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise error(Status.NOT_FOUND, f"App '{request.app_name}' not found in environment 'main'.")
            self._world.apps[key] = new_id("ap")
        return api_pb2.AppGetOrCreateResponse(app_id=self._world.apps[key])

    @unary("SecretGetOrCreate")
    async def secret(self, request: api_pb2.SecretGetOrCreateRequest) -> api_pb2.SecretGetOrCreateResponse:
        name, secrets = request.deployment_name, self._world.secrets
        anonymous = request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_ANONYMOUS_OWNED_BY_APP
        if not (anonymous or request.env_dict):
            if name not in secrets:
                raise error(Status.NOT_FOUND, f"Secret '{name}' not found in environment 'main'.")
            return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{name}")
        name = name or new_id("anonymous")
        secrets[name] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{name}")

    @unary("MountGetOrCreate")
    async def mount(self, request: object) -> api_pb2.MountGetOrCreateResponse:
        return api_pb2.MountGetOrCreateResponse(mount_id=new_id("mo"))

    @unary("MountBatchedCheckExistence")
    async def all_exist(self, request: object) -> api_pb2.MountBatchedCheckExistenceResponse:
        return api_pb2.MountBatchedCheckExistenceResponse()

    @unary("MountPutFile")
    async def put_file(self, request: object) -> api_pb2.MountPutFileResponse:
        return api_pb2.MountPutFileResponse(exists=True)
