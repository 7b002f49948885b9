"""The client runs on other systems than Linux: with what only Linux has taken away, it drives slots elsewhere.

No Mac was there to run this on. The place is examples/own_provider.py, whose slot servers are real.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVE = """
import support.like_a_mac

import asyncio, os, sys
import hermes_rl, environments.base, environments.launch
from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.journal.owner import is_alive, start_ticks, this_process

assert not os.path.exists("/proc/self/stat") and not hasattr(os, "pidfd_open")
assert is_alive(this_process(), heartbeat_age_s=None)
assert start_ticks(2**22 + 1) is None


async def main(folder):
    config = PoolConfig(provider="examples.own_provider:OwnProvider", slots_per_host=2, state_dir=folder / "state")
    async with SlotPool.from_config(config) as pool, pool.lease("one") as slot, pool.lease("two") as other:
        told = await slot.exec("uname -s; echo $((6 * 7)) | tee answer")
        await slot.download("answer", folder / "answer")
        await other.upload(folder / "answer", "given")
        again = await other.exec("cat given")
        print(told.output.split(), again.output.split(), slot.host_info.isolation)


from pathlib import Path
asyncio.run(main(Path(sys.argv[1])))
assert not list((Path(sys.argv[1]) / "state" / "own_provider").iterdir())
"""


def on_a_mac(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        check=False,
    )


def test_slots_elsewhere_are_leased_used_and_given_back(tmp_path):
    ended = on_a_mac(DRIVE, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("['Linux', '42'] ['42'] ")


def verb(words):
    return on_a_mac(
        f"import support.like_a_mac, sys; from environments.apps.cli.main import main; sys.exit(main({words!r}))"
    )


@pytest.mark.parametrize("words", [["pool", "status"], ["pool", "gc"], ["config", "terminal_tasks"]])
def test_verbs_that_need_no_slots_work(words, tmp_path):
    ended = verb([*words, "--state-dir", str(tmp_path)] if words[0] == "pool" else words)
    assert ended.returncode == 0, ended.stderr


def test_slots_of_this_machine_are_refused_with_what_can_be_used():
    ended = verb(["pool", "check", "--only", "lease"])
    assert ended.returncode == 2
    assert "slots of this machine need Linux; from here they can be driven elsewhere: " in ended.stderr
    assert "nomad" in ended.stderr


def test_doctor_says_which_places_can_be_used_from_here():
    ended = verb(["doctor", "--json"])
    findings = json.loads(ended.stdout)
    assert "could not be checked" not in ended.stdout
    assert findings["isolation"]["detail"] == "slots of this machine need Linux"
    assert findings["cgroups"]["status"] == "missing"
    assert {"nomad", "modal"} <= findings.keys()
