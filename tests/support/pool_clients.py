"""Clients of pools as processes of their own, which can be killed."""

import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("pool_program.py")


def busy_client(config, folder, leases):
    """A process that keeps its leases busy."""
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    client = subprocess.Popen([sys.executable, PROGRAM, path, str(leases)], stdout=subprocess.PIPE)
    assert client.stdout.readline() == b"busy\n"
    return client


def kill(client):
    client.send_signal(signal.SIGKILL)
    client.communicate()
