"""`autostart`: an agent for who has none, on the real Nomad."""

import contextlib
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.errors import PlaceUnreachable
from sandbox_pool.providers.base import ProviderContext, load_provider
from support.nomad_agent import find_nomad, free_ports
from support.pool_leftovers import processes
from support.pool_wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
async def environ(tmp_path, monkeypatch):
    """hermes-agent's variables for an agent that nobody has started; one that was ends with the test."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nomad").symlink_to(find_nomad())
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    yield {
        "TERMINAL_ENV": "nomad",
        "TERMINAL_NOMAD_ADDRESS": f"http://127.0.0.1:{free_ports(1)[0]}",
        "TERMINAL_NOMAD_AUTOSTART": "1",
        "TERMINAL_TIMEOUT": "60",
    }
    for pid, _ in processes(tmp_path / "state/nomad-agent-", []):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    await eventually(lambda: not processes(tmp_path / "state/nomad-agent-", []))


async def test_the_first_pool_starts_an_agent_and_the_next_one_uses_it(environ, tmp_path, caplog):
    config = PoolConfig.from_env(environ).model_copy(update={"state_dir": tmp_path / "state", "slots_per_host": 2})
    for _ in range(2):
        async with SlotPool.from_config(config) as pool, pool.lease("t") as box:
            assert (await box.exec("echo $((6 * 7))")).output == "42\n"
    assert len(re.findall(r"started a Nomad agent at http://127.0.0.1:\d+ \(pid \d+", caplog.text)) == 1
    assert len(processes(tmp_path / "state/nomad-agent-", [])) == 1


async def test_where_none_can_be_started_the_reason_is_told(environ, tmp_path, monkeypatch):
    (tmp_path / "bin/nomad").unlink()
    monkeypatch.setenv("PATH", str(Path(shutil.which("sh")).parent) if shutil.which("nomad") is None else "/none")
    for address, reason in (
        (environ["TERMINAL_NOMAD_ADDRESS"], "there is no `nomad` here"),
        ("http://192.0.2.1:4646", "only an agent of this machine can be started"),
    ):
        config = PoolConfig.from_env({**environ, "TERMINAL_NOMAD_ADDRESS": address})
        config = config.model_copy(update={"state_dir": tmp_path / "state"})
        provider = load_provider("nomad", ProviderContext.of(config, "machine_boot_ns_1_1"), config.provider_options)
        with pytest.raises(PlaceUnreachable, match=reason):
            await provider.start("hrl-x", SandboxSpec())
        await provider.close()
