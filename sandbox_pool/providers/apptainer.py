"""Hosts in Apptainer (or Singularity) images on this machine: one instance per host, no root, no daemon.

    image   a SIF file or a folder as it is; an archive or a registry's image is built once into Apptainer's cache
    start   make the host's folder, start the instance with that folder in it, run the slot server inside
    stop    end the server, then the instance with whatever is left in it, then remove the folder
    list    the host folders of this user on this machine

What is particular to Apptainer is in `sandbox_pool/server/apptainer_instances.py`, which nodes of a job run as well.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, Field, field_validator

from sandbox_pool.errors import PlaceUnreachable
from sandbox_pool.images.image_source import is_for_slots
from sandbox_pool.providers.base import Texts
from sandbox_pool.providers.machines.machine_session import Machine, MachineOptions, SessionFolder
from sandbox_pool.providers.machines.machines_provider import MachinesProvider
from sandbox_pool.spec import SandboxSpec

HERE = "this machine"
NO_LIMIT = 1 << 30


class ImageOptions(BaseModel):
    """Which image hosts run in, and how."""

    apptainer: str = "apptainer"
    """The program; `singularity` where it has its old name."""
    image: str | None = None
    """Path of a SIF file or of a folder, `docker-archive:PATH`, `oci-archive:PATH` or `docker://NAME`; without it the
    registry's image of a spec. It needs a Python 3.9 or later."""
    image_python: str = "python3"
    """Interpreter in the image."""
    binds: Texts = ()
    """`SOURCE:TARGET[:ro]` of the machine, for the image; `spec.mounts` passes them on to slots."""
    nvidia: bool = False
    """Show the machine's NVIDIA GPUs inside (`--nv`)."""
    flags: Texts = ()
    """More options of `apptainer instance start`."""
    image_timeout_s: float = Field(default=1800.0, gt=0)
    """How long a registry's image or an archive may take to become a SIF file."""

    @field_validator("binds")
    @classmethod
    def _are_paths(cls, binds: tuple[str, ...]) -> tuple[str, ...]:
        for each in binds:
            if not each.startswith("/") or len(each.split(":")) > 3:
                raise ValueError(f"a bind is SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, not {each!r}")
        return binds

    def own_image(self, spec: SandboxSpec) -> str | None:
        """The image of hosts for this spec. Where there is one for all, images of specs are sent to it as layers."""
        return self.image or (spec.image if spec.image and not is_for_slots(spec.image) else None)

    def container(self, image: str | None) -> dict[str, Any]:
        """What a machine must know to run hosts in this image."""
        flags = [*(["--nv"] if self.nvidia else []), *self.flags]
        return {
            "program": self.apptainer,
            "image": image,
            "python": self.image_python,
            "binds": list(self.binds),
            "flags": flags,
        }


async def have_image(machine: Machine, options: ImageOptions, spec: SandboxSpec) -> dict[str, Any]:
    """What the machine must know, once it has the image."""
    image = options.own_image(spec)
    container = options.container(image if image == options.image else f"docker://{image}")
    path = await machine.ask("image", within_s=options.image_timeout_s, container=container)
    return {"container": {**container, "image": path}}


class ApptainerOptions(MachineOptions, ImageOptions):
    """`provider_options` of apptainer."""

    python: str = sys.executable
    """Interpreter of the program that starts instances."""


class ThisMachine(Machine):
    """Where this process runs."""

    def command(self, python: list[str]) -> list[str]:
        """Nothing is needed to get here."""
        return python

    def room(self, facts: Mapping[str, Any]) -> int:
        """As many slots as the pool asks for, as with local slots."""
        return NO_LIMIT


class ApptainerProvider(MachinesProvider[ApptainerOptions]):
    """Starts slot servers in Apptainer instances on this machine."""

    kind: ClassVar = "apptainer"
    options_model = ApptainerOptions

    async def names(self) -> Sequence[str]:
        """Only this machine."""
        return [HERE]

    def open_machine(self, name: str, folder: SessionFolder) -> Machine:
        """This machine."""
        return ThisMachine(name, self._options, folder)

    def host_key(self, spec: SandboxSpec) -> str:
        """A server builds each slot for the spec of its lease; only the image belongs to the instance."""
        return hashlib.sha256(str(self.own_image(spec)).encode()).hexdigest()[:12]

    def own_image(self, spec: SandboxSpec) -> str | None:
        """That of the options, else the spec's, where it is a registry's."""
        image = self._options.own_image(spec)
        if image is None:
            raise PlaceUnreachable("no image for hosts: set `image` in provider_options, or name one in the spec")
        return image

    def everywhere(self) -> dict[str, Any]:
        """Instances are ended with the same program."""
        return {"container": self._options.container(None)}

    async def more(self, machine: Machine, spec: SandboxSpec) -> dict[str, Any]:
        """The image, which may first have to be built."""
        return await have_image(machine, self._options, spec)
