"""Images of sandboxes: named in one string, built once before the first sandbox that needs them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import modal

from sandbox_pool.providers.modal.modal_calls import SDK_ERRORS, ask, fault
from sandbox_pool.providers.modal.modal_options import ModalOptions

Kind = Literal["registry", "dockerfile", "published", "id", "default"]
KINDS: tuple[Kind, ...] = ("registry", "dockerfile", "published", "id")
DEFAULT_PYTHON = "3.12"
RECIPE_ERRORS: tuple[type[BaseException], ...] = (ValueError, *SDK_ERRORS)


@dataclass(frozen=True)
class ImageName:
    """Where an image comes from."""

    kind: Kind
    text: str

    @classmethod
    def parse(cls, named: str | None) -> ImageName:
        """`registry:TAG`, `dockerfile:PATH`, `published:NAME`, `id:IMAGE_ID`; a plain text is a registry's tag."""
        if named is None:
            return cls("default", "")
        word, colon, rest = named.partition(":")
        for kind in KINDS:
            if colon and word == kind:
                if not rest:
                    raise ValueError(f"the image {named!r} names nothing: `{kind}:` is followed by what to take")
                return cls(kind, rest)
        return cls("registry", named)

    def recipe(self, options: ModalOptions) -> Any:
        """The image in the SDK's terms, not built yet."""
        secret = named_secret(options.registry_secret, options) if options.registry_secret else None
        if self.kind == "default":
            return modal.Image.debian_slim(python_version=options.add_python or DEFAULT_PYTHON)
        if self.kind == "published":
            return modal.Image.from_name(self.text, environment_name=options.environment)
        if self.kind == "id":
            return modal.Image.from_id(self.text)
        if self.kind == "registry":
            image = modal.Image.from_registry(self.text, secret=secret, add_python=options.add_python)
        else:
            path = Path(self.text).expanduser()
            if not path.is_file():
                raise ValueError(f"there is no Dockerfile {self.text!r}")
            image = modal.Image.from_dockerfile(
                path,
                context_dir=options.context_dir or path.parent,
                registry_secret=secret,
                add_python=options.add_python,
            )
        # Its own entrypoint would be put before the command of the sandbox.
        return image.entrypoint([])


def named_secret(name: str, options: ModalOptions) -> Any:
    """A secret of the account, in the SDK's terms."""
    return modal.Secret.from_name(name, environment_name=options.environment)


class Images:
    """Built images by name. Starts that need the same one wait for the same build."""

    def __init__(self, options: ModalOptions) -> None:
        self._options = options
        self._builds: dict[str | None, asyncio.Task[Any]] = {}

    async def built(self, named: str | None, app: Any) -> Any:
        """The image, ready to use. Cancelling one caller does not stop the build: others may need it."""
        task = self._builds.get(named)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._builds[named] = asyncio.get_running_loop().create_task(self._build(named, app))
        return await asyncio.shield(task)

    async def _build(self, named: str | None, app: Any) -> Any:
        what = f"image {named or 'of Modal'}"
        try:
            image = ImageName.parse(named).recipe(self._options)
        except RECIPE_ERRORS as error:
            raise fault(what, error) from error
        return await ask(what, image.build.aio(app), self._options.build_timeout_s)

    async def close(self) -> None:
        """Stop waiting for builds; Modal keeps what it has built."""
        for task in self._builds.values():
            task.cancel()
        await asyncio.gather(*self._builds.values(), return_exceptions=True)
        self._builds.clear()
