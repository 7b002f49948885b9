"""The wheel holds all it needs and works from any folder."""

import importlib.util
import os
import platform
import re
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from sandbox_pool.server.build.helper_build import MACHINES

# A cross compiler builds its C library first.
pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The unpacked wheel, put before the checkout on the path: what a user of the wheel imports."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_from_elsewhere(installed, tmp_path, code, **environment):
    environ = {**os.environ, "PYTHONPATH": str(installed), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )


def tracked(*folders):
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if not name.endswith((".gitkeep", ".gitignore"))]


def test_it_contains_every_tracked_file_of_the_rooms_and_the_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [n for n in tracked(*PACKAGES) if n not in names]
    assert missing == []
    missing = [n for n in tracked("configs") if f"environments/{n}" not in names]
    assert missing == []


def test_it_contains_no_tests_and_no_scratch(wheel):
    for name in zipfile.ZipFile(wheel).namelist():
        assert name.split("/")[0] in PACKAGES or ".dist-info/" in name
        assert "__pycache__" not in name


def test_it_is_for_every_machine(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    (metadata,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: true" in zipfile.ZipFile(wheel).read(metadata).decode()


PT_INTERP = 3
"""The segment by which a program asks for a loader and its shared libraries."""


def segment_types(program):
    (table,), (size, count) = struct.unpack_from("<Q", program, 32), struct.unpack_from("<HH", program, 54)
    return [struct.unpack_from("<I", program, table + i * size)[0] for i in range(count)]


@pytest.mark.parametrize("machine", MACHINES)
def test_it_carries_a_static_helper(wheel, machine):
    if machine != platform.machine() and importlib.util.find_spec("ziglang") is None:
        pytest.skip(f"nothing here compiles for {machine}: make helpers")
    archive = zipfile.ZipFile(wheel)
    pattern = re.compile(rf"sandbox_pool/server/helper/slot-helper-{machine}-[0-9a-f]+")
    (helper,) = (archive.read(n) for n in archive.namelist() if pattern.fullmatch(n))
    assert helper[:4] == b"\x7fELF"
    assert int.from_bytes(helper[18:20], "little") == {"x86_64": 62, "aarch64": 183}[machine]
    assert PT_INTERP not in segment_types(helper)


LEASE_A_SLOT = """
import asyncio, shutil, sys
from pathlib import Path
import sandbox_pool
from sandbox_pool import PoolConfig, SlotPool

async def main():
    config = PoolConfig(max_hosts=1, state_dir=Path("state"), scratch_dir=Path("scratch").resolve())
    async with SlotPool.from_config(config) as pool, pool.lease("task") as slot:
        print(sandbox_pool.__file__, shutil.which("cc"), (await slot.exec("echo hello")).output, end="")

asyncio.run(main())
"""


def test_a_slot_is_leased_without_a_compiler(installed, tmp_path):
    empty, cache = tmp_path / "bin", tmp_path / "cache"
    empty.mkdir()
    done = run_from_elsewhere(
        installed, tmp_path, LEASE_A_SLOT, PATH=str(empty), CC="", XDG_CACHE_HOME=str(cache), HOME=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{installed}/sandbox_pool/__init__.py None hello\n"
    assert list(cache.rglob("slot-helper*")) == [], "the wheel's own helper is used"


def test_the_command_runs_from_any_folder(installed, tmp_path):
    code = "import environments.apps.cli.main as m; print(m.__file__); m.main(['doctor', '--json'])"
    done = run_from_elsewhere(installed, tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))


def test_every_config_is_found_from_any_folder(installed, tmp_path):
    code = "from environments.config.yaml_file import config_names; print('\\n'.join(config_names()))"
    done = run_from_elsewhere(installed, tmp_path, code)
    shipped = sorted(
        str(Path(n).relative_to("configs").with_suffix("")) for n in tracked("configs") if n.endswith(".yaml")
    )
    assert done.stdout.split() == shipped
