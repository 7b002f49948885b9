"""The layers of images on one host, by the digest of their content, each unpacked once for all who use it.

    layers/<hex>     a complete layer: it is renamed to here when it is, and never changed again
    locks/<hex>      held alone by who unpacks or removes the layer, shared by who uses it; its time is the last use
    drafts/<name>    a layer being unpacked or removed; whoever does that holds its lock, and what nobody holds goes
    notes/<hex>      what a slot must know of a layer besides its files, where there is anything
    joined/<hex>     the layer on top of those of one image, where they say something only together (joined.py)
    locks/drafts     held while a draft is made or looked for, so that none is seen before it is held

The kernel lets go of a lock when its holder dies, so a killed process leaves a draft that the next one removes, and
nothing else. Unpacking and removing run in a process of their own (`main`): as an ordinary user in a
user namespace, where files can get the owners and attributes they have in the image.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..host_files import open_private, remove_tree
from .joined import UnpackedLayer, has_lone_whiteouts, write_joined
from .layer_archive import LayerRefused, Limits
from .unpack import Unpacker, unpack_layer
from .user_ids import enter_user_namespace

SPARE = 256 << 20
"""Bytes of the file system that unpacking leaves free."""


class LayerMissing(Exception):
    """The store does not have this layer."""


@dataclass(frozen=True)
class StoredLayer:
    """One complete layer."""

    diff_id: str
    bytes: int
    used_s: float
    in_use: bool


class LayerStore:
    """A folder of layers that any number of processes of one user share."""

    def __init__(self, path: str, overlay: str) -> None:
        self.path = os.path.abspath(path)
        self.overlay = overlay
        """Prefix of overlayfs's attributes: `user` for overlays of user namespaces, `trusted` for those of root."""
        self._held: dict[str, int] = {}

    @property
    def _kind(self) -> str:
        return os.path.join(self.path, self.overlay)

    def _place(self, *names: str) -> str:
        return os.path.join(self._kind, *names)

    def make(self) -> None:
        """The folders; `NotPrivate` when other users could change what is in them."""
        os.close(open_private(self.path))
        for name in ("", "layers", "locks", "drafts", "notes", "joined"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._place(name), 0o700)

    def layer(self, diff_id: str) -> str:
        """Where this layer is or would be."""
        return self._place("layers", hex_of(diff_id))

    def missing(self, diff_ids: Iterable[str]) -> list[str]:
        """Those that are not here."""
        return [diff_id for diff_id in dict.fromkeys(diff_ids) if not os.path.isdir(self.layer(diff_id))]

    def hold(self, diff_ids: Iterable[str]) -> list[str]:
        """The folders of these layers, which nobody removes until `let_go`. Raises LayerMissing."""
        paths = []
        for diff_id in diff_ids:
            if diff_id not in self._held:
                self._held[diff_id] = self._lock_shared(diff_id)
            paths.append(self.layer(diff_id))
        return paths

    def _lock_shared(self, diff_id: str) -> int:
        if not os.path.isdir(self.layer(diff_id)):
            raise LayerMissing(diff_id)
        path = self._place("locks", hex_of(diff_id))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.utime(fd)
            if os.path.isdir(self.layer(diff_id)) and _is_at(fd, path):
                return fd
        except BlockingIOError:
            pass  # it is being removed
        os.close(fd)
        raise LayerMissing(diff_id)

    def let_go(self, keep: set[str]) -> None:
        """Others may remove all held layers but these."""
        for diff_id in self._held.keys() - keep:
            os.close(self._held.pop(diff_id))

    def listed(self) -> list[StoredLayer]:
        """Every complete layer, the one used last at the end."""
        found = []
        for name in _names(self._place("layers")):
            path = self._place("locks", name)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                continue
            with os.fdopen(fd, "r+") as file:
                text = file.read(40)
                size = int(text) if text.strip().isdigit() else 0
                found.append(StoredLayer(f"sha256:{name}", size, os.fstat(fd).st_mtime, not _lock(fd, wait=False)))
        return sorted(found, key=lambda layer: layer.used_s)

    def put(self, diff_id: str, digest: str | None, limits: Limits, source: Any, max_bytes: int) -> dict[str, Any]:
        """Unpack a layer unless it is here or another process is first. In a process of its own: see `main`."""
        lock = self._lock_alone(hex_of(diff_id))
        if os.path.isdir(self.layer(diff_id)):
            return {"had": True}
        self.remove_drafts()
        draft = self._place("drafts", f"{hex_of(diff_id)}.{os.urandom(4).hex()}")
        with self._drafts_alone():
            os.mkdir(draft, 0o755)
            held = _hold_folder(draft)
        try:
            os.chmod(draft, 0o755)
            room = shutil.disk_usage(self._kind).free - SPARE
            if room <= 0:
                raise OSError(28, f"no room for layers in {self._kind}")
            one_user, devices = enter_user_namespace.one_user, os.getuid() == 0 and not enter_user_namespace.entered
            most = Limits(**{**asdict(limits), "bytes": min(limits.bytes, room)})
            work = unpack_layer(
                source, draft, digest=digest, diff_id=diff_id, limits=most, overlay=self.overlay, one_user=one_user,
                devices=devices,
            )  # fmt: skip
            self._write_notes(diff_id, work)
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d\n" % work.bytes, 0)
            os.rename(draft, self.layer(diff_id))
        finally:
            _remove(draft)
            os.close(held)
        self.collect(max_bytes, keep={diff_id})
        return {"had": False, "bytes": work.bytes, "entries": work.entries}

    def _lock_alone(self, name: str) -> int:
        """Wait for the lock of a layer; the file that has it may have been removed meanwhile."""
        path = self._place("locks", name)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _lock(fd, wait=True)
            if _is_at(fd, path):
                return fd
            os.close(fd)

    def _write_notes(self, diff_id: str, work: Unpacker) -> None:
        path = self._place("notes", hex_of(diff_id))
        notes = {
            "implied": sorted(b"/".join(parts).hex() for parts in work.implied),
            "links": {b"/".join(parts).hex(): b"/".join(target).hex() for parts, target in work.links.items()},
            "whiteouts": sorted(b"/".join(parts).hex() for parts in work.whiteouts if parts),
            "root": work.root,
            "high_ids": sorted(work.high_ids),
        }
        if any(notes.values()):
            with open(f"{path}.{os.getpid()}", "w") as file:
                json.dump(notes, file)
            os.rename(file.name, path)

    def notes(self, diff_id: str) -> dict[str, Any]:
        """What a slot must know of a layer besides its files."""
        found: dict[str, Any] = {"implied": [], "links": {}, "whiteouts": [], "root": "", "high_ids": []}
        with contextlib.suppress(FileNotFoundError), open(self._place("notes", hex_of(diff_id))) as file:
            found.update(json.load(file))
        return found

    def needs_joining(self, diff_ids: Sequence[str]) -> bool:
        """Whether these layers, lowest first, say something only together."""
        notes = [self.notes(diff_id) for diff_id in diff_ids]
        roots = [note["root"] for note in notes if note["root"]]
        inherited_root = bool(roots) and roots[-1] == "own" and not notes[-1]["root"]
        if inherited_root or any(note["implied"] or note["links"] for note in notes):
            return True
        return any(note["whiteouts"] for note in notes) and has_lone_whiteouts(self._unpacked(diff_ids), self.overlay)

    def _unpacked(self, diff_ids: Sequence[str]) -> list[UnpackedLayer]:
        """These layers, topmost first."""
        layers = []
        for diff_id in dict.fromkeys(reversed(diff_ids)):
            notes = self.notes(diff_id)
            implied, whiteouts = (frozenset(map(bytes.fromhex, notes[name])) for name in ("implied", "whiteouts"))
            links = {bytes.fromhex(path): bytes.fromhex(target) for path, target in notes["links"].items()}
            path = os.fsencode(self.layer(diff_id))
            layers.append(UnpackedLayer(path, implied, links, whiteouts, bool(notes["root"])))
        return layers

    def joined(self, diff_ids: Sequence[str]) -> str:
        """Where the layer that joins these is or would be."""
        return self._place("joined", hashlib.sha256(",".join(diff_ids).encode()).hexdigest())

    def join(self, diff_ids: Sequence[str]) -> dict[str, Any]:
        """Make the layer that joins these, lowest first as in an image. In a process of its own: see `main`."""
        draft = self._place("drafts", f"joined.{os.urandom(4).hex()}")
        with self._drafts_alone():
            os.mkdir(draft, 0o755)
            held = _hold_folder(draft)
        try:
            os.chmod(draft, 0o755)
            write_joined(self._unpacked(diff_ids), draft, self.overlay)
            with open(f"{self.joined(diff_ids)}.of", "w") as file:
                json.dump(list(diff_ids), file)
            try:
                os.rename(draft, self.joined(diff_ids))
            except OSError:
                if not os.path.isdir(self.joined(diff_ids)):  # else another process was first
                    raise
        finally:
            _remove(draft)
            os.close(held)
        return {}

    @contextlib.contextmanager
    def _drafts_alone(self) -> Iterator[None]:
        fd = os.open(self._place("locks", "drafts"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, wait=True)
            yield
        finally:
            os.close(fd)

    def remove_drafts(self) -> list[str]:
        """What killed processes left half unpacked."""
        abandoned = {}
        with self._drafts_alone():
            for name in _names(self._place("drafts")):
                held = _hold_folder(self._place("drafts", name))
                if held >= 0:
                    abandoned[name] = held
        for name, held in abandoned.items():
            _remove(self._place("drafts", name))
            os.close(held)
        return list(abandoned)

    def collect(self, max_bytes: int, keep: Iterable[str] = ()) -> list[str]:
        """Remove the layers used longest ago until the rest takes at most `max_bytes`; never one in use."""
        kept = set(keep)
        layers = self.listed()
        total = sum(layer.bytes for layer in layers)
        removed = []
        for layer in layers:
            if total <= max_bytes:
                break
            if layer.in_use or layer.diff_id in kept:
                continue
            with _held_alone(self._place("locks", hex_of(layer.diff_id))) as alone:
                held = _hold_folder(self.layer(layer.diff_id)) if alone else -1
                if held >= 0:
                    away = self._place("drafts", f"removed-{hex_of(layer.diff_id)}.{os.urandom(4).hex()}")
                    os.rename(self.layer(layer.diff_id), away)
                    _remove(away)
                    os.close(held)
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._place("notes", hex_of(layer.diff_id)))
                    total -= layer.bytes
                    removed.append(layer.diff_id)
        if removed:
            self._remove_joined()
        return removed

    def remove_idle_locks(self) -> None:
        """Those of layers that are gone, or that a killed process never finished."""
        for name in _names(self._place("locks")):
            path = self._place("locks", name)
            if name == "drafts" or os.path.isdir(self._place("layers", name)):
                continue
            with _held_alone(path) as alone:
                if alone and not os.path.isdir(self._place("layers", name)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)

    def _remove_joined(self) -> None:
        """What joined layers of which some are gone: nobody can use it."""
        for name in _names(self._place("joined")):
            if name.endswith(".of"):
                with open(self._place("joined", name)) as file:
                    layers = json.load(file)
                if self.missing(layers):
                    _remove(self._place("joined", name[: -len(".of")]))
                    os.unlink(self._place("joined", name))


