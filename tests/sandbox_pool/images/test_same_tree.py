"""The tree in a slot equals the tree that umoci unpacks: path, type, mode, owner, link target, attributes, content."""

from __future__ import annotations

import io
import json
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.config import ImageSettings
from support.image_layouts import Made, entry, folder, link, pack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can look into slots from outside"),
    pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed"),
]
WALKER = Path(__file__).parents[2] / "support/tree_facts.py"
USER = "hermes-rl-images"
CAPABILITY = b"\1\0\0\2\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0".decode("latin1")


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    path = tmp_path_factory.mktemp("debian") / "base.tar"
    subprocess.run(["mmdebstrap", "--variant=minbase", "bookworm", str(path)], check=True, capture_output=True)
    return path.read_bytes()


def whiteouts(base: bytes) -> Made:
    lower = [folder("d"), *(entry(f"d/{n}", data=b"1") for n in range(50)), folder("o"), entry("o/old", data=b"1")]
    lower += [folder("f"), folder("f/deep"), entry("f/deep/x", data=b"1"), entry("plain", data=b"1")]
    middle = [entry(f"d/.wh.{n}") for n in range(0, 50, 2)] + [folder("o"), entry("o/.wh..wh..opq"), entry("o/new")]
    top = [entry(".wh.f"), entry(".wh.plain"), entry("d/0", data=b"back", mode=0o600), folder("o", mode=0o700, uid=5)]
    return Made([base, pack(lower), pack(middle), pack(top)])


def odd(base: bytes) -> Made:
    hole = bytes(1 << 20) + b"end"
    entries = [
        folder("odd", mode=0o2775, gid=50), entry("odd/set-id", data=b"#", mode=0o6755),
        entry("odd/\udcff\udcfe name\n", data=b"bytes"), entry("odd/owned", data=b"o", uid=33, gid=34, mode=0o400),
        link("odd/hard", "odd/owned", tarfile.LNKTYPE), link("odd/soft", "/nowhere/../x"),
        entry("odd/pipe", tarfile.FIFOTYPE), entry("odd/holes", data=hole), folder("odd/closed", mode=0o000),
        entry("odd/closed/in", data=b"x", uid=1000, gid=1000), entry("odd/capable", data=b"c", mode=0o755,
        xattrs={"security.capability": CAPABILITY}), entry("odd/noted", data=b"n", xattrs={"user.note": "kept"}),
        folder("odd/noted-folder", mode=0o1777, xattrs={"user.note": "too"}),
    ]  # fmt: skip
    return Made([base, pack(entries)])


def sixty(base: bytes) -> Made:
    return Made([base, *(pack([folder("many"), entry(f"many/{n}"), entry("last", data=b"%d" % n)]) for n in range(59))])


def python_app(debian: bytes) -> Made:
    own = [folder("testbed", uid=1234, gid=1234), entry("testbed/a.py", data=b"1", uid=1234, gid=1234)]
    users = debian_file(debian, "./etc/passwd") + b"app:x:1234:1234::/testbed:/bin/sh\n"
    config = {"Env": ["PATH=/usr/bin:/bin", "A=1"], "WorkingDir": "/testbed", "User": "app"}
    return Made([debian, pack([*own, entry("etc/passwd", data=users)])], config)


def debian_file(layer: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        file = tar.extractfile(name)
        assert file is not None
        return file.read()


@pytest.fixture(params=["debian", "python app", "whiteouts", "odd", "sixty"])
def made(request: pytest.FixtureRequest, base: bytes) -> Made:
    if request.param in ("debian", "python app"):
        layer = request.getfixturevalue("debian")
        return Made([layer]) if request.param == "debian" else python_app(layer)
    return {"whiteouts": whiteouts, "odd": odd, "sixty": sixty}[request.param](base)


@pytest.fixture(scope="module")
def ordinary() -> Iterator[str]:
    """A user with ranges of ids."""
    if shutil.which("newuidmap") is None:
        pytest.skip("newuidmap (uidmap) is not installed")
    subprocess.run(["useradd", "--no-create-home", USER], check=True)
    try:
        if f"{USER}:" not in Path("/etc/subuid").read_text():
            pytest.skip("useradd gives no ranges of ids here")
        yield USER
    finally:
        subprocess.run(["userdel", "--force", USER], check=True)


def tree(root: str, *enter: str) -> dict[str, Any]:
    """By a process that enters the slot's user namespace, so that ids are those of the slot, and starts in its root."""
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    program = WALKER.read_text()
    done = subprocess.run([*enter, python, "-c", program, "."], check=True, capture_output=True, cwd=root)
    return json.loads(done.stdout)


def unpacked_by_umoci(name: str, bundle: Path) -> dict[str, Any]:
    subprocess.run(["umoci", "unpack", "--image", name[4:], str(bundle)], check=True, capture_output=True)
    return tree(str(bundle / "rootfs"))


def slot_process(server: int) -> int:
    """The init of the only slot, as the host numbers it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        parents[int(path.parent.name)] = (int(rest.split()[1]), head.partition("(")[2])
    return next(pid for pid, (up, name) in parents.items() if name == "slot-init" and parents[up][0] == server)


@pytest.mark.parametrize("who", ["root", "ordinary"])
async def test_the_slot_is_the_image(made: Made, who: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name = made.layout(tmp_path / "image")
    wanted = unpacked_by_umoci(name, tmp_path / "bundle")
    options: dict[str, Any] = {}
    store = Path("/var/tmp") / f"hrl-same-tree-{os.getpid()}-{who}"
    if who == "ordinary":
        user = pwd.getpwnam(request.getfixturevalue("ordinary"))
        options = {"user": user.pw_name, "python": "/usr/bin/python3"}
    config = PoolConfig(
        slots_per_host=1,
        max_hosts=1,
        state_dir=tmp_path / "state",
        provider_options=options,
        images=ImageSettings(store_dir=store),
    )
    try:
        async with SlotPool.from_config(config) as pool, pool.lease("t", SandboxSpec(image=name)) as box:
            pid = slot_process(box.host_info.pid)
            seen = tree(f"/proc/{pid}/root", "nsenter", "-t", str(pid), "-U", "-S", "0", "-G", "0")
            made_by_us = {b"tmp".hex(), b"workspace".hex(), b"etc".hex()} - wanted.keys()
    finally:
        shutil.rmtree(store, ignore_errors=True)
    seen = {path: facts for path, facts in seen.items() if path not in made_by_us}
    different = {
        bytes.fromhex(p): (seen.get(p), wanted.get(p)) for p in {*seen, *wanted} if seen.get(p) != wanted.get(p)
    }
    assert different == {}
    assert len(seen) > 20
