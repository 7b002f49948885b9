"""Promises about a git repository, read from its object store.

No git program is run: the one in the workspace may have been replaced, and running ours on a hostile repository would
run what its config says. Objects that git wrote as loose files are read; a packed repository counts as unreadable,
which no task here leads to.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass

from environments.scoring.verification import VerifierContext, read_or_none
from environments.terminal_tasks.checks import show

MAX_OBJECT_BYTES = 1_000_000
MAX_HISTORY = 50
MAX_ENTRIES = 1000
MAX_DEPTH = 50
OBJECT_ID = re.compile(r"[0-9a-f]{40}")


class Unreadable(Exception):
    """The repository is missing, packed or broken; the message is the failure sentence."""


@dataclass(frozen=True)
class Commit:
    """What a check wants to know of one commit."""

    tree: str
    parents: tuple[str, ...]
    message: str


class Repository:
    """Read-only view of the loose objects and refs under `path/.git`."""

    def __init__(self, ctx: VerifierContext, path: str) -> None:
        self._ctx = ctx
        self._git = f"{path}/.git"

    async def head_branch(self) -> str:
        """Name of the branch that is checked out."""
        head = (await read_or_none(self._ctx, f"{self._git}/HEAD") or b"").decode(errors="replace").strip()
        if not head.startswith("ref: refs/heads/") or not head.isprintable():
            raise Unreadable(f"{self._git}/HEAD is on no branch")
        return head.removeprefix("ref: refs/heads/")

    async def resolve(self, ref: str) -> str:
        """Object id of a full ref name such as `refs/heads/main`."""
        loose = await read_or_none(self._ctx, f"{self._git}/{ref}")
        if loose is not None:
            return loose.decode(errors="replace").strip()
        packed = (await read_or_none(self._ctx, f"{self._git}/packed-refs") or b"").decode(errors="replace")
        for line in packed.splitlines():
            object_id, _, name = line.partition(" ")
            if name == ref:
                return object_id
        raise Unreadable(f"{self._git} has no {ref}")

    async def commit(self, object_id: str) -> Commit:
        """Read one commit; an annotated tag is followed to its commit."""
        kind, body = await self._object(object_id)
        header, _, message = body.decode(errors="replace").partition("\n\n")
        fields = [line.partition(" ")[::2] for line in header.splitlines()]
        if kind == "tag":
            kind, body = await self._object(dict(fields).get("object", ""))
            header, _, message = body.decode(errors="replace").partition("\n\n")
            fields = [line.partition(" ")[::2] for line in header.splitlines()]
        if kind != "commit":
            raise Unreadable(f"{object_id} in {self._git} is not a commit")
        parents = tuple(value for key, value in fields if key == "parent")
        return Commit(dict(fields).get("tree", ""), parents, message.strip())

    async def history(self, object_id: str) -> list[Commit]:
        """The commit and its first parents, newest first."""
        commits: list[Commit] = []
        while len(commits) < MAX_HISTORY:
            commits.append(await self.commit(object_id))
            if not commits[-1].parents:
                break
            object_id = commits[-1].parents[0]
        return commits

    async def files(self, tree_id: str) -> dict[str, bytes]:
        """Path and content of every file of a tree."""
        found: dict[str, bytes] = {}
        todo = [(tree_id, "")]
        while todo:
            tree, prefix = todo.pop()
            kind, body = await self._object(tree)
            if kind != "tree":
                raise Unreadable(f"{tree} in {self._git} is not a tree")
            while body:
                head, _, rest = body.partition(b"\0")
                mode, _, name = head.partition(b" ")
                child, body = rest[:20].hex(), rest[20:]
                path = prefix + name.decode(errors="replace")
                if len(found) + len(todo) > MAX_ENTRIES or path.count("/") > MAX_DEPTH:
                    raise Unreadable(f"{self._git} holds a tree that is too large")
                if mode == b"40000":
                    todo.append((child, path + "/"))
                else:
                    found[path] = (await self._object(child))[1]
        return found

    async def _object(self, object_id: str) -> tuple[str, bytes]:
        if not OBJECT_ID.fullmatch(object_id):
            raise Unreadable(f"{self._git} refers to {show(object_id)}, which is not an object")
        raw = await read_or_none(self._ctx, f"{self._git}/objects/{object_id[:2]}/{object_id[2:]}")
        if raw is None:
            raise Unreadable(f"{self._git} has no loose object {show(object_id)}")
        try:
            data = zlib.decompressobj().decompress(raw, MAX_OBJECT_BYTES)
        except zlib.error as error:
            raise Unreadable(f"object {object_id} in {self._git} is damaged") from error
        if hashlib.sha1(data).hexdigest() != object_id:
            # A true hash also rules out objects that refer to themselves.
            raise Unreadable(f"object {object_id} in {self._git} is forged or too large")
        head, _, body = data.partition(b"\0")
        return head.decode(errors="replace").partition(" ")[0], body


@dataclass(frozen=True)
class BranchIs:
    """HEAD is on this branch."""

    repo: str
    branch: str

    async def failure(self, ctx: VerifierContext) -> str | None:
        try:
            found = await Repository(ctx, self.repo).head_branch()
        except Unreadable as error:
            return str(error)
        return None if found == self.branch else f"{self.repo} is on branch {show(found)}"


@dataclass(frozen=True)
class CommitIs:
    """The ref leads to a commit with just these files, this message and history, as far as they are given."""

    repo: str
    ref: str
    """A full ref name, or HEAD for the branch that is checked out."""
    files: tuple[tuple[str, str], ...] | None = None
    message: str | None = None
    earlier: tuple[str, ...] | None = None
    """Messages of the commits before it, newest first."""
    merges: int | None = None
    """Number of parents."""

    async def failure(self, ctx: VerifierContext) -> str | None:
        repo = Repository(ctx, self.repo)
        try:
            ref = f"refs/heads/{await repo.head_branch()}" if self.ref == "HEAD" else self.ref
            history = await repo.history(await repo.resolve(ref))
            files = await repo.files(history[0].tree) if self.files is not None else {}
        except Unreadable as error:
            return str(error)
        return self._difference(history, files)

    def _difference(self, history: list[Commit], files: dict[str, bytes]) -> str | None:
        newest, older = history[0], tuple(commit.message for commit in history[1:])
        if self.message is not None and newest.message != self.message:
            return f"the last commit of {self.ref} says {show(newest.message)}"
        if self.earlier is not None and older != self.earlier:
            return f"{self.ref} has another history: {show(', '.join(older))}"
        if self.merges is not None and len(newest.parents) != self.merges:
            return f"the last commit of {self.ref} has {len(newest.parents)} parents"
        if self.files is not None and _trimmed(files) != _trimmed({n: text.encode() for n, text in self.files}):
            return f"the last commit of {self.ref} holds other files: {show(', '.join(sorted(files)))}"
        return None


def _trimmed(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files without the line ends at their end: whether a last line is ended is not what a task is about."""
    return {name: data.rstrip(b"\n") for name, data in files.items()}
