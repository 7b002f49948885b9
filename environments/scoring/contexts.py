"""`ToolContext`: what `compute_reward(item, result, ctx)` works with, and the frozen workspace below it.

The agent's processes are stopped, and its workspace is kept as a snapshot on the host of its slot. Every call of a
verifier goes to a *fork*: a fresh slot with those files, made on the first call that needs it. Whatever the agent did
to bash, python or the home directory outside the workspace is not there. What it left in the verifier's own paths is
removed first; tests are put in afterwards, from the host. `ctx.agent_state` reads what the agent left, untouched; only
then is the workspace copied to this machine. The slot of the rollout is given back before another is asked for, so
rollouts never hold one slot while they wait for a second. With `verification: live` there is no fork: the
calls go to the agent's own slot, where its processes still run.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shlex
import stat
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from agent_loop.model.contract import Message
from environments.sandboxes import Pool, Sandbox
from environments.scoring.verification import AgentFault, CheckTimeout, Verdict
from sandbox_pool.client.process import Process
from sandbox_pool.client.trees import TreeLimits
from sandbox_pool.errors import SandboxError, SandboxFileError
from sandbox_pool.owned_folders import make_owned_folder
from sandbox_pool.results import ExecResult, FileStat
from sandbox_pool.server.host_files import remove_tree
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from environments.roles import RolloutRoles

log = logging.getLogger(__name__)

T = TypeVar("T")
CallTool = Callable[[Sandbox, str, dict[str, Any]], Awaitable[str]]
"""Runs one tool of the model on a sandbox and gives the text that the model would read."""

EXEC_TIMEOUT_S = 180.0
MAX_READ_BYTES = 64 << 20
"""The longest file or output that is read into memory: what an agent wrote must not fill the trainer's."""


@dataclass(frozen=True)
class SearchHit:
    """One line that matched."""

    path: str
    line: int
    text: str


@dataclass(frozen=True)
class Answer:
    """What one call gave: a value, or the names of the exception's classes."""

    returned: Any = None
    raises: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class RolloutScope:
    """What belongs to one rollout from its first tool call to its reward."""

    item: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    roles: RolloutRoles | None = None


