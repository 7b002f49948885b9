"""The tree in a slot equals the tree that umoci unpacks and the one that podman gives a container: path, type, mode,
owner, link target, attributes, times, content. As root, and as an ordinary user with podman as that user beside it.
"""

from __future__ import annotations

import io
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.config import ImageSettings
from sandbox_pool.errors import ImageError
from support.image_layouts import Made, entry, folder, link, pack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can look into slots from outside"),
    pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed"),
]
WALKER = Path(__file__).parents[2] / "support/tree_facts.py"
USER = f"hermes-rl-img-{os.getpid()}"
UNNAMED_ROOT = ["0o40555", 0, 0, []]
"""What podman makes of a root that no layer names; umoci and docker give it the mode 755, as we do."""
CAPABILITY = b"\1\0\0\2\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0".decode("latin1")


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    path = tmp_path_factory.mktemp("debian") / "base.tar"
    subprocess.run(["mmdebstrap", "--variant=minbase", "bookworm", str(path)], check=True, capture_output=True)
    return path.read_bytes()


def same(name: str, target: str, **facts: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Another name of a file, with its owner and mode, as every program writes it."""
    return entry(name, tarfile.LNKTYPE, linkname=target, **facts)


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
        same("odd/hard", "odd/owned", uid=33, gid=34, mode=0o400), link("odd/soft", "/nowhere/../x"),
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


def replaced(base: bytes) -> Made:
    """Folders become files, links and folders again; whiteouts and opaque folders across several layers."""
    first = [folder("a"), entry("a/1", data=b"1"), folder("b"), entry("b/1", data=b"1"), entry("c", data=b"c")]
    first += [link("d", "b"), folder("e", mode=0o700), folder("e/in"), entry("e/in/1"), link("f", "nowhere")]
    first += [entry("h1", data=b"hard"), same("h2", "h1"), same("h3", "h1")]
    first += [folder("o"), folder("o/p"), entry("o/p/1", data=b"1"), entry("o/1", data=b"1")]
    second = [entry("a", data=b"now a file"), link("b", "c"), folder("c", mode=0o750, gid=7), entry("c/2", data=b"2")]
    second += [folder("d"), entry("d/2", data=b"2"), entry("e/.wh.in"), entry("f", data=b"f"), entry(".wh.h2")]
    second += [folder("o"), entry("o/.wh..wh..opq"), folder("o/p"), entry("o/p/2", data=b"2")]
    third = [folder("a", mode=0o711), entry("a/3", data=b"3"), folder("b"), entry("b/3"), entry("c/.wh.2")]
    third += [folder("e"), folder("e/in", mode=0o1777), entry("e/in/3"), entry(".wh.f"), entry("h2", data=b"new")]
    third += [folder("o"), folder("o/p"), entry("o/p/3"), entry("o/1", data=b"back"), entry(".wh.never-there")]
    return Made([base, pack(first), pack(second), pack(third)])


def named(base: bytes) -> Made:
    """Names of every length and form, as each dialect of tar writes them."""
    deep = "/".join(["deep" * 10] * 12)
    names = [
        "n" * 255,
        "ü" * 127,
        "e\u0301",
        "\udc80\udcff",
        " ",
        "-rf",
        "a\\b",
        "tab\there",
        "new\nline",
        "*?[",
        "\x7f\x01",
    ]
    layers = []
    for number, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        top = f"names{number}"
        entries = [folder(top), *(entry(f"{top}/{name}", data=name.encode(errors="surrogateescape")) for name in names)]
        entries += [link(f"{top}/to", "t" * 300), same(f"{top}/hard", f"{top}/{'n' * 255}")]
        parts = deep.split("/")
        entries += [folder(f"{top}/{'/'.join(parts[:depth])}") for depth in range(1, len(parts) + 1)]
        layers.append(pack([*entries, entry(f"{top}/{deep}/x", data=b"deep")], form=form))
    ustar = [folder("u"), folder(f"u/{'v' * 90}"), entry(f"u/{'v' * 90}/{'w' * 99}", data=b"prefix")]
    return Made([base, *layers, pack(ustar, form=tarfile.USTAR_FORMAT)])


def repeated(base: bytes) -> Made:
    """The same name twice in a layer, the same layer twice, empty layers."""
    twice = [entry("t", data=b"first", mode=0o600), folder("u"), entry("u/x"), entry("t", data=b"second", mode=0o640)]
    twice += [entry("u", data=b"u is a file"), link("v", "t"), folder("v"), entry("v/in"), folder("v", mode=0o700)]
    twice += [entry("w", data=b"w"), same("w", "t", mode=0o640), entry("x/late/1"), folder("x"), folder("x/late")]
    empty = pack([])
    removed = pack([entry(".wh.t"), entry(".wh.v")])
    return Made([base, empty, pack(twice), removed, empty, pack(twice)])


def implied(base: bytes) -> Made:
    """Folders that a layer puts something into without naming them: they stay as they are below, links included."""
    lower = [folder("tmp", mode=0o1777), folder("own", mode=0o2750, uid=12, gid=34), folder("own/deep", mode=0o700)]
    lower += [folder("real"), entry("real/1", data=b"1"), link("linked", "real"), link("far", "/real"), folder("x")]
    upper = [
        entry("tmp/file"),
        entry("own/deep/file", data=b"2"),
        entry("fresh/made/file"),
        entry("linked/2", data=b"2"),
    ]
    upper += [entry("far/3", data=b"3"), entry("x/.wh.nothing")]
    return Made([base, pack(lower), pack(upper), pack([entry("own/third"), entry("fresh/made/again")])])


def written_by_tar(base: bytes, tmp_path: Path) -> Made:
    """Sparse files, access lists, capabilities, times and owners as GNU tar writes them, in both of its dialects.

    The engines refuse sparse files in GNU's own dialect; tests of unpacking have those.
    """
    root = tmp_path / "written"
    root.mkdir()
    layers = []
    for number, form in enumerate(("--format=gnu", "--format=pax")):
        top = root / f"tar{number}"
        top.mkdir()
        with (top / "holes").open("wb") as file:
            for offset in range(0, 40 << 20, 4 << 20):
                file.seek(offset)
                file.write(b"data")
            file.truncate(50 << 20)
        (top / "exact").write_bytes(b"x")
        os.utime(top / "exact", ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
        (top / "listed").write_bytes(b"acl")
        subprocess.run(["setfacl", "-m", "u:1000:rw,g:50:r", top / "listed"], check=True)
        os.chown(top / "exact", 65534, 60000)
        (top / "bound").write_bytes(b"c")
        subprocess.run(["setcap", "cap_net_raw+ep", top / "bound"], check=True)
        os.mknod(top / "device", 0o640 | stat.S_IFCHR, os.makedev(1, 5))
        os.mknod(top / "block", 0o640 | stat.S_IFBLK, os.makedev(7, 300))
        words = ["--numeric-owner", *(["--sparse", "--xattrs", "--xattrs-include=*", "--acls"] if number else [])]
        done = subprocess.run(["tar", "-C", root, form, *words, "-c", top.name], check=True, capture_output=True)
        layers.append(done.stdout)
    return Made([base, *layers])


def linked_across(base: bytes) -> Made:
    """Hard links to files of layers below: the two are one file again, with all other names that it has."""
    first = [folder("l"), entry("l/a", data=b"a", mode=0o640, uid=3), entry("l/b", data=b"b"), same("l/b2", "l/b")]
    first += [entry("l/gone", data=b"gone"), entry("l/new", data=b"old"), entry("l/kept", data=b"k")]
    first += [folder("l/d"), entry("l/d/in", data=b"in", mode=0o4755), link("l/to-d", "d"), entry("l/capable",
        data=b"c", xattrs={"security.capability": CAPABILITY})]  # fmt: skip
    second = [same("a-again", "l/a", mode=0o640, uid=3), same("l/b3", "l/b2")]
    second += [same("l/d/more", "l/d/in", mode=0o4755), same("deep/er/in", "l/d/in", mode=0o4755)]
    second += [same("l/capable2", "l/capable", xattrs={"security.capability": CAPABILITY}), same("old-gone", "l/gone")]
    third = [same("third", "a-again", mode=0o640, uid=3), entry("l/.wh.gone"), entry("l/new", data=b"new")]
    third += [same("l/new2", "l/new"), same("l/kept", "l/b"), entry("l/b3", data=b"apart")]
    return Made([base, pack(first), pack(second), pack(third)])


def hidden(base: bytes) -> Made:
    """Whiteouts and opaque marks in every order and place: before and after what they stand beside, of links, behind
    links, over files, twice, of what is not there, in folders that no entry names."""
    names = "abcdefghij"
    first = [*(folder(n) for n in names), *(entry(f"{n}/{m}", data=m.encode()) for n in names for m in names)]
    first += [entry("file", data=b"f"), link("soft", "a"), link("broken", "nowhere"), folder("deep"), folder("deep/er")]
    first += [entry("deep/er/x", data=b"x"), folder("deep/other"), entry("deep/other/y"), folder("k"), folder("k/k")]
    first += [entry("k/k/k", data=b"k"), folder("real"), entry("real/1"), entry("real/2"), link("way", "real")]
    second = [entry("a/new", data=b"n"), folder("a", mode=0o711), entry("a/.wh..wh..opq"), entry("b/.wh..wh..opq")]
    second += [folder("b"), entry("b/a", data=b"again"), entry("c/.wh..wh..opq"), entry("d/.wh.a"), entry("d/.wh.a")]
    second += [folder("e"), entry("e/new", data=b"e"), entry(".wh.e"), entry(".wh.soft"), entry(".wh.broken")]
    second += [entry(".wh.f"), folder("f"), entry("f/new", data=b"f"), folder("file"), entry("file/.wh..wh..opq")]
    second += [entry("file/in"), entry("deep/.wh.er"), entry("deep/er/z", data=b"z"), entry("g/.wh.nothing")]
    second += [folder("nowhere-else"), entry("nowhere-else/.wh.x"), entry("k/k/.wh..wh..opq"), entry("way/.wh.1")]
    second += [entry("h", data=b"file now"), entry(".wh..wh.plnk", tarfile.DIRTYPE), entry("i/.wh..wh.aufs")]
    third = [folder("h"), entry("h/z"), entry("k/.wh.k"), folder("e"), entry("e/.wh.new"), entry("e/third")]
    third += [
        entry(".wh.file"),
        entry("file", data=b"f3"),
        entry("b/.wh.a"),
        entry("b/b", data=b"b3"),
        entry("j/.wh.j"),
    ]
    return Made([base, pack(first), pack(second), pack(third)])


def rooted(base: bytes) -> Made:
    """The root itself has a mode, and later layers that do not name it leave them."""
    root = folder("./", mode=0o2751)
    return Made([pack([root]), base, pack([entry("etc/x"), entry("y", data=b"y")]), pack([entry(".wh.y")])])


def behind_links(base: bytes) -> Made:
    """Entries behind links of the same layer and of layers below, absolute and upwards, within the image."""
    first = [folder("run", mode=0o750), folder("var"), link("var/run", "/run"), entry("var/run/pid", data=b"1")]
    first += [folder("usr"), folder("usr/lib"), folder("usr/share"), link("usr/share/lib", "../lib")]
    first += [entry("usr/share/lib/x", data=b"x"), link("lib64", "usr/lib"), entry("lib64/y", data=b"y")]
    first += [folder("a"), link("a/up", "../usr/../run"), entry("a/up/sock", data=b"s"), link("two", "lib64")]
    second = [entry("var/run/second", data=b"2"), entry("usr/share/lib/x", data=b"xx"), entry("two/z", data=b"z")]
    second += [folder("var/run/d", mode=0o700), entry("var/run/d/in"), entry("lib64/.wh.y"), entry("a/up/sock2")]
    return Made([base, pack(first), pack(second)])


def many(base: bytes) -> Made:
    """As many layers as docker allows: 127 in all."""
    layers = (pack([entry(f"n/{n % 7}/{n}", data=b"%d" % n), entry(f"n/{n % 7}/.wh.{n - 7}")]) for n in range(126))
    return Made([base, *layers])


def dialects(base: bytes) -> Made:
    """What older and other writers do: no end of the archive, one empty block, a folder of the oldest form, global
    headers, times after 2106."""
    plain = pack([folder("x"), entry("x/1", data=b"1", mtime=86400), entry("x/2", mtime=5_000_000_000)])
    unended = plain.rstrip(b"\0")
    unended += bytes(-len(unended) % 512)
    old = pack([entry("old", tarfile.REGTYPE), entry("old/in", data=b"i")], form=tarfile.USTAR_FORMAT)
    old = _as_oldest_folder(old)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as tar:
        tar.addfile(folder("global")[0])
        tar.addfile(entry("global/x", data=b"x", mtime=1.25)[0], io.BytesIO(b"x"))
    return Made([base, unended + bytes(512), unended, old, buffer.getvalue()])


def _as_oldest_folder(layer: bytes) -> bytes:
    """The first entry as before 1988: no type, and a slash at the end of the name says that it is a folder."""
    block = bytearray(layer[:512])
    block[: len(b"old/")] = b"old/"
    block[100:108] = b"0000755\0"
    block[156:157] = b"\0"
    block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + layer[512:]


def high_ids(base: bytes) -> Made:
    return Made([base, pack([entry("high", data=b"h", uid=70_000, gid=1_000_000), folder("h", uid=2_000_000_000)])])


SMALL = {
    "whiteouts": whiteouts,
    "odd": odd,
    "sixty": sixty,
    "replaced": replaced,
    "named": named,
    "repeated": repeated,
    "implied": implied,
    "high ids": high_ids,
    "linked across": linked_across,
    "hidden": hidden,
    "rooted": rooted,
    "behind links": behind_links,
    "many": many,
    "dialects": dialects,
}


@pytest.fixture(params=["debian", "python app", *SMALL, "written by tar"])
def made(request: pytest.FixtureRequest, base: bytes, tmp_path: Path) -> Made:
    if request.param in ("debian", "python app"):
        layer = request.getfixturevalue("debian")
        return Made([layer]) if request.param == "debian" else python_app(layer)
    if request.param == "written by tar":
        if shutil.which("setfacl") is None or shutil.which("setcap") is None:
            pytest.skip("setfacl (acl) or setcap (libcap2-bin) is not installed")
        return written_by_tar(base, tmp_path)
    return SMALL[request.param](base)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="hrl-same-tree-", dir="/var/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


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


def in_podman(name: str, user: str | None) -> dict[str, Any]:
    """The tree of a container that podman made, looked at with the container's ids."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    with tempfile.TemporaryDirectory(prefix="hrl-podman-", dir="/var/tmp", ignore_cleanup_errors=True) as work:
        storage = ["podman", "--root", f"{work}/root", "--runroot", f"{work}/run", "--storage-driver", "vfs"]
        become, environment = [], {**os.environ, "HOME": work, "XDG_RUNTIME_DIR": work}
        if user:
            shutil.chown(work, user)
            become = ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]

        def run(*words: str) -> str:
            done = subprocess.run(
                [*become, *words], check=True, capture_output=True, text=True, env=environment, cwd="/"
            )
            return done.stdout.strip()

        try:
            image = run(*storage, "pull", "--quiet", name)
            container = run(*storage, "create", "--network=none", image, "true")
            enter = [*storage, "unshare"] if user else []
            look = f'cd "$("$@" mount {container})" && exec python3 -c "$0" .'
            return json.loads(run(*enter, "sh", "-c", look, WALKER.read_text(), *storage))
        finally:
            remove = [*storage, "unshare"] if user else []
            subprocess.run([*become, *remove, "rm", "-rf", f"{work}/root"], env=environment, cwd="/", check=False)
            for path in Path(work).glob("**/pause.pid"):  # podman's, which holds the namespaces of an ordinary user
                os.kill(int(path.read_text()), signal.SIGKILL)


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


