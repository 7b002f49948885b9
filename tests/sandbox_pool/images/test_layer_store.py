"""Unpacking is safe with any layer, and the store with any number of processes, whenever they are killed."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import random
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox_pool.server.images.layer_archive import LayerRefused, Limits
from sandbox_pool.server.images.layer_store import LayerMissing, LayerStore, hex_of
from sandbox_pool.server.images.unpack import unpack_layer
from sandbox_pool.server.images.user_ids import run_module
from support.image_layouts import digest, entry, folder, link, pack

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="a user namespace is entered in a process of its own")
GB = 2**30


def unpack(layer: bytes, target: Path, limits: Limits | None = None, wanted: str | None = None) -> None:
    target.mkdir(exist_ok=True)
    unpack_layer(
        io.BytesIO(layer),
        str(target),
        digest=None,
        diff_id=wanted or digest(layer),
        limits=limits or Limits(),
        overlay="user",
    )


SECRET = b"outside"
HOSTILE = {
    "a name with dots": ([entry("a/../../outside", data=b"!")], "leaves the image"),
    "dots at the end": ([folder("a/..")], "leaves the image"),
    "behind an absolute link": ([link("a", "{outside}"), entry("a/file", data=b"!")], "behind the link"),
    "behind a link upwards": ([link("a", "../.."), entry("a/file", data=b"!")], "behind the link"),
    "behind links in a ring": ([link("a", "b"), link("b", "a"), entry("a/file", data=b"!")], "behind the link"),
    "a folder through a link": ([link("a", "{outside}"), folder("a/b", mode=0o777)], "behind the link"),
    "a hard link upwards": ([link("a", "../../outside/file", tarfile.LNKTYPE)], "leaves the image"),
    "a hard link by a link": (
        [link("a", "{outside}"), link("b", "a/file", tarfile.LNKTYPE), entry("b", data=b"!")],
        "behind the link",
    ),
    "a whiteout of its folder": ([entry("a/.wh...")], "whiteout"),
    "a whiteout through a link": ([link("a", "{outside}"), entry("a/.wh.file")], "behind the link"),
    "an opaque mark through a link": ([link("a", "{outside}"), entry("a/.wh..wh..opq")], "behind the link"),
    "below a file": ([entry("a", data=b"x"), entry("a/b", data=b"!")], "not a folder"),
    "too deep": ([entry("d/" * 300 + "x")], "a path of 301 folders"),
    "too many": ([entry(f"f{n}") for n in range(60)], "more than 50 entries"),
    "too large": ([entry("big", data=bytes(3 << 20))], "more than 1 MiB"),
    "too much that says nothing": ([entry("a", data=bytes(600 << 10), pax_headers={"k": "v" * 900_000})], "than 1 MiB"),
    "too deep behind links": (
        [entry("d/" * 200 + "x"), link("a", "d/" * 200), entry("a/" + "d/" * 200)],
        "a path of 257 folders behind links",
    ),
    "a NUL in a link": ([entry("a", tarfile.SYMTYPE, pax_headers={"linkpath": "a\0b"})], "a NUL byte"),
    "a NUL in an attribute": ([entry("a", xattrs={"user.a\0b": "x"})], "a NUL byte"),
    "a map without a size": ([entry("a", pax_headers={"GNU.sparse.map": "0,1"})], "extended header"),
    "a time of a million digits": ([entry("a", pax_headers={"mtime": "1e999980"})], "an owner or a time"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_layer_is_refused_and_touches_nothing_outside(case: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "file").write_bytes(SECRET)
    before = outside.stat(), (outside / "file").stat()
    entries, why = HOSTILE[case]
    for info, _ in entries:
        info.linkname = info.linkname.replace("{outside}", str(outside))
    limits = Limits(bytes=1 << 20, entries=50) if case.startswith("too") else Limits()
    with pytest.raises(LayerRefused, match=why):
        unpack(pack(entries), tmp_path / "layer", limits)
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_bytes() == SECRET
    after = outside.stat(), (outside / "file").stat()
    assert [(s.st_mode, s.st_uid, s.st_nlink, s.st_mtime_ns) for s in before] == [
        (s.st_mode, s.st_uid, s.st_nlink, s.st_mtime_ns) for s in after
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda layer: layer[:700],
        lambda layer: layer[:200] + b"!" + layer[201:],
        lambda layer: b"\x1f\x8b" + layer[2:],
        lambda layer: b"\x28\xb5\x2f\xfd" + layer[4:],
        lambda layer: b"not an archive at all",
        lambda layer: b"",
    ],
)
def test_a_damaged_layer_is_refused(damage, tmp_path: Path) -> None:
    layer = pack([folder("a"), entry("a/b", data=b"content" * 200)])
    with pytest.raises(LayerRefused):
        unpack(damage(layer), tmp_path / "layer", wanted=digest(layer))


def test_headers_for_all_entries_are_not_collected_without_end(tmp_path: Path) -> None:
    layer = b""
    for number in range(3):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", pax_headers={f"k{number}": "v" * 500_000}) as tar:
            layer += buffer.getvalue()[: tar.offset]
    with pytest.raises(LayerRefused, match="global headers"):
        unpack(layer + pack([entry("a")]), tmp_path / "layer")


def test_a_layer_of_very_many_small_members_is_read_in_one_go(tmp_path: Path) -> None:
    """As indexed layers have it: each file is a gzip stream of its own, with padding between some."""
    layer = pack([entry(f"f{number}", data=b"%d" % number) for number in range(800)])
    blocks = [layer[at : at + 512] for at in range(0, len(layer), 512)]
    blob = b"".join(gzip.compress(block) + bytes(7 * (at % 5 == 0)) for at, block in enumerate(blocks))
    unpack(blob, tmp_path / "layer", wanted=digest(layer))
    assert (tmp_path / "layer/f799").read_bytes() == b"799"
    with pytest.raises(LayerRefused):
        unpack(blob.rstrip(b"\0")[:-3], tmp_path / "cut", wanted=digest(layer))


def test_another_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayerRefused, match="has the digest"):
        unpack(pack([entry("a")]), tmp_path / "layer", wanted=digest(b"another"))


@pytest.mark.parametrize("form", ["gnu", "pax", "oldgnu"])
def test_sparse_files_keep_their_holes(form: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "holes").open("wb") as file:
        file.write(b"head")
        file.seek(8 << 20)
        file.write(b"tail")
        file.truncate(12 << 20)
    command = ["tar", "-c", "--sparse", f"--format={form}", "-C", str(source), "holes"]
    layer = subprocess.run(command, check=True, capture_output=True).stdout
    unpack(layer, tmp_path / "layer")
    made = tmp_path / "layer/holes"
    assert made.read_bytes() == (source / "holes").read_bytes()
    assert made.stat().st_blocks * 512 < 1 << 20


def test_entries_behind_a_link_inside_the_layer_go_where_it_leads(tmp_path: Path) -> None:
    links = [link("lib", "usr/lib"), folder("usr/share"), link("usr/share/up", "../lib"), link("abs", "/usr/share")]
    behind = ["lib/a", "usr/share/up/b", "abs/c", "abs/up/d"]
    unpack(pack([folder("usr/lib"), *links, *(entry(name, data=b"1") for name in behind)]), tmp_path / "layer")
    assert sorted(path.name for path in (tmp_path / "layer/usr/lib").iterdir()) == ["a", "b", "d"]
    assert (tmp_path / "layer/usr/share/c").read_bytes() == b"1"


def test_what_replaces_a_link_is_not_what_it_led_to(tmp_path: Path) -> None:
    led = [folder("a"), link("x", "a"), entry("x/1")]
    unpack(pack([*led, folder("x", mode=0o700), entry("x/2")]), tmp_path / "layer")
    assert [path.name for path in (tmp_path / "layer/x").iterdir()] == ["2"]
    assert (tmp_path / "layer/a").stat().st_mode & 0o777 == 0o755


def start_put(store: Path, layer: bytes, wanted: str | None = None, max_bytes: int = GB) -> subprocess.Popen[bytes]:
    asked = {"do": "put", "store": str(store), "overlay": "user", "diff_id": wanted or digest(layer)}
    command = [*run_module("layer_store"), json.dumps({**asked, "digest": None, "max_bytes": max_bytes})]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def put(store: Path, layer: bytes, **options) -> dict:
    out, _ = start_put(store, layer, **options).communicate(layer)
    return json.loads(out)


def collect(store: Path, max_bytes: int) -> dict:
    asked = {"do": "gc", "store": str(store), "overlay": "user", "max_bytes": max_bytes}
    out = subprocess.run([*run_module("layer_store"), json.dumps(asked)], capture_output=True, check=True).stdout
    return json.loads(out)


def test_a_layer_is_unpacked_once_however_many_want_it(tmp_path: Path) -> None:
    layer = pack([entry(f"f{n}", data=b"x" * 1000) for n in range(300)])
    running = [start_put(tmp_path, layer) for _ in range(3)]
    with ThreadPoolExecutor() as feeders:  # one that waits for another's lock does not read
        said = list(feeders.map(lambda process: process.communicate(layer)[0], running))
    assert sorted(json.loads(out)["had"] for out in said) == [False, True, True]
    assert len(list((tmp_path / "user/layers" / hex_of(digest(layer))).iterdir())) == 300


def test_layers_that_are_unpacked_at_the_same_time_leave_each_other_alone(tmp_path: Path) -> None:
    owner = {"uid": os.getuid(), "gid": os.getgid()}
    layers = [pack([entry("own", data=os.urandom(100), **owner)]) for _ in range(200)]
    LayerStore(str(tmp_path), "user").make()

    def put_here(layer: bytes) -> bool:
        store = LayerStore(str(tmp_path), "user")
        return store.put(digest(layer), None, Limits(), io.BytesIO(layer), GB)["had"]

    with ThreadPoolExecutor(8) as several:
        assert list(several.map(put_here, layers)) == [False] * len(layers)
    assert list((tmp_path / "user/drafts").iterdir()) == []


def test_the_layers_used_longest_ago_go_and_none_in_use(tmp_path: Path) -> None:
    layers = [pack([entry("data", data=bytes([n]) * (1 << 20))]) for n in range(4)]
    for number, layer in enumerate(layers):
        assert not put(tmp_path, layer)["had"]
        os.utime(tmp_path / "user/locks" / hex_of(digest(layer)), (number, number))
    store = LayerStore(str(tmp_path), "user")
    store.hold([digest(layers[0])])
    os.utime(tmp_path / "user/locks" / hex_of(digest(layers[0])), (0, 0))
    assert collect(tmp_path, 2 << 20)["removed"] == [digest(layers[1]), digest(layers[2])]
    with pytest.raises(LayerMissing):
        store.hold([digest(layers[1])])
    store.let_go(set())
    assert collect(tmp_path, 0)["removed"] == [digest(layers[0]), digest(layers[3])]
    assert list((tmp_path / "user/drafts").iterdir()) == []


def killed_at_random(store: Path, layer: bytes, rounds: int, seed: int) -> int:
    """Kill a put after a random part of its bytes, `rounds` times; how many came too late."""
    chance, late = random.Random(seed), 0
    for _ in range(rounds):
        process = start_put(store, layer)
        assert process.stdin is not None
        part = chance.randrange(len(layer) + 1)
        process.stdin.write(layer[:part])
        process.stdin.flush()
        process.kill()
        process.wait()
        late += (store / "user/layers" / hex_of(digest(layer))).exists()
        process.stdin.close()
    return late


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_no_half_layer_is_used_and_nothing_is_left(rounds: int, tmp_path: Path) -> None:
    layer = pack([folder("d"), *(entry(f"d/f{n}", data=os.urandom(20_000)) for n in range(200))])
    assert killed_at_random(tmp_path, layer, rounds, seed=rounds) == 0
    assert not put(tmp_path, layer)["had"]
    assert len(list((tmp_path / "user/layers" / hex_of(digest(layer)) / "d").iterdir())) == 200
    assert collect(tmp_path, 0)["removed"] == [digest(layer)]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["drafts"]


@pytest.mark.parametrize("images", [2, pytest.param(20, marks=pytest.mark.slow)])
async def test_images_of_one_base_take_it_once(images: int, tmp_path: Path) -> None:
    base = pack([entry("base", data=os.urandom(1 << 20))])
    tops = [pack([entry("own", data=os.urandom(1000))]) for _ in range(images)]
    answers = await asyncio.gather(*(asyncio.to_thread(put, tmp_path, layer) for top in tops for layer in (base, top)))
    assert sum(not answer["had"] for answer in answers) == 1 + images
    listed = LayerStore(str(tmp_path), "user").listed()
    assert sum(layer.bytes for layer in listed) == (1 << 20) + images * 1000
