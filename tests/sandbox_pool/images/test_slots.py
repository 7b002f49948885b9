"""A slot with an image is that image: its whole root, its environment, working directory and user."""

from __future__ import annotations

import logging
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.errors import ImageError
from sandbox_pool.server.images.inflate import ZSTD
from support.image_layouts import Made, busybox, entry, folder, link, pack

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.getuid() != 0, reason="files of several users need root, or ranges in /etc/subuid"),
]


@pytest.mark.parametrize("kind", ["layout", "oci_archive", "docker_archive"])
async def test_environment_working_directory_and_user_are_those_of_the_image(
    pool: SlotPool, app: Made, tmp_path: Path, kind: str
) -> None:
    name = getattr(app, kind)(tmp_path / "image")
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        result = await box.exec('id; pwd; echo "$GREETING|$PATH|$HOME|$HOME_SWEET"; touch mine; stat -c %u:%g mine')
        assert result.output.splitlines() == [
            "uid=1234(app) gid=1235(app) groups=777(extra),1235(app)",
            "/app",
            "a b=c|/opt/tool/bin:/bin|/home/app|$HOME",
            "1234:1235",
        ]
        assert box.workdir == "/app"
        await box.write_file("put.txt", b"by the file calls")
        assert (await box.exec("stat -c %U put.txt; echo >/dev/stdout")).exit_code == 0
        process = await box.spawn("id -u; sleep 0", pty=True)
        assert await process.wait() == 0
        assert "1234" in (await process.log()).data


async def test_a_spec_overrides_what_the_image_says(pool: SlotPool, app: Made, tmp_path: Path) -> None:
    spec = SandboxSpec(image=app.layout(tmp_path), user="0", workdir="/srv/work", env={"GREETING": "mine"})
    async with pool.lease("t", spec) as box:
        assert (await box.exec("id -u; pwd; echo $GREETING")).output == "0\n/srv/work\nmine\n"


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("", "0 0 /root 0"),
        ("app", "1234 1235 /home/app 1235 777"),
        ("1234", "1234 1235 /home/app 1235 777"),
        ("app:extra", "1234 777 /home/app 777"),
        ("app:", "1234 1235 /home/app 1235 777"),
        (":777", "0 777 /root 777"),
        ("4321", "4321 0 / 0"),
        ("4321:55", "4321 55 / 55"),
    ],
)
async def test_users_mean_what_they_mean_to_engines(
    pool: SlotPool, base: bytes, tmp_path: Path, user: str, ids: str
) -> None:
    """As `podman run` answers for the same image."""
    name = Made([base], {"User": user}).layout(tmp_path)
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        seen = (await box.exec("echo $(id -u) $(id -g) $HOME $(id -G)")).output.split()
    assert seen[:3] == ids.split()[:3]
    assert sorted(set(seen[3:])) == ids.split()[3:]


