"""Control plane: images. A recipe is recorded, and its build takes its time and may fail; no layer is made."""

from __future__ import annotations

import asyncio
import hashlib
import shlex

from grpclib import Status
from modal_proto import api_pb2

from .accounts import BUILDER_VERSION
from .faults import Befallen, error
from .rpc import streaming, unary
from .world import Image, World

Result = api_pb2.GenericResult


class Images:
    """Images by recipe, by id and by published name."""

    def __init__(self, world: World) -> None:
        self._world = world

    @unary("ImageGetOrCreate")
    async def get_or_create(self, request: api_pb2.ImageGetOrCreateRequest) -> api_pb2.ImageGetOrCreateResponse:
        recipe = request.image.SerializeToString(deterministic=True)
        image_id = "im-" + hashlib.sha256(recipe).hexdigest()[:22]
        image = self._world.images.get(image_id)
        if image is None:
            image = self._world.images[image_id] = self._recorded(image_id, request.image)
        if image.built and not request.force_build:
            return api_pb2.ImageGetOrCreateResponse(
                image_id=image_id, result=self._result(image), metadata=self._metadata()
            )
        image.built = False
        return api_pb2.ImageGetOrCreateResponse(image_id=image_id)

    def _recorded(self, image_id: str, definition: api_pb2.Image) -> Image:
        image = Image(image_id, definition)
        for base in definition.base_images:
            if base.image_id in self._world.images:
                image.workdir = self._world.images[base.image_id].workdir
                image.env |= self._world.images[base.image_id].env
        for command in definition.dockerfile_commands:
            keyword, _, rest = command.strip().partition(" ")
            if keyword.upper() == "WORKDIR":
                image.workdir = rest.strip()
            elif keyword.upper() == "ENV":
                image.env |= dict(pair.split("=", 1) for pair in shlex.split(rest) if "=" in pair)
        return image

    @streaming("ImageJoinStreaming")
    async def join(self, request: api_pb2.ImageJoinStreamingRequest, stream: object, faults: Befallen) -> None:
        image = self._image(request.image_id)
        if not image.built:
            image.builds += 1
            await asyncio.sleep(self._world.limits.image_build_s)
            recipe = "\n".join(image.definition.dockerfile_commands)
            image.failure = next((why for part, why in self._world.image_failures.items() if part in recipe), "")
            image.built = not image.failure
        await faults.after()
        await stream.send_message(
            api_pb2.ImageJoinStreamingResponse(
                result=self._result(image), metadata=self._metadata(), eof=True, entry_id="1"
            )
        )

    @unary("ImageFromId")
    async def from_id(self, request: api_pb2.ImageFromIdRequest) -> api_pb2.ImageFromIdResponse:
        return api_pb2.ImageFromIdResponse(image_id=self._image(request.image_id).image_id)

    @unary("ImagePublish")
    async def publish(self, request: api_pb2.ImagePublishRequest) -> api_pb2.ImagePublishResponse:
        self._world.published[request.tag] = self._image(request.image_id).image_id
        return api_pb2.ImagePublishResponse(image_id=request.image_id, revision_id="1")

    @unary("ImageGetByTag")
    async def by_tag(self, request: api_pb2.ImageGetByTagRequest) -> api_pb2.ImageGetByTagResponse:
        if request.tag not in self._world.published:
            raise error(Status.NOT_FOUND, f"Image '{request.tag}' not found")
        return api_pb2.ImageGetByTagResponse(image_id=self._world.published[request.tag])

    def _image(self, image_id: str) -> Image:
        if image_id not in self._world.images:
            raise error(Status.NOT_FOUND, f"Image {image_id} not found")
        return self._world.images[image_id]

    @staticmethod
    def _result(image: Image) -> Result:
        if image.failure:
            return Result(status=Result.GENERIC_STATUS_FAILURE, exception=image.failure)
        return Result(status=Result.GENERIC_STATUS_SUCCESS)

    @staticmethod
    def _metadata() -> api_pb2.ImageMetadata:
        return api_pb2.ImageMetadata(image_builder_version=BUILDER_VERSION)