def without_access_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """Podman's vfs storage copies a layer to the next one, and access lists are lost on the way."""
    return {
        path: [
            [each for each in fact if not each[0].startswith("system.posix_acl")] if isinstance(fact, list) else fact
            for fact in facts
        ]
        for path, facts in tree.items()
    }


def differences(seen: dict[str, Any], wanted: dict[str, Any]) -> dict[bytes, Any]:
    """Paths with what is there and what should be; apart from folders that a slot has and the image lacks."""
    ours = {b"tmp".hex(), b"workspace".hex(), b"etc".hex()} - wanted.keys()
    if wanted[""] == UNNAMED_ROOT:
        ours.add("")
    paths = {*seen, *wanted} - ours
    return {bytes.fromhex(p): (seen.get(p), wanted.get(p)) for p in paths if seen.get(p) != wanted.get(p)}


@pytest.mark.parametrize("who", ["root", "ordinary"])
async def test_the_slot_is_the_image(
    made: Made, who: str, open_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = made.layout(open_path / "image")
    options: dict[str, Any] = {}
    store = Path("/var/tmp") / f"hrl-same-tree-{os.getpid()}-{who}"
    if who == "ordinary":
        user = request.getfixturevalue("ordinary")
        options = {"user": user, "python": "/usr/bin/python3"}
        judges = {"podman": lambda: in_podman(name, user)}
    else:
        judges = {
            "umoci": lambda: unpacked_by_umoci(name, tmp_path / "bundle"),
            "podman": lambda: in_podman(name, None),
        }
    wanted: dict[str, dict[str, Any]] = {}
    refused = ""
    for judge, ask in judges.items():
        try:
            wanted[judge] = ask()
        except subprocess.CalledProcessError as error:
            print(f"{judge} refuses this image: {error.stderr[-300:]!r}")
            refused = str(error.stderr)
    config = PoolConfig(
        slots_per_host=1,
        max_hosts=1,
        state_dir=tmp_path / "state",
        provider_options=options,
        images=ImageSettings(store_dir=store),
    )
    try:
        async with SlotPool.from_config(config) as pool:
            if "insufficient UIDs" in refused:
                with pytest.raises(ImageError, match="/etc/subuid"):
                    await pool.acquire("t", SandboxSpec(image=name))
                return
            async with pool.lease("t", SandboxSpec(image=name)) as box:
                pid = slot_process(box.host_info.pid)
                seen = tree(f"/proc/{pid}/root", "nsenter", "-t", str(pid), "-U", "-S", "0", "-G", "0")
    finally:
        shutil.rmtree(store, ignore_errors=True)
    if not wanted:
        wanted["umoci"] = unpacked_by_umoci(name, tmp_path / "bundle")
    if "podman" in wanted:
        found = {"podman": differences(without_access_lists(seen), without_access_lists(wanted.pop("podman")))}
    else:
        found = {}
    found |= {judge: differences(seen, tree) for judge, tree in wanted.items()}
    assert {judge: paths for judge, paths in found.items() if paths} == {}
    assert found
    assert len(seen) > 20
