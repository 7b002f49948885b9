"""Everything a slot server can leave on this machine, found from outside."""

import hashlib
import os
from pathlib import Path


def cgroup_name(scratch):
    """How the slot server names its cgroups: after its scratch directory."""
    return "hermes_" + hashlib.sha1(os.path.realpath(scratch).encode()).hexdigest()[:12]


def _read(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def processes(scratch_root, cgroups):
    """Processes that name the scratch space in their command line, or are in one of its cgroups."""
    needles = [str(scratch_root).encode(), *(name.encode() for name in cgroups)]
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        text = _read(entry / "cmdline") + _read(entry / "cgroup")
        if any(needle in text for needle in needles):
            found.append((int(entry.name), _read(entry / "cmdline").replace(b"\0", b" ").decode(errors="replace")))
    return found


def mounts(scratch_root):
    """Mounts below the scratch space, as any process of this mount namespace sees them."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(scratch_root) in line]


def cgroups(names):
    """Cgroup directories of these servers, in every hierarchy."""
    bases = [Path("/sys/fs/cgroup"), *(path for path in Path("/sys/fs/cgroup").glob("*") if path.is_dir())]
    return [str(base / name) for base in bases for name in names if (base / name).exists()]


def namespaces(pids=None):
    """Network namespaces that these processes, or any at all, are in."""
    if pids is None:
        pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = set()
    for pid in pids:
        try:
            found.add(str(Path(f"/proc/{pid}/ns/net").readlink()))
        except OSError:
            continue
    return found


def leftovers(scratch_root, cgroup_names):
    """All of it, empty when nothing is left."""
    found = {
        "processes": processes(scratch_root, cgroup_names),
        "mounts": mounts(scratch_root),
        "cgroups": cgroups(cgroup_names),
        "files": [str(path) for path in Path(scratch_root).rglob("*")] if Path(scratch_root).exists() else [],
    }
    return {kind: things for kind, things in found.items() if things}