async def test_a_working_directory_that_is_none_is_an_error(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    name = Made([base], {"WorkingDir": "/etc/passwd"}).layout(tmp_path / "a")
    with pytest.raises(ImageError, match="working directory: Not a directory"):
        await pool.acquire("t", SandboxSpec(image=name))
    missing = Made([base], {"WorkingDir": "made/up", "User": "app"}).layout(tmp_path / "b")
    async with pool.lease("t", SandboxSpec(image=missing)) as box:
        assert (await box.exec("pwd; stat -c %u:%g .")).output == "/made/up\n1234:1235\n"


async def test_a_root_of_one_file_gets_what_a_slot_needs_and_a_shell(
    pool: SlotPool, base: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = Made([pack([entry("busybox", data=busybox(), mode=0o755)])]).layout(tmp_path)
    with caplog.at_level(logging.INFO):
        async with pool.lease("t", SandboxSpec(image=name)) as box:
            result = await box.exec("echo ${BASH_VERSION::1}; /busybox ls /; pwd; echo x > /dev/null && /busybox id -u")
    assert result.output.split() == ["5", "busybox", "dev", "etc", "proc", "sys", "tmp", "workspace", "/workspace", "0"]
    assert "has no bash" in caplog.text


async def test_where_nothing_can_run_the_lease_fails(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    broken = pack([folder("bin"), entry("bin/bash", data=b"not a program", mode=0o755), link("proc", "/etc")])
    with pytest.raises(ImageError, match="/dev, /proc and /sys"):
        await pool.lease("t", SandboxSpec(image=Made([broken]).layout(tmp_path / "a")))
    with pytest.raises(ImageError, match="/etc/passwd"):
        await pool.lease("t", SandboxSpec(image=Made([base]).layout(tmp_path / "b"), user="nobody-here"))
    async with pool.lease("t") as box:  # and the slot is still good
        assert (await box.exec("echo $((6*7))")).output == "42\n"


@pytest.mark.parametrize(
    ("entries", "shown"),
    [
        ([link("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf")], "/run/systemd/resolve/stub-resolv.conf"),
        ([folder("run"), entry("run/own"), link("etc/resolv.conf", "/run/own")], "/run/own"),
        ([link("etc/resolv.conf", "../../../../../etc/elsewhere")], "/etc/elsewhere"),
        ([link("etc/hosts", "/made/hosts")], "/made/hosts"),
    ],
    ids=["as systemd has it", "to a file", "upwards", "hosts"],
)
async def test_where_links_of_etc_lead_our_files_are_shown(
    pool: SlotPool, base: bytes, tmp_path: Path, entries: list[tuple[tarfile.TarInfo, bytes]], shown: str
) -> None:
    """As engines do it, which make the file where it is missing."""
    spec = SandboxSpec(image=Made([base, pack(entries)]).layout(tmp_path), network="host")
    for _ in range(2):
        async with pool.lease("t", spec) as box:
            seen = (await box.exec(f"cat {shown} /etc/resolv.conf; cat /etc/hosts; cat /proc/self/mountinfo")).output
        assert f" {shown} " in seen
        assert "127.0.0.1\tlocalhost" in seen
    looped = Made([base, pack([link("etc/resolv.conf", "resolv.conf")])]).layout(tmp_path / "loop")
    with pytest.raises(ImageError, match="file in /etc of the image: Too many levels"):
        await pool.acquire("t", SandboxSpec(image=looped))


@pytest.mark.parametrize(
    "users",
    [entry("etc/passwd", tarfile.FIFOTYPE), link("etc/passwd", "/dev/zero"), entry("etc/passwd", data=bytes(8 << 20))],
    ids=["a pipe", "without end", "too large"],
)
async def test_users_that_cannot_be_read_are_an_error_at_once(
    pool: SlotPool, base: bytes, tmp_path: Path, users: tuple[tarfile.TarInfo, bytes]
) -> None:
    name = Made([base, pack([users])], {"User": "app"}).layout(tmp_path)
    with pytest.raises(ImageError, match="find the user of the image in its /etc/passwd"):
        await pool.acquire("t", SandboxSpec(image=name), timeout_s=15)


async def test_a_shell_that_is_brought_along_takes_what_the_image_says_to_loaders(
    pool: SlotPool, base: bytes, tmp_path: Path
) -> None:
    environment = {"LD_LIBRARY_PATH": "/opt/lib", "LD_PRELOAD": "/opt/lib/none.so", "TMPDIR": "/app"}
    name = Made([base], {"Env": [f"{key}={value}" for key, value in environment.items()]}).layout(tmp_path)
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        seen = (await box.exec("env")).output.splitlines()
        assert {f"{key}={value}" for key, value in environment.items()} <= {*seen}
        process = await box.spawn("env")
        assert await process.wait() == 0
        assert "LD_LIBRARY_PATH=/opt/lib" in (await process.log()).data


async def test_layers_hide_replace_and_merge(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    lower = pack(
        [
            folder("d"), entry("d/kept", data=b"1"), entry("d/gone", data=b"1"), folder("d/sub"),
            entry("d/sub/x", data=b"1"),
            folder("opaque"), entry("opaque/old", data=b"1"), entry("file-to-folder", data=b"1"),
            folder("folder-to-file"), entry("folder-to-file/x", data=b"1"),
            folder("again"), entry("again/old", data=b"1"),
        ]
    )  # fmt: skip
    upper = pack(
        [
            entry("d/.wh.gone"), entry("d/.wh.sub"), entry("d/new", data=b"2"),
            folder("opaque"), entry("opaque/.wh..wh..opq"), entry("opaque/young", data=b"2"),
            entry(".wh.again"), folder("again"), entry("again/young", data=b"2"),
            entry(".wh.file-to-folder"), folder("file-to-folder"), entry("file-to-folder/y", data=b"2"),
            entry("folder-to-file", data=b"2"), entry("twice", data=b"first"), entry("twice", data=b"second"),
        ]
    )  # fmt: skip
    name = Made([base, lower, upper]).layout(tmp_path)
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        command = (
            "cd /; for f in d opaque again file-to-folder; do echo $f: $(ls -A $f); done; cat twice folder-to-file"
        )
        listed = await box.exec(command)
    assert listed.output == "d: kept new\nopaque: young\nagain: young\nfile-to-folder: y\nsecond2"


async def test_folders_that_a_layer_does_not_name_are_those_of_the_layers_below(
    pool: SlotPool, base: bytes, tmp_path: Path
) -> None:
    lower = [folder("own", mode=0o2750, uid=12, gid=34), folder("real"), entry("real/1"), link("linked", "/real")]
    upper = [entry("own/deep/file"), entry("linked/2", data=b"two\n"), entry("linked/new/3")]
    top = [entry("own/.wh.nothing"), entry("linked/2", data=b"newer\n")]
    name = Made([base, pack(lower), pack(upper), pack(top)]).layout(tmp_path)
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        result = await box.exec("stat -c '%a %u:%g %F' /own /own/deep /linked /real/new; cat /linked/2; ls /real")
    assert result.output.splitlines() == [
        "2750 12:34 directory",
        "755 0:0 directory",
        "777 0:0 symbolic link",
        "755 0:0 directory",
        "newer",
        "1",
        "2",
        "new",
    ]


async def test_a_hard_link_to_a_file_of_another_layer_is_one(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    lower = pack([folder("d"), entry("d/a", data=b"one\n"), link("d/b", "d/a", tarfile.LNKTYPE)])
    name = Made([base, lower, pack([link("c", "d/b", tarfile.LNKTYPE)])]).layout(tmp_path / "a")
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        words = (await box.exec("cat /c; stat -c '%h %i' /c /d/a /d/b")).output.split()
    assert words == ["one", *["3", words[2]] * 3]
    dangling = Made([base, pack([link("c", "d/b", tarfile.LNKTYPE)])]).layout(tmp_path / "b")
    with pytest.raises(ImageError, match="'d/b', which neither its layer nor one below has"):
        await pool.acquire("t", SandboxSpec(image=dangling))


async def test_whiteouts_of_nothing_are_not_seen(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    lower = pack([folder("o"), entry("o/old")])
    upper = pack([folder("new"), entry("new/.wh.x"), entry("new/y"), entry("o/.wh.old"), entry("o/.wh..wh..opq")])
    name = Made([base, lower, upper]).layout(tmp_path)
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        assert (await box.exec("ls -A /new /o 2>&1; echo y > /new/x; cat /new/x")).output == "/new:\ny\n\n/o:\ny\n"


async def test_the_root_is_as_the_image_has_it(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    name = Made([pack([folder("./", mode=0o711, uid=7, gid=8)]), base, pack([entry("x")])]).layout(tmp_path)
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        assert (await box.exec("stat -c '%a %u:%g' /; busybox chmod 700 /")).output == "711 7:8\n"
        snapshot = await box.snapshot()
    async with pool.lease_from(snapshot, "fork") as fork:
        assert (await fork.exec("stat -c '%a %u:%g' /")).output == "700 7:8\n"


async def test_owners_beyond_the_usual_ids_are_kept(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    layers = [base, pack([entry("high", uid=70_000, gid=2_000_000_000)]), pack([folder("h", uid=1_000_000)])]
    name = Made(layers, {"User": "70000"}).layout(tmp_path)
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        result = await box.exec("stat -c %u:%g /high /h; id -u; echo mine > /high && cat /high")
    assert result.output.split() == ["70000:2000000000", "1000000:0", "70000", "mine"]


async def test_odd_entries_arrive_as_they_are(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    capability = b"\1\0\0\2\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0".decode("latin1")
    layer = pack(
        [
            folder("odd", mode=0o2775, gid=50), entry("odd/set-id", data=b"#", mode=0o4755),
            entry("odd/\udcff\udcfe name\n", data=b"bytes"), entry("odd/owned", data=b"o", uid=33, gid=34, mode=0o600),
            link("odd/hard", "odd/owned", tarfile.LNKTYPE), link("odd/soft", "/nowhere/../x"),
            entry("odd/device", tarfile.CHRTYPE, devmajor=1, devminor=5, mode=0o666),
            entry("odd/pipe", tarfile.FIFOTYPE),
            entry("odd/noted", data=b"n", xattrs={"user.note": "kept", "user.overlay.opaque": "y"}),
            entry("odd/capable", data=b"c", xattrs={"security.capability": capability}),
            entry("odd/" + "long-" * 40 + "/" + "n" * 200, data=b"deep"),
        ]
    )  # fmt: skip
    name = Made([base, layer]).layout(tmp_path)
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        result = await box.exec(
            "cd /odd; stat -c '%A %u:%g %h' . set-id owned hard; cat $'\\xff\\xfe name\\n' long-*/nnn*;"
            " stat -c %N soft; stat -c '%F %t,%T' device pipe; head -c1 device || echo no device"
        )
        here = Path(await _layer_with(pool, "odd/noted"))
    assert result.output.splitlines() == [
        "drwxrwsr-x 0:50 3",
        "-rwsr-xr-x 0:0 1",
        "-rw------- 33:34 2",
        "-rw------- 33:34 2",
        "bytesdeep'soft' -> '/nowhere/../x'",
        "character special file 1,5",
        "fifo 0,0",
        "head: device: Permission denied",
        "no device",
    ]
    assert os.listxattr(here / "odd/noted") == ["user.note"]
    assert os.getxattr(here / "odd/capable", "security.capability")[:4] == b"\1\0\0\2"


async def _layer_with(pool: SlotPool, path: str) -> str:
    store = pool.config.images.store_dir
    assert store is not None
    return next(str(layer) for layer in (store / "user/layers").iterdir() if (layer / path).exists())


async def test_zstd_gzip_and_plain_layers_are_the_same_layer(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    def zstd(data: bytes) -> bytes:
        return subprocess.run(["zstd", "-qc"], input=data, capture_output=True, check=True).stdout

    layers = [base, pack([entry("which", data=os.urandom(8).hex().encode())])]
    for number, compress in enumerate((zstd, bytes)):
        made = Made(layers, compress=compress)
        name = made.layout(tmp_path / str(number))
        async with pool.lease("t", SandboxSpec(image=name)) as box:
            assert (await box.exec("cat /which")).output == layers[1][512:528].decode()
        if compress is zstd:
            assert any(blob.startswith(ZSTD) for blob in made.manifest()[1].values())


async def test_a_snapshot_of_an_image_can_be_forked(pool: SlotPool, app: Made, tmp_path: Path) -> None:
    async with pool.lease("t", SandboxSpec(image=app.layout(tmp_path))) as box:
        await box.exec("echo changed > main.py; echo new > more")
        snapshot = await box.snapshot()
        only_work = await box.snapshot(workspace=True)
    for each in (snapshot, only_work):
        async with pool.lease_from(each, "fork") as fork:
            result = await fork.exec("pwd; cat main.py more; id -u; stat -c %u more; ls / | head -3")
            assert result.output == "/app\nchanged\nnew\n1234\n1234\napp\nbin\ndev\n"
        await pool.drop_snapshot(each)


async def test_the_image_is_never_changed_and_slots_do_not_see_each_other(
    pool: SlotPool, app: Made, tmp_path: Path
) -> None:
    spec = SandboxSpec(image=app.layout(tmp_path), user="0")
    async with pool.lease("a", spec) as one, pool.lease("b", spec) as other:
        assert (await one.exec("echo mine > /etc/passwd; rm /bin/ls; touch /new")).exit_code == 0
        assert (await other.exec("head -c4 /etc/passwd; ls /new")).output.startswith("root")
    async with pool.lease("c", spec) as again:
        assert (await again.exec("head -c4 /etc/passwd; ls -d /bin/ls")).output == "root/bin/ls\n"


@pytest.mark.slow
async def test_sixty_layers_are_one_root(pool: SlotPool, base: bytes, tmp_path: Path) -> None:
    layers = [base, *(pack([folder("many"), entry(f"many/{n}", data=b"x")]) for n in range(59))]
    async with pool.lease("t", SandboxSpec(image=Made(layers).layout(tmp_path))) as box:
        assert (await box.exec("cd /many; echo * | env -i /bin/cat | head -c 5; ls | grep -c .")).output.endswith(
            "59\n"
        )


async def test_images_are_refused_where_slots_have_no_namespaces(app: Made, tmp_path: Path) -> None:
    config = PoolConfig(slots_per_host=1, state_dir=tmp_path / "state", provider_options={"level": "landlock"})
    async with SlotPool.from_config(config) as weak:
        with pytest.raises(ImageError, match="needs namespaces"):
            await weak.lease("t", SandboxSpec(image=app.layout(tmp_path / "image")))