class SandboxContext:
    """Async calls on a sandbox. Relative paths start at the workspace."""

    _environment: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, sandbox: Sandbox | None, call_tool: CallTool | None = None, scope: RolloutScope | None = None
    ) -> None:
        self._sandbox = sandbox
        self._call_tool = call_tool
        self._scope = scope or RolloutScope()

    @property
    def item(self) -> Any:
        """The item of the rollout."""
        return self._scope.item

    @property
    def state(self) -> dict[str, Any]:
        """Whatever your own tools keep for the rollout; `compute_reward` finds it here again."""
        return self._scope.state

    async def judge(self, rubric: str, *, points: int = 10, votes: int | None = None, **material: Any) -> Verdict:
        """Ask `env.judge` how well the material meets the rubric: `await ctx.judge("Is it kind?", answer=text)`.

        The score is the mean of the votes, from 0 to 1. The material is quoted, and nothing in it can be read as a
        verdict. A judge that cannot be asked raises `RoleAway`, and the rollout is lost: it is never scored 0.
        """
        if self._scope.roles is None:
            raise RuntimeError("there is no judge: set env.judge (a server, such as env.judge.base_url)")
        return await self._scope.roles.judge(rubric, material, points, votes)

    async def ask_user(self, instructions: str, messages: Sequence[Message]) -> str | None:
        """What `env.user`, who plays the person of these instructions, answers; None when they are done."""
        if self._scope.roles is None:
            raise RuntimeError("there is no user: set env.user (a server), or write `user_reply`")
        return await self._scope.roles.reply(instructions, messages)

    async def sandbox(self) -> Sandbox:
        """The sandbox that the calls go to."""
        if self._sandbox is None:
            raise RuntimeError("the agent has no tools and so no sandbox (env.enabled_toolsets is empty)")
        return self._sandbox

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float = EXEC_TIMEOUT_S,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        merge_stderr: bool = True,
        user: str | None = None,
        may_time_out: bool = False,
    ) -> ExecResult:
        """Run a bash command; `output` is whole up to 64 MiB, and beyond that `truncation` says what is left out.

        Raises CheckTimeout after `timeout_s`, since exit code 124 is easily read as an answer. With `may_time_out` the
        result says so instead. `user` runs it as another user of the slot, which only root there can.
        """
        sandbox = await self.sandbox()
        result = await sandbox.exec(
            command if user is None else f"runuser -u {shlex.quote(user)} -- bash -c {shlex.quote(command)}",
            timeout_s=timeout_s,
            cwd=cwd,
            env={**self._environment, **(env or {})},
            stdin=stdin,
            merge_stderr=merge_stderr,
        )
        if result.timed_out and not may_time_out:
            raise CheckTimeout(f"`{command[:200]}` takes longer than {timeout_s:g} s")
        if result.truncation is None:
            return result
        # The log is in the slot, where the command could have put something else in its place.
        try:
            whole = await sandbox.read_file(result.truncation.log_path, length=MAX_READ_BYTES + 1)
        except SandboxFileError:
            return result
        if len(whole) > MAX_READ_BYTES:
            return result
        return replace(result, output=whole.decode("utf-8", "replace"), truncation=None)

    async def spawn(
        self, command: str, *, pty: bool = False, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a background process."""
        sandbox = await self.sandbox()
        return await sandbox.spawn(command, pty=pty, cwd=cwd, env={**self._environment, **(env or {})})

    async def terminal(self, command: str, timeout: float = EXEC_TIMEOUT_S) -> dict[str, Any]:
        """Run a bash command; hermes-agent's shape (output, exit_code). CheckTimeout when it takes longer."""
        result = await self.exec(command, timeout_s=timeout)
        return {"output": result.output, "exit_code": result.exit_code}

    async def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Whole content; OSError when it cannot be read, or is longer than `max_bytes`."""
        data = await (await self.sandbox()).read_file(path, length=max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxFileError(errno.EFBIG, f"longer than {max_bytes} bytes", path)
        return data

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Create or replace a file, with its parent directories."""
        await (await self.sandbox()).write_file(path, data.encode() if isinstance(data, str) else data)

    async def stat(self, path: str) -> FileStat:
        """What is there, without following a symlink; OSError when nothing is."""
        found = await (await self.sandbox()).stat(path)
        if found is None:
            raise SandboxFileError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    async def list_dir(self, path: str = ".") -> Sequence[str]:
        return [name for name, _ in await (await self.sandbox()).list_dir(path)]

    async def upload_file(self, local: str | Path, remote: str) -> None:
        """Copy a host file into the sandbox, byte for byte."""
        await (await self.sandbox()).upload(_existing(local, file=True), remote)

    async def upload_dir(self, local: str | Path, remote: str) -> None:
        """Copy a host directory into the sandbox."""
        await (await self.sandbox()).upload(_existing(local, file=False), remote)

    async def download_file(self, remote: str, local: str | Path) -> None:
        """Copy a file out of the sandbox, byte for byte; OSError for a link or a directory."""
        await (await self.sandbox()).download(remote, Path(local), kind="f")

    async def download_dir(self, remote: str, local: str | Path) -> None:
        """Copy a directory out of the sandbox. Links that may lead out of it are left out: the agent made them."""
        await (await self.sandbox()).download(remote, Path(local), kind="d", links=False)

    async def search(self, pattern: str, path: str = ".") -> list[SearchHit]:
        """Every line below `path` that matches an extended regular expression; OSError when not all can be read."""
        looked_for, where = shlex.quote(pattern), shlex.quote(path)
        tried = f"grep -qE -e {looked_for} /dev/null; [ $? -lt 2 ] || {{ grep -E -e {looked_for} /dev/null; exit 3; }}"
        result = await self.exec(f"{tried}; grep -rnIEZ -e {looked_for} -- {where}")
        if result.exit_code == 2:
            raise SandboxFileError(errno.EACCES, result.output.strip()[-200:], path)
        if result.exit_code > 1:
            raise ValueError(f"search for {pattern!r} failed: {result.output.strip()[:200]}")
        return _hits(result.output)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run one of the model's tools as the model would; its JSON result, or {"output": text}."""
        if self._call_tool is None:
            raise RuntimeError("this environment has no tools")
        text = await self._call_tool(await self.sandbox(), name, arguments)
        try:
            answer = json.loads(text)
        except ValueError:
            return {"output": text}
        return answer if isinstance(answer, dict) else {"output": text}

    async def remove(self, *paths: str) -> None:
        """Remove files and trees; missing ones are fine."""
        if paths:
            result = await self.exec("rm -rf -- " + " ".join(map(shlex.quote, paths)))
            if result.exit_code != 0:
                raise SandboxFileError(errno.EACCES, f"cannot be removed: {result.output.strip()[:200]}", paths[0])


def _existing(path: str | Path, file: bool) -> Path:
    local = Path(path)
    if not (local.is_file() if file else local.is_dir()):
        raise FileNotFoundError(f"there is no {'file' if file else 'directory'} {local} on the host")
    return local


def _hits(output: str) -> list[SearchHit]:
    """`path NUL number:text`, one after the other. A path may hold newlines, so only the NUL ends it."""
    found, at = [], 0
    while (nul := output.find("\0", at)) >= 0:
        end = output.find("\n", nul)
        end = len(output) if end < 0 else end
        number, _, text = output[nul + 1 : end].partition(":")
        found.append(SearchHit(output[at:nul], int(number), text))
        at = end + 1
    return found


MAX_LINKS = 40
STATE_LIMITS = TreeLimits(size=4 << 30, entries=200_000)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


async def drop_if_there(pool: Pool, snapshot: str) -> None:
    """Free a snapshot that may have gone with its host: nothing is lost by that."""
    try:
        await pool.drop_snapshot(snapshot)
    except SandboxError as error:
        log.debug("snapshot %s was gone already: %s", snapshot, error)


MOST_STORED, STORED_BYTES = 64, 16_384
"""How many files of an end state a record keeps, and how long one may be."""


class FrozenWorkspace:
    """What an agent left, as snapshots on the host of its slot. `close` drops them."""

    def __init__(self, pool: Pool, workdir: str) -> None:
        self._pool = pool
        self._workdir = workdir
        self._snapshots: list[str] = []
        self._copy: Path | None = None
        self._copying = asyncio.Lock()
        self.agent_state = AgentState(self._copied, workdir)

    @classmethod
    async def take(cls, sandbox: Sandbox, pool: Pool, whole_layer: bool = False) -> FrozenWorkspace:
        """Stop the agent's processes and keep its workspace; with `whole_layer` keep everything else it wrote too.

        Raises AgentFault when there is no workspace to keep.
        """
        frozen = cls(pool, sandbox.workdir)
        try:
            frozen._snapshots.append(await sandbox.snapshot(workspace=True, stop=True))
            if whole_layer:
                frozen._snapshots.append(await sandbox.snapshot())
        except SandboxFileError as error:
            await frozen.close()
            found = await sandbox.stat(sandbox.workdir)
            why = "gone" if found is None else f"not a folder: {found.kind}" if found.kind != "dir" else ""
            raise AgentFault(f"the workspace is {why}" if why else f"the workspace cannot be read: {error}") from error
        except BaseException:
            await frozen.close()
            raise
        return frozen

    @property
    def start(self) -> str:
        """The snapshot that verification starts from."""
        return self._snapshots[-1]

    def exported(self) -> Iterator[AsyncIterator[bytes]]:
        """The snapshots as streams of bytes, in the order in which `bring_in` wants them."""
        return (self._pool.export_snapshot(snapshot) for snapshot in self._snapshots)

    async def bring_in(self, chunks: AsyncIterable[bytes], task_id: str, spec: SandboxSpec) -> None:
        """Add a snapshot that was exported before."""
        self._snapshots.append(await self._pool.import_snapshot(chunks, task_id, spec))

    async def _copied(self) -> Path:
        """The workspace on this machine; copied on first use, since few verifiers ask for it."""
        async with self._copying:
            if self._copy is None:
                folder = await asyncio.to_thread(make_owned_folder, "frozen-")
                try:
                    await self._pool.download_snapshot(self._snapshots[0], folder / "workspace", STATE_LIMITS)
                except BaseException:
                    await asyncio.to_thread(remove_tree, folder)
                    raise
                self._copy = folder
            return self._copy / "workspace"

    async def close(self) -> None:
        """Drop the snapshots, and the copy on this machine."""
        for snapshot in self._snapshots:
            await drop_if_there(self._pool, snapshot)
        self._snapshots.clear()
        if self._copy is not None and (problems := await asyncio.to_thread(remove_tree, self._copy)):
            log.warning("a copy of a workspace stays until this process ends: %s", "; ".join(problems))


class AgentState:
    """Reads the workspace as the agent left it, whatever a verifier has done since in its own copy.

    Symlinks are followed inside the workspace only: the agent decides where they lead, and it must not reach the
    host's files. Every folder on the way is opened by its descriptor, so the host itself follows none.
    """

    def __init__(self, copied: Callable[[], Awaitable[Path]], workdir: str) -> None:
        self._copied = copied
        self._workdir = PurePosixPath(workdir)

    async def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Whole content of a file; OSError when it is missing, or longer than `max_bytes`."""
        return await self._off_loop(path, lambda root: self._read(root, path, max_bytes))

    async def stat(self, path: str) -> FileStat:
        """What is there, without following a symlink at the end; OSError when nothing is."""
        return await self._off_loop(path, lambda root: self._stat(root, path))

    async def list_dir(self, path: str = ".") -> Sequence[str]:
        """Names in a directory, sorted; OSError when it is not a directory."""
        return await self._off_loop(path, lambda root: self._list(root, path))

    async def texts(self) -> dict[str, str]:
        """Path -> text of every file and empty folder, in order; what is not text, too long or beyond `MOST_STORED` is named only."""
        try:
            return await self._off_loop(".", _texts)
        except SandboxFileError as error:  # only the view loses by it, never the score
            return {"...": f"not stored: {error}"}

    async def _off_loop(self, path: str, read: Callable[[Path], T]) -> T:
        try:
            return await asyncio.to_thread(read, await self._copied())
        except SandboxFileError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            number, text = getattr(error, "errno", None), getattr(error, "strerror", None)
            raise SandboxFileError(number or errno.EINVAL, text or str(error), path) from error

    def _read(self, root: Path, path: str, max_bytes: int) -> bytes:
        with self._found(root, path, follow=True) as (parent, name):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=parent)
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", path)
                if info.st_size > max_bytes:
                    raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", path)
                with os.fdopen(fd, "rb", closefd=False) as file:
                    return file.read(max_bytes)
            finally:
                os.close(fd)

    def _stat(self, root: Path, path: str) -> FileStat:
        with self._found(root, path, follow=False) as (parent, name):
            info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}
        return FileStat(
            kind=kinds.get(stat.S_IFMT(info.st_mode), "other"),
            size=info.st_size,
            mode=stat.S_IMODE(info.st_mode),
            mtime_ns=info.st_mtime_ns,
        )

    def _list(self, root: Path, path: str) -> list[str]:
        with self._found(root, path, follow=True) as (parent, name):
            fd = os.open(name, DIRECTORY, dir_fd=parent)
            try:
                return sorted(entry.name for entry in os.scandir(fd))
            finally:
                os.close(fd)

    @contextmanager
    def _found(self, root: Path, path: str, follow: bool) -> Iterator[tuple[int, str]]:
        """Descriptor of the folder that holds the path, and its name there: links are resolved as if the workspace
        were all there is."""
        way = [os.open(root, DIRECTORY)]
        todo = list(reversed(self._inside(PurePosixPath(path), path)))
        name, links = ".", 0
        try:
            while todo:
                name = todo.pop()
                if name == "..":
                    name = "."
                    if len(way) > 1:
                        os.close(way.pop())
                    continue
                if stat.S_ISLNK(os.stat(name, dir_fd=way[-1], follow_symlinks=False).st_mode) and (todo or follow):
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, "too many levels of symbolic links", path)
                    target = PurePosixPath(os.readlink(name, dir_fd=way[-1]))
                    name = "."
                    while target.is_absolute() and len(way) > 1:
                        os.close(way.pop())
                    todo += reversed(self._inside(target, path))
                elif todo:
                    way.append(os.open(name, DIRECTORY, dir_fd=way[-1]))
                    name = "."
            yield way[-1], name
        finally:
            for fd in way:
                os.close(fd)

    def _inside(self, path: PurePosixPath, asked: str) -> list[str]:
        if path.is_absolute():
            if not path.is_relative_to(self._workdir):
                raise OSError(errno.ENOENT, f"outside the workspace {self._workdir}", asked)
            path = path.relative_to(self._workdir)
        return [part for part in path.parts if part != "."]


def _texts(root: Path) -> dict[str, str]:
    paths = sorted(root.rglob("*"))
    filled = {path.parent for path in paths}
    files = [path for path in paths if path.is_symlink() or not path.is_dir() or path not in filled]
    found = {str(path.relative_to(root)): _text(path) for path in files[:MOST_STORED]}
    return found | ({"...": f"{len(files) - MOST_STORED} more files"} if len(files) > MOST_STORED else {})


def _text(path: Path) -> str:
    if path.is_symlink():
        return f"(link to {path.readlink()})"
    if path.is_dir():
        return "(empty folder)"
    if not path.is_file():
        return "(neither file nor folder)"
    size = path.stat().st_size
    if size > STORED_BYTES:
        return f"({size:,} bytes)"
    try:
        return path.read_text("utf-8")
    except ValueError:
        return f"({size:,} bytes, not text)"


class ToolContext(SandboxContext):
    """A frozen workspace and the fork that verification runs in. Owned by the environment, which closes it."""

    # Packages that the agent installed for its user must not be picked up.
    _environment: ClassVar[Mapping[str, str]] = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def __init__(
        self,
        lease: AbstractAsyncContextManager[Sandbox],
        frozen: FrozenWorkspace | None,
        task_id: str,
        verifier_paths: Sequence[str] = (),
        call_tool: CallTool | None = None,
        scope: RolloutScope | None = None,
    ) -> None:
        self._scope = scope or RolloutScope()
        self._lease = lease
        self._frozen = frozen
        self._task_id = task_id
        self._verifier_paths = tuple(verifier_paths)
        self._call_tool = call_tool
        self._stack = AsyncExitStack()
        self._fork: Sandbox | None = None
        self._making = asyncio.Lock()

    @property
    def task_id(self) -> str:
        """The rollout this context belongs to."""
        return self._task_id

    @property
    def agent_state(self) -> AgentState:
        """The workspace as the agent left it, read-only."""
        if self._frozen is None:
            raise RuntimeError(
                "nothing was frozen (`verification: live`, or no tools and so no workspace): read through the context"
            )
        return self._frozen.agent_state

    async def sandbox(self) -> Sandbox:
        """The fork, made on first use."""
        async with self._making:
            if self._fork is None:
                self._fork = await self._make_fork()
            return self._fork

    async def ask_python(
        self,
        module: str,
        calls: Sequence[tuple[str, Sequence[Any]]],
        *,
        python: str = "python3",
        timeout_s: float = 30.0,
    ) -> list[Answer]:
        """What functions of a Python file of the workspace return, for you to compare: nothing there decides the score.

        `calls` are names of functions with their arguments, plain data both ways. Code that crashes, hangs or answers
        something else gives answers that raise `NoAnswer`.
        """
        from environments.code_tasks.hidden_tests import NoAnswers, ask
        from environments.code_tasks.solver import decode, encode

        steps = [
            [{"op": "call", "target": name, "bind": None, "args": encode(list(arguments)), "kwargs": encode({})}]
            for name, arguments in calls
        ]
        try:
            given = await ask(self, module, steps, python=python, timeout_s=timeout_s)
            return [
                Answer(raises=tuple(one["raises"]))
                if "raises" in one
                else Answer(decode(one["returns"]))
                if "returns" in one
                else Answer(raises=("NoAnswer",), why=one["odd"])
                for [one] in given
            ]
        except (NoAnswers, ValueError, RecursionError) as error:
            return [Answer(raises=("NoAnswer",), why=str(error))] * len(steps)

    async def put_tests(self, files: Mapping[str, bytes | str]) -> None:
        """Write files from the host over whatever the agent had at these paths, a directory or a symlink included.

        Their exit code can be cheated: what they import (unittest.py, conftest.py) may be the agent's, and its code can
        end the process. Prefer `ask_python`, or run the agent's program with `exec` and compare what it prints.
        """
        await self.remove(*files)
        for path, data in files.items():
            await self.write_file(path, data)

    async def close(self) -> None:
        """Give back the fork. What it came from stays, for another try."""
        await self._stack.aclose()

    async def _make_fork(self) -> Sandbox:
        fork = await self._stack.enter_async_context(self._lease)
        await SandboxContext(fork).remove(*self._verifier_paths)
        return fork
