"""The beginning that all prompts of a run share, read once per weights and put back before each request.

llama.cpp's own prompt cache depends on what was asked before, and so do the last digits of its logprobs. Here the
shared beginning is read alone, its state saved, and slot 0 set to exactly that state before a prompt goes on from it:
as fast as the cache, and the same tokens whatever came before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from sandbox_pool.owned_folders import make_owned_folder
from sandbox_pool.server.host_files import remove_tree

SLOT = 0
WORTH_TOKENS = 16
"""A shorter beginning is read again each time."""

Post = Callable[[str, dict[str, Any]], Awaitable[Any]]


class SharedPrefix:
    """The token ids of the beginning, and the folder of its saved states (one per version of the weights)."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._folder = make_owned_folder("prefix-")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_tree(self._folder)

    @property
    def folder(self) -> str:
        """Where the server keeps the states; it wants a slash at the end."""
        return f"{self._folder}/"

    def set(self, ids: Sequence[int]) -> None:
        """Another beginning; the servers have to read it before it is used."""
        self._ids = list(ids) if len(ids) >= WORTH_TOKENS else []

    async def read(self, post: Post, version: str) -> None:
        """Have a server read it and keep the state."""
        if self._ids:
            await post("/completion", {"prompt": self._ids, "n_predict": 0, "id_slot": SLOT, "cache_prompt": False})
            await post(f"/slots/{SLOT}?action=save", {"filename": _name(version)})

    async def use(self, post: Post, version: str, body: dict[str, Any]) -> None:
        """Set the slot to the beginning, and the request to go on from there; other prompts are read whole."""
        prompt, length = body.get("prompt"), len(self._ids)
        known = isinstance(prompt, list) and len(prompt) > length > 0 and prompt[:length] == self._ids
        if known and (self._folder / _name(version)).exists():
            await post(f"/slots/{SLOT}?action=restore", {"filename": _name(version)})
            body |= {"id_slot": SLOT, "cache_prompt": True}
        else:
            body["cache_prompt"] = False

    def forget(self, version: str) -> None:
        """Weights that no longer serve."""
        (self._folder / _name(version)).unlink(missing_ok=True)


def common_prefix(prompts: Iterable[Sequence[int]]) -> list[int]:
    """What all prompts begin with; nothing when there are fewer than two different ones."""
    different = {tuple(prompt) for prompt in prompts}
    if len(different) < 2:
        return []
    low, high = min(different), max(different)
    length = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return list(low[:length])


def _name(version: str) -> str:
    return f"{version}.state"
