"""A tree that an agent made cannot stop its own removal, whatever its depth, names, modes or links."""

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.journal.owner import this_process
from sandbox_pool.owned_folders import make_owned_folder, sweep
from sandbox_pool.providers.base import ProviderContext, load_provider
from sandbox_pool.server.host_files import remove_tree

DEPTH = 1500
NAME = "d" * 100
"""So that the path is far above the 4,096 bytes that the kernel takes at once."""
ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@pytest.fixture
def place():
    path = Path(tempfile.mkdtemp(prefix="deep-", dir=ROOT))
    yield path
    remove_tree(path)


def dig(folder, depth=DEPTH):
    """Nested folders with a file in each."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(NAME, dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        below = os.open(NAME, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_a_deep_tree_is_removed_with_few_descriptors(place):
    dig(place)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, before[1]))
    try:
        assert remove_tree(place) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not place.exists()


def test_links_out_of_the_tree_are_removed_and_not_followed(place):
    keep, tree = place / "keep", place / "tree"
    (keep / "inside").mkdir(parents=True)
    (keep / "file").write_text("stays")
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "up").symlink_to("../../keep")
    (tree / "whole").symlink_to(keep)
    assert remove_tree(tree) == []
    assert remove_tree(place / "missing") == []
    (place / "link").symlink_to(keep)
    assert remove_tree(place / "link") == []
    assert sorted(path.name for path in keep.iterdir()) == ["file", "inside"]


def test_folders_that_forbid_everything_and_names_that_are_no_text_go_too(place):
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
tree = {str(place)!r} + "/tree"
os.makedirs(tree + "/a/b/c")
open(os.fsencode(tree) + b"/a/b/\\xff\\n", "w").close()
os.mkfifo(tree + "/a/b/fifo")
for path in ("/a/b/c", "/a/b", "/a", ""):
    os.chmod(tree + path, 0)
from sandbox_pool.server.host_files import remove_tree
print(remove_tree(tree), os.path.lexists(tree))
"""
    place.chmod(0o777)
    user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    python = "/usr/bin/python3" if os.getuid() == 0 and Path("/usr/bin/python3").exists() else sys.executable
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd="/", **user)
    assert (done.stdout, done.stderr) == ("[] False\n", "")


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="only root can mount")
def test_what_is_mounted_in_a_tree_is_left_alone_and_told(place):
    (place / "precious").mkdir()
    (place / "precious" / "file").write_text("stays")
    (place / "tree" / "mount").mkdir(parents=True)
    code = f"from sandbox_pool.server.host_files import remove_tree; print(remove_tree('{place}/tree'))"
    command = f'mount --bind {place}/precious {place}/tree/mount && {sys.executable} -c "{code}"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert "mounted" in done.stdout
    assert (place / "precious" / "file").read_text() == "stays"


def test_what_cannot_be_removed_is_told_once_and_the_rest_goes(place):
    if os.getuid() != 0:
        pytest.skip("needs two users")
    (place / "tree" / "theirs").mkdir(parents=True)
    (place / "tree" / "theirs" / "file").touch()
    (place / "tree" / "ours").mkdir()
    shutil.chown(place / "tree" / "ours", "nobody")
    shutil.chown(place / "tree", "nobody")
    place.chmod(0o777)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from sandbox_pool.server.host_files import remove_tree
print(len(remove_tree({str(place / "tree")!r})))
"""
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code], user="nobody", capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout == "1\n"
    assert [path.name for path in (place / "tree").iterdir()] == ["theirs"]


def test_a_deep_folder_of_a_killed_process_does_not_stop_the_next_one(place):
    code = """
import sys, os, signal
from pathlib import Path
from sandbox_pool.owned_folders import make_owned_folder
print(make_owned_folder("x-", Path(sys.argv[1])), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=False)
    dig(done.stdout.strip())
    make_owned_folder("x-", place)
    assert [path.name for path in place.iterdir()] == [this_process().tag()]
    assert sweep(place) == []


async def test_a_deep_tree_in_a_slot_does_not_outlive_it_nor_stop_the_next_host(place):
    """At the level where slots keep their files in folders of the host."""
    config = PoolConfig(
        state_dir=place / "state", scratch_dir=place / "s", slots_per_host=1, provider_options={"level": "plain"}
    )
    command = f"for i in $(seq 12); do n={NAME}; for j in $(seq 100); do mkdir $n; cd $n; done; done"
    async with SlotPool.from_config(config) as pool:
        async with pool.lease("t") as box:
            await box.exec(command, timeout_s=60)
        async with pool.lease("t") as box:
            assert (await box.exec("ls")).output == ""
    assert not (place / "s").exists() or list((place / "s").iterdir()) == []


async def test_a_deep_tree_that_a_killed_host_left_goes_with_it(place):
    config = PoolConfig(state_dir=place / "state", scratch_dir=place / "s", slots_per_host=1)
    provider = load_provider("local", ProviderContext.of(config, this_process().tag()), {})
    left = place / "s" / f"hermes-rl-{os.getuid()}" / "h1" / "scratch" / "slots" / "0"
    left.mkdir(parents=True)
    await asyncio.to_thread(dig, left)
    await provider.stop("h1")
    await provider.start("h1", SandboxSpec())
    await provider.stop("h1")
    assert await provider.list() == []
