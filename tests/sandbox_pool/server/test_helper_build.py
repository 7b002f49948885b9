"""The slot helper is found or built for every kind of machine, and where it cannot be, one sentence says what to do."""

from __future__ import annotations

import ast
import io
import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sandbox_pool import HostStartFailed, PoolConfig, SlotPool
from sandbox_pool.server import faults
from sandbox_pool.server.build import helper_build
from sandbox_pool.server.build.packing import pack
from support.tools_pythons import find_python

HERE = platform.machine()
OTHER = next(machine for machine in helper_build.MACHINES if machine != HERE)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine where nothing was built yet and nothing can be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)


def names_in(packed: bytes) -> set[str]:
    return {name.rpartition("/")[2] for name in zipfile.ZipFile(io.BytesIO(packed)).namelist()}


def test_without_a_compiler_the_error_says_what_to_install(no_compiler: None) -> None:
    with pytest.raises(helper_build.HelperMissing, match=r"apt-get install gcc libc6-dev, or pip install ziglang$"):
        helper_build.get_helper(HERE)


def test_a_compiler_that_fails_is_named(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -c 'raise SystemExit(\"no libc.a\")'")
    with pytest.raises(helper_build.HelperMissing, match=r"no libc\.a\): apt-get install"):
        helper_build.get_helper(HERE)


def test_a_kind_of_machine_without_a_helper_is_refused() -> None:
    with pytest.raises(helper_build.HelperMissing, match="not on riscv64"):
        helper_build.get_helper("riscv64")


async def test_a_pool_that_cannot_build_it_says_what_to_install(no_compiler: None, tmp_path: Path) -> None:
    config = PoolConfig(max_hosts=1, start_attempts=1, state_dir=tmp_path / "s", scratch_dir=tmp_path / "w")
    with pytest.raises(HostStartFailed, match="pip install ziglang"):
        async with SlotPool.from_config(config) as pool, pool.lease("task"):
            pass


def test_doctor_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ziglang'] = None; import environments.apps.cli.main as c; c.main(sys.argv[1:])"
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, "doctor", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    findings = json.loads(done.stdout)
    assert findings["compiler"]["status"] == findings["isolation"]["status"] == "broken"
    assert "pip install ziglang" in findings["compiler"]["fix"]
    assert "pip install ziglang" in findings["isolation"]["detail"]


def test_the_same_sources_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = pack()
    helper = helper_build.get_helper(HERE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hermes-rl").mkdir()
    (tmp_path / "hermes-rl" / helper.name).write_bytes(helper.read_bytes())
    assert pack() == before


@pytest.mark.parametrize("version", ["3.9", "3.12", "3.13"])
async def test_a_host_runs_on_another_python_than_the_one_that_packed_it(version: str, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"needs Python {version}")
    options = {"python": str(python)}
    config = PoolConfig(max_hosts=1, provider_options=options, state_dir=tmp_path / "s", scratch_dir=tmp_path / "w")
    async with SlotPool.from_config(config) as pool, pool.lease("task") as sandbox:
        await sandbox.write_file("said", b"hello")
        assert (await sandbox.exec("cat said; exit 3")).exit_code == 3
        process = await sandbox.spawn("sleep 60")
        assert await process.wait(timeout_s=0.01) is None


def test_the_server_catches_the_timeout_of_every_python_that_it_runs_on() -> None:
    for path in Path(faults.__file__).parent.rglob("*.py"):
        named = [
            node.lineno for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "id", "") == "TimeoutError"
        ]
        assert not named, f"{path}: faults.TimedOut is what wait_for raises"


def test_only_a_pack_for_this_machine_carries_bytecode() -> None:
    assert {"main.py", "main.pyc"} <= names_in(pack())
    assert "main.pyc" not in names_in(pack(any_machine=True))


def test_a_pack_for_any_machine_carries_all_helpers_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    helper = helper_build.get_helper(HERE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "hermes-rl"
    cache.mkdir()
    (cache / helper.name).write_bytes(helper.read_bytes())
    assert f"slot-helper-{OTHER}" not in names_in(pack(any_machine=True))
    (cache / helper_build.helper_name(OTHER)).write_bytes(b"another machine's")
    assert {f"slot-helper-{OTHER}", f"slot-helper-{HERE}"} <= names_in(pack(any_machine=True))
    assert f"slot-helper-{OTHER}" not in names_in(pack())


def test_a_server_without_a_helper_for_its_machine_says_so(tmp_path: Path) -> None:
    program = tmp_path / "server.pyz"
    with zipfile.ZipFile(io.BytesIO(pack())) as whole, zipfile.ZipFile(program, "w") as without:
        for name in whole.namelist():
            if not name.endswith(f"/slot-helper-{HERE}"):
                without.writestr(name, whole.read(name))
    done = subprocess.run(
        [sys.executable, str(program), "--scratch", str(tmp_path / "scratch")],
        input="token\n",
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert json.loads(done.stdout)["error"].startswith(f"this slot server carries no helper for {HERE}")
    assert (done.returncode, done.stderr) == (3, "")
