"""Every promise of slots in containers, by what the container may do: each engine, a user's own, and gVisor below."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.pool_trials import promises

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("capabilities", [(), ("SYS_ADMIN",)], ids=["default", "SYS_ADMIN"])
async def test_every_promise_holds_in_a_container(make_config, capabilities):
    kept, broken = await promises(make_config(options={"cap_add": capabilities}, slots_per_host=16))
    assert (broken, kept > 100) == ({}, True)


def test_every_promise_holds_for_an_ordinary_user_of_rootless_podman(engines):
    engine = engines("rootless")
    home = Path(engine.environment["HOME"])
    options = {**engine.options(), "mounts": "/usr:/usr:ro"}
    del options["host"]  # found by itself, where podman.socket would be
    (home / "run/podman").mkdir(mode=0o700)
    (home / "run/podman/podman.sock").symlink_to(home / "s")
    shutil.chown(home / "run/podman", "nobody")
    flags = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
    command = [_python(), "-m", "environments.apps.cli.main", "pool", "check", "--provider", "podman", "--json", *flags]
    become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--"]
    environment = {**engine.environment, "PYTHONPATH": _importable(), "PATH": os.environ["PATH"]}
    done = subprocess.run([*become, *command], env=environment, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:] or done.stdout[-1000:]
    said = json.loads(done.stdout)
    print(said["isolation"], said["variant"], said["counts"])
    assert (said["counts"]["failed"], said["counts"]["passed"] > 100) == (0, True)
    assert (engine.containers(), engine.volumes()) == ([], [])


async def test_every_promise_holds_on_the_kernel_of_gvisor(gvisor, make_gvisor_config):
    config = make_gvisor_config(slots_per_host=16)
    kept, broken = await promises(config)
    assert (broken, kept > 100) == ({}, True)
    assert gvisor.containers() == []


def _python():
    """One that an ordinary user may run and that has the packages of this one."""
    wanted = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(wanted).exists():
        pytest.skip(f"an ordinary user of this machine has no {wanted}")
    return wanted


def _importable():
    return os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
