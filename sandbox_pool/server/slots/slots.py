"""Slots and their life: free -> leased -> resetting -> free, or quarantined when a reset cannot prove itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ..faults import SlotError, TimedOut
from ..host_files import remove_tree
from ..images.below import is_brought, shell_layer, shells
from ..isolation.cgroups import Cgroups
from ..isolation.levels import Level, Place, build_fields, run_uid, slot_root
from ..isolation.mounts import mount_fields
from ..isolation.private_files import PrivateFiles
from ..isolation.shared_memory import remove_shared_of
from .channel import Message
from .exec_messages import check_env
from .instance import Instance
from .jobs import BASH
from .proxy import ENVIRONMENT, open_proxy
from .zygote import BuildError, Zygote, slot_fields

KILL_TIMEOUT_S = 10.0
PROOF_TIMEOUT_S = 15.0
MOST_WARM = 8
"""Free slots that have a shell waiting: those that were given back last, which are leased first."""
MOST_STARTING, START_S = 64, 0.25
"""So many shells are started at the same time, for commands that found none; and how long each of them counts."""
CROWDED_RESTS_AFTER_S = 1.0
"""How long a shell waits where more of them do than the server wants."""
MOST_DYING = 64
"""At the same time. Thousands given back at once die one after another, and each has KILL_TIMEOUT_S of its own."""
MOST_REBUILDING = 4
"""At the same time: when many slots are given back at once, resets come first, and a lease builds what it waits for."""
ANSWER_TURNS = 4
"""Turns of the event loop in which the answer to a release is sent."""
PROOF = b"echo $((6*7)); read -r word _ </proc/self/status; echo $word"


class Slot:
    """One place for one task at a time."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = "free"
        self.epoch = 0
        self.task_id = ""
        self.instance: Instance | None = None
        self.shape = ""
        """What the built instance was built for; another shape needs another instance."""
        self.outcomes: dict[str, asyncio.Future[Any]] = {}
        self.layers: tuple[str, ...] = ()
        self.env: Mapping[str, str] = {}
        """Of the last lease: most likely of the next one, too."""
        self.rebuilding: asyncio.Task[None] | None = None
        """Makes the next instance, from the moment on at which the last one was proven gone."""
        self.queued = False
        """Whether that is still to begin."""
        self.unproven = ""
        """Why that failed. Such a slot is never leased again."""
        self.memory_kills = 0
        """Of its cgroup, when the instance was built."""
        self.calls = 0
        """Requests under way."""
        self.used_s = time.monotonic()
        """When the last one ended."""

    @property
    def stands(self) -> bool:
        """Whether something is built on its layers, or is about to be."""
        return self.instance is not None or self.rebuilding is not None or self.queued or self.state != "free"

    def report(self) -> dict[str, Any]:
        """As listed to clients."""
        facts = {"slot": self.index, "state": self.state, "epoch": self.epoch, "task_id": self.task_id}
        return {**facts, "idle_s": self._idle_s()}

    @property
    def busy(self) -> bool:
        """Whether a request or a background process is under way."""
        instance = self.instance
        return bool(self.calls or (instance is not None and (instance.line_running or instance.any_process_runs())))

    @property
    def last_used_s(self) -> float:
        """When the last request ended, on a line too."""
        return max(self.used_s, self.instance.line_used_s if self.instance is not None else 0.0)

    def _idle_s(self) -> float | None:
        """For how long nobody has asked for anything; None while it is busy."""
        return None if self.busy else time.monotonic() - self.last_used_s


def shape_of(spec: Mapping[str, Any], layers: Sequence[str]) -> str:
    """Everything that is fixed when a slot is built."""
    keys = ("image", "network", "cpu", "memory_mb", "disk_mb", "pids", "workdir", "user", "mounts")
    return json.dumps([{key: spec.get(key) for key in keys}, list(layers)], sort_keys=True)


def _has_mounts(shape: str) -> bool:
    """Folders of the host may be gone before the next lease, which need not want them."""
    return bool(json.loads(shape)[0]["mounts"])


async def prove_shell(instance: Instance) -> str | None:
    """None when a command runs in the slot; else what was seen instead."""
    try:
        job, _ = instance.start({"max_chars": 1000}, PROOF, b"")
        message = await asyncio.wait_for(asyncio.shield(job.exit), PROOF_TIMEOUT_S)
    except (TimedOut, SlotError) as error:
        return f"a command in the slot failed: {str(error) or 'no answer'}"
    if message.number("status") != 0 or not message.raw.startswith(b"42\nName:\n"):
        text = message.raw[: message.number("out_head")].decode("utf-8", "replace").strip()
        return f"a command in the slot failed: {text[-200:] or 'without a word'}"
    return None


