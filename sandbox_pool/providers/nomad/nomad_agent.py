"""An agent of Nomad on this machine for who has none: `autostart`, hermes-agent's TERMINAL_NOMAD_AUTOSTART.

It is server and client in one (`nomad agent -dev`), on loopback alone, and stays when the pool ends, as one that was
started by hand does: `gc` and the next pool find it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

from sandbox_pool.errors import PlaceUnreachable
from sandbox_pool.journal.journal import private_state_dir

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PORT = 4646
START_S = 60.0
POLL_S = 0.1
CONNECT_S = 2.0


async def have_agent(address: str, state_dir: Path) -> None:
    """Start an agent unless something listens at the address; `PlaceUnreachable` says why there is none."""
    where = urlsplit(address)
    host, port = where.hostname or "", where.port or PORT
    if await _listens(host, port):
        return
    if where.scheme != "http" or host not in LOOPBACK:
        raise PlaceUnreachable(f"{address} does not answer, and only an agent of this machine can be started")
    program = shutil.which("nomad")
    if program is None:
        raise PlaceUnreachable(f"{address} does not answer, and no agent can be started: there is no `nomad` here")
    process, log_path = await asyncio.to_thread(_start, program, port, state_dir)
    deadline_s = time.monotonic() + START_S
    while not await _listens(host, port):
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            process.wait()
            raise PlaceUnreachable(f"a Nomad agent did not start here, see {log_path}")
        await asyncio.sleep(POLL_S)
    log.warning(
        "started a Nomad agent at %s (pid %d, log %s); it stays until it is killed", address, process.pid, log_path
    )


def _start(program: str, port: int, state_dir: Path) -> tuple[subprocess.Popen[bytes], Path]:
    private_state_dir(state_dir)
    settings = state_dir / f"nomad-agent-{port}.json"
    ports = {"http": port, "rpc": port + 1, "serf": port + 2}
    # Looking for clouds takes seconds.
    client = {"options": {"fingerprint.denylist": "env_aws,env_gce,env_azure,env_digitalocean"}}
    raw_exec = {"raw_exec": {"config": {"enabled": True}}}
    written = {"ports": ports, "client": client, "plugin": raw_exec, "disable_update_check": True}
    settings.write_text(json.dumps(written))
    log_path = settings.with_suffix(".log")
    # It outlives this process, so it gets nothing of its secrets.
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    with log_path.open("ab") as file:
        command = [program, "agent", "-dev", "-bind=127.0.0.1", f"-config={settings}"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
            cwd="/",
        )
    return process, log_path


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