def hex_of(digest: str) -> str:
    """The part of a digest that names files; refuses what is not one."""
    kind, _, text = digest.partition(":")
    if kind != "sha256" or len(text) != 64 or not all(letter in "0123456789abcdef" for letter in text):
        raise LayerRefused(f"not a sha256 digest: {digest[:100]!r}")
    return text


def default_path() -> str:
    """Where layers are kept when nobody says: on a local disk, for all servers of this user."""
    places = [path for path in ("/scratch", "/var/tmp", "/tmp") if os.access(path, os.W_OK | os.X_OK)]
    return os.path.join((places or ["/tmp"])[0], f"hermes-rl-images-{os.getuid()}")


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def _lock(fd: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    """Whether this is the file that is there now."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _hold_folder(path: str) -> int:
    """A descriptor that holds the folder's lock until it is closed; -1 when another process does, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    if _lock(fd, wait=False):
        return fd
    os.close(fd)
    return -1


@contextlib.contextmanager
def _held_alone(path: str) -> Iterator[bool]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _lock(fd, wait=False) and _is_at(fd, path)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    """Layers have the modes of their image: a folder that even its owner may not enter."""
    if not os.path.lexists(path):
        return
    if problems := remove_tree(path):
        raise OSError(5, "; ".join(problems))


def main() -> None:
    """`{"do", "store", "overlay", ...}` as the argument; the blob on stdin; one JSON line on stdout."""
    asked = json.loads(sys.argv[1])
    store = LayerStore(asked["store"], asked["overlay"])
    try:
        store.make()
        if os.geteuid() != 0:
            enter_user_namespace()
        if asked["do"] == "put":
            limits = Limits(**asked.get("limits", {}))
            answer = store.put(asked["diff_id"], asked["digest"], limits, sys.stdin.buffer, asked["max_bytes"])
        elif asked["do"] == "join":
            answer = store.join(asked["diff_ids"])
        else:
            answer = {"drafts": store.remove_drafts(), "removed": store.collect(asked["max_bytes"])}
            store.remove_idle_locks()
    except LayerRefused as error:
        answer = {"error": str(error), "kind": "refused"}
    except OSError as error:
        answer = {"error": f"{error.strerror or error} ({error.filename or store.path})", "kind": "scratch"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the thread that reads stdin may wait for more