class Builder:
    """Builds and destroys instances at one isolation level."""

    def __init__(self, zygote: Zygote, level: Level, place: Place, cgroups: Cgroups) -> None:
        self.zygote = zygote
        self.level = level
        self.place = place
        self.cgroups = cgroups
        self.expected_mounts: dict[bool, int] = {}
        """By whether there is an image."""
        self._shells: dict[tuple[str, str], tuple[str, ...]] = {}
        """By image and user: the shell that was seen to run there."""
        self.private: PrivateFiles | None = None
        """Hides the host's private files where slots could read them."""
        self.keep_out: list[str] = [place.scratch, place.layers]
        """What no spec may mount into a slot."""
        self._dying = asyncio.Semaphore(MOST_DYING)

    async def build(self, index: int, spec: Mapping[str, Any], layers: Sequence[str]) -> Instance:
        """A new instance that proved to be empty."""
        image = spec.get("image")
        if not image:
            return await self._build(index, spec, layers, (BASH,))
        key = str(image["key"]), str(spec.get("user") or "")
        if key not in self._shells:
            self._shells[key] = await self._find_shell(index, spec)
        return await self._build(index, spec, layers, self._shells[key])

    async def _find_shell(self, index: int, spec: Mapping[str, Any]) -> tuple[str, ...]:
        """The image's own bash, else the one that is brought along, whichever is seen to run a command."""
        problems = []
        for program in shells(self.place.below_images):
            instance = await self._build(index, spec, (), program)
            try:
                problem = await prove_shell(instance)
            finally:
                left = await self.destroy(instance, index)
            if left:
                raise BuildError("; ".join(left))
            if problem is None:
                return program
            problems.append(f"{program[-1]}: {problem}")
        raise BuildError(f"nothing can run in the image ({'; '.join(problems)})")

    async def _build(
        self, index: int, spec: Mapping[str, Any], layers: Sequence[str], program: Sequence[str]
    ) -> Instance:
        if is_brought(program):
            image = spec["image"]
            below = [*image["layers"], shell_layer(self.place.below_images)]
            spec = {**spec, "image": {**image, "layers": below}}
        hidden = self.private.hide_new() if self.private else 0
        fields = build_fields(self.level, self.place, index, spec, layers)
        fields += self._mounts(spec.get("mounts") or ())
        fields += [("cgroup", path) for path in self.cgroups.prepare(index, spec)]
        if "memory" in self.cgroups.missing and spec.get("memory_mb"):
            fields.append(("max_memory_bytes", spec["memory_mb"] << 20))  # per process: better than no limit at all
        if not self.level.namespaces:
            self._make_directories(index)
        pid, control = await self.zygote.create(slot_fields(fields))
        values = dict(fields)
        instance = Instance(
            pid,
            control,
            workdir=str(values["workdir"]),
            alias="" if self.level.namespaces else str(spec.get("workdir") or "/workspace").rstrip("/"),
            home=str(values["home"]),
            log_dir=os.path.join(str(values.get("root") or "/"), "tmp/hermes-exec"),
            env=self._environment(index, spec),
            shell_program=program,
        )
        instance.hidden = hidden
        try:
            report = await instance.ready()
            self._prove_empty(report, bool(spec.get("image")))
            if spec.get("image"):
                instance.add_environment({**self._of_image(spec, report), **self._environment(index, spec)})
            await open_proxy(instance, spec.get("network") or "none", self.level.namespaces)
        except BaseException:
            await self.destroy(instance, index)
            raise
        return instance

    def is_outdated(self, instance: Instance) -> bool:
        """Whether private files appeared on the host since it was built."""
        return self.private is not None and self.private.hide_new() != instance.hidden

    @staticmethod
    def _of_image(spec: Mapping[str, Any], report: Message) -> dict[str, str]:
        user, home = report.fields.get("user", ""), report.fields.get("home", "/")
        return {"HOME": home, "USER": user, "LOGNAME": user, **spec["image"]["env"]}

    def _mounts(self, mounts: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
        if mounts and not self.level.namespaces:
            raise BuildError(f"mounts need slots with a root of their own, which {self.level.label!r} does not give")
        try:
            return mount_fields(mounts, self.keep_out)
        except ValueError as error:
            raise BuildError(str(error)) from None

    def _environment(self, index: int, spec: Mapping[str, Any]) -> dict[str, str]:
        env = dict(spec.get("env") or {})
        if spec.get("network", "none") not in ("none", "host"):
            env = {**ENVIRONMENT, **env}
        if not self.level.namespaces:
            env.setdefault("TMPDIR", os.path.join(slot_root(self.place, index), "tmp"))
        return env

    def _make_directories(self, index: int) -> None:
        root = slot_root(self.place, index)
        owner = run_uid(self.level, self.place, index)
        uid = -1 if owner is None else owner
        for name in ("", "workspace", "home", "tmp"):
            path = os.path.join(root, name)
            os.makedirs(path, exist_ok=True)
            os.chmod(path, 0o700)
            os.chown(path, uid, uid)

    def _prove_empty(self, report: Message, has_image: bool) -> None:
        if not self.level.namespaces:
            return
        problems = []
        if report.number("processes") != 1:
            problems.append(f"{report.number('processes')} processes in a new slot")
        if report.number("upper_entries"):
            problems.append(f"{report.number('upper_entries')} entries in a new layer")
        mounts = report.number("mounts")
        expected = self.expected_mounts.setdefault(has_image, mounts)
        if mounts != expected:
            problems.append(f"{mounts} mounts instead of {expected}")
        if problems:
            raise BuildError("; ".join(problems))

    async def destroy(self, instance: Instance, index: int) -> list[str]:
        """Kill an instance with all it holds; returns what could not be proven gone."""
        async with self._dying:
            return await self._destroy(instance, index)

    async def _destroy(self, instance: Instance, index: int) -> list[str]:
        problems: list[str] = []
        if not self.level.namespaces and not instance.lost:
            instance.give_up_jobs("the slot was given back")  # before they end: their callers get no exit code
            with contextlib.suppress(SlotError, asyncio.TimeoutError):
                await asyncio.wait_for(instance.kill_all(), KILL_TIMEOUT_S)
        self.zygote.kill(instance.pid)  # first: an init that sees its socket closed would begin to kill by itself
        instance.close()
        try:
            await asyncio.wait_for(self.zygote.wait_dead(instance.pid), KILL_TIMEOUT_S)
            self.zygote.forget(instance.pid)
        except TimedOut:
            problems.append(f"init {instance.pid} did not die")
        left = await self._end_rest(index)
        if left:
            problems.append(f"processes left: {left[:5]}")
        if not self.level.namespaces:
            problems += await asyncio.to_thread(self._remove_directories, index)
        return problems

    async def _end_rest(self, index: int) -> list[int]:
        """Kill what the init did not take along, and wait for its end: full memory takes a moment to be given back.

        Returns what is still there."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while (left := self.cgroups.processes(index)) and (rest_s := deadline - time.monotonic()) > 0:
            await asyncio.gather(*(self._kill(index, pid, rest_s) for pid in dict.fromkeys(left)))
        return left

    async def _kill(self, index: int, pid: int, timeout_s: float) -> None:
        """Kill a process of a slot and wait for its end, or a moment where the kernel cannot tell of it."""
        try:
            process = os.pidfd_open(pid)
        except OSError:
            if pid in self.cgroups.processes(index):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.02)
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(process, ended.set)
        try:
            if pid in self.cgroups.processes(index):  # and so the descriptor is of this process, not of a later one
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), timeout_s)
        finally:
            loop.remove_reader(process)
            os.close(process)

    def _remove_directories(self, index: int) -> list[str]:
        failures = remove_tree(slot_root(self.place, index))
        owner = run_uid(self.level, self.place, index)
        if owner is not None:
            failures += remove_shared_of(owner)
        return [f"not removed: {path}" for path in failures[:5]]


class Slots:
    """All slots of this server."""

    def __init__(self, count: int, builder: Builder, most_shells: int, rest_after_s: float) -> None:
        self._most_shells = most_shells
        """That wait in leased slots (0.4 MB each). With more, those that were not used for longest are put to rest."""
        self._rest_after_s = rest_after_s
        """How long a shell waits for its next command where there is room."""
        self.all = [Slot(index) for index in range(count)]
        self._logins: dict[str, bytes] = {}
        """Shell state after the profiles of an image were sourced."""
        self.builder = builder
        self._rebuilding = 0
        self._to_rebuild: dict[Slot, None] = {}
        self._warm: dict[Slot, Instance] = {}
        """Free slots with a shell waiting, in the order in which they were given back."""
        self._sessions: dict[Slot, None] = {}
        """Leased slots with a shell, in the order in which they were used, as far as this server was asked."""
        self._resting: asyncio.TimerHandle | None = None
        self._starting = asyncio.Semaphore(MOST_STARTING)
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, index: int, epoch: int) -> Slot:
        """The slot, for the holder of this epoch only."""
        slot = self._at(index)
        if slot.state != "leased" or slot.epoch != epoch:
            raise SlotError(
                "stale", f"slot {index} is {slot.state} with epoch {slot.epoch}; the lease of epoch {epoch} is over"
            )
        return slot

    def layers_in_use(self) -> set[str]:
        """Layers of snapshots that slots stand on."""
        return {path for slot in self.all for path in slot.layers}

    def _at(self, index: int) -> Slot:
        if not 0 <= index < len(self.all):
            raise SlotError("refused", f"no slot {index}; this host has {len(self.all)}")
        return self.all[index]

    async def lease(self, index: int, task_id: str, spec: Mapping[str, Any], layers: Sequence[str]) -> Slot:
        """Give a free slot to a task, built for its spec."""
        slot = self._at(index)
        if slot.state != "free":
            raise SlotError("refused", f"slot {index} is {slot.state}, not free")
        slot.state = "leased"
        slot.epoch += 1
        slot.task_id = task_id
        slot.used_s = time.monotonic()
        slot.layers = tuple(layers)
        try:
            await self._fit(slot, spec, layers)
        except BaseException as error:
            await self._abandon(slot)
            if isinstance(error, (BuildError, OSError)):
                kind = "image" if spec.get("image") else "refused"
                raise SlotError(kind, f"slot {index} could not be built: {str(error) or 'no answer'}") from error
            raise
        return slot

    async def _fit(self, slot: Slot, spec: Mapping[str, Any], layers: Sequence[str]) -> None:
        self._to_rebuild.pop(slot, None)
        slot.queued = False
        if slot.rebuilding is not None:
            await asyncio.wait([slot.rebuilding])
        if slot.unproven:
            raise BuildError(slot.unproven)
        self._warm.pop(slot, None)
        shape = shape_of(spec, layers)
        login = self._login_key(slot, spec) if spec.get("login") else ""
        first = bool(login) and login not in self._logins
        instance = slot.instance
        if instance is not None and (
            slot.shape != shape or instance.lost or first or self.builder.is_outdated(instance)
        ):
            await self._clear(slot)
        if first:
            self._logins[login] = await self._log_in(slot, spec)
        if slot.instance is None:
            slot.instance = await self._build(slot, spec, layers)
            slot.shape = shape
        slot.env = check_env(spec.get("env"))
        slot.instance.set_environment(slot.env)
        if login:
            slot.instance.restore(self._logins[login], slot.instance.workdir)
        if len(self._sessions) < self._most_shells:
            slot.instance.warm_up()
            self.used(slot)

    async def _build(self, slot: Slot, spec: Mapping[str, Any], layers: Sequence[str]) -> Instance:
        instance = await self.builder.build(slot.index, spec, layers)
        slot.memory_kills = self.builder.cgroups.memory_kills(slot.index)
        return instance

    @contextlib.asynccontextmanager
    async def turn_to_start(self, instance: Instance) -> AsyncIterator[None]:
        """For a command that may need a new shell: with thousands at once there would be memory for none of them."""
        if instance.has_shell:
            yield
            return
        await self._starting.acquire()
        held = [self._starting]
        timer = asyncio.get_running_loop().call_later(START_S, lambda: held.pop().release())
        try:
            yield
        finally:
            timer.cancel()
            if held:
                held.pop().release()

    def used(self, slot: Slot) -> None:
        """A command has run in this slot; perhaps it is time for others to rest."""
        self._sessions.pop(slot, None)
        self._sessions[slot] = None
        self._rest_later()

    def _rest_later(self) -> None:
        if self._sessions and (self._resting is None or (self._is_crowded and self._resting.when() > self._soon())):
            if self._resting is not None:
                self._resting.cancel()
            after_s = CROWDED_RESTS_AFTER_S if self._is_crowded else self._rest_after_s / 2
            self._resting = asyncio.get_running_loop().call_later(after_s, self._rest_some)

    @property
    def _is_crowded(self) -> bool:
        return len(self._sessions) > self._most_shells

    @staticmethod
    def _soon() -> float:
        return asyncio.get_running_loop().time() + CROWDED_RESTS_AFTER_S

    def _rest_some(self) -> None:
        """Those that were used lately, by whatever way, come last."""
        self._resting = None
        too_many = len(self._sessions) - self._most_shells
        for number, slot in enumerate(list(self._sessions)):
            after_s = CROWDED_RESTS_AFTER_S if number < too_many else self._rest_after_s
            if slot.busy or time.monotonic() - slot.last_used_s < after_s:
                if number < too_many:
                    del self._sessions[slot]
                    self._sessions[slot] = None
            elif slot.instance is not None:
                del self._sessions[slot]
                task = asyncio.get_running_loop().create_task(slot.instance.rest())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._rest_later()

    async def _clear(self, slot: Slot) -> None:
        instance, slot.instance = slot.instance, None
        problems = await self.builder.destroy(instance, slot.index) if instance is not None else []
        if problems:
            raise BuildError("; ".join(problems))

    def _login_key(self, slot: Slot, spec: Mapping[str, Any]) -> str:
        """Without a root of its own a slot's environment names its folder."""
        place = None if self.builder.level.namespaces else slot.index
        return json.dumps([shape_of(spec, ()), spec.get("env"), place], sort_keys=True)

    async def _log_in(self, slot: Slot, spec: Mapping[str, Any]) -> bytes:
        """Source the profiles in a slot that nobody has worked in: a snapshot may hold profiles that an agent wrote."""
        slot.instance = await self.builder.build(slot.index, spec, ())
        slot.instance.set_environment(check_env(spec.get("env")))
        state = await slot.instance.log_in(spec.get("env") or {})
        await self._clear(slot)
        return state

    async def _abandon(self, slot: Slot) -> None:
        """A lease that failed leaves nothing built."""
        instance, slot.instance = slot.instance, None
        problems = await self.builder.destroy(instance, slot.index) if instance is not None else []
        slot.state = "quarantined" if problems or slot.unproven else "free"
        slot.task_id = ""

    async def release(self, index: int, epoch: int) -> dict[str, Any]:
        """Reset: kill, drop the layer, prove both. The next slot is built while nobody waits for it, and proven empty
        before it is leased. Without proof it is never leased again."""
        slot = self.get(index, epoch)
        started = time.monotonic()
        slot.state = "resetting"
        slot.outcomes.clear()
        self._sessions.pop(slot, None)
        instance, slot.instance = slot.instance, None
        problems: list[str] = []
        try:
            if instance is not None:
                problems = await self.builder.destroy(instance, index)
        except OSError as error:
            problems.append(str(error) or type(error).__name__)
        slot.state = "quarantined" if problems else "free"
        slot.task_id = ""
        if not problems and self.builder.level.namespaces and not slot.layers and not _has_mounts(slot.shape):
            self._to_rebuild[slot] = None
            slot.queued = True
            self._start_rebuilds()
        return {"clean": not problems, "problems": problems, "duration_s": time.monotonic() - started}

    def _start_rebuilds(self) -> None:
        while self._to_rebuild and self._rebuilding < MOST_REBUILDING:
            slot = next(iter(self._to_rebuild))
            del self._to_rebuild[slot]
            slot.queued = False
            self._rebuilding += 1
            slot.rebuilding = asyncio.get_running_loop().create_task(self._rebuild(slot))

    async def _rebuild(self, slot: Slot) -> None:
        """Build for a lease like the last one."""
        for _ in range(ANSWER_TURNS):  # the client need not wait for what comes now
            await asyncio.sleep(0)
        spec = json.loads(slot.shape)[0]
        try:
            slot.instance = await self._build(slot, spec, ())
        except (TimedOut, BuildError, SlotError, OSError) as error:
            slot.unproven = f"slot {slot.index} was not proven empty: {str(error) or type(error).__name__}"
            slot.state = "quarantined" if slot.state == "free" else slot.state
            return
        finally:
            slot.rebuilding = None
            self._rebuilding -= 1
            self._start_rebuilds()
        if slot.state == "free" and not self._rebuilding:  # with many at once nobody can tell which is leased next
            self._warm_up(slot, slot.instance)

    def _warm_up(self, slot: Slot, instance: Instance) -> None:
        instance.set_environment(slot.env)
        instance.warm_up()
        self._warm[slot] = instance
        if len(self._warm) > MOST_WARM:
            self._warm.pop(next(iter(self._warm))).cool_down()
