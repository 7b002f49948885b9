"""Two Nomad nodes on one machine: each in a network namespace of its own, joined by a bridge this process is on too."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from support.nomad_agent import Agent


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class TwoNodes:
    def __init__(self):
        number = os.getpid() % 200 + 20
        self.tag = f"hrl{os.getpid() % 100000}"
        self.net = f"10.213.{number}"
        self.folder = Path(tempfile.mkdtemp(prefix="hrl-two-"))
        self.folder.chmod(0o711)
        self.agents = []

    def __enter__(self):
        try:
            self._wire()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def _wire(self):
        ip("link", "add", f"{self.tag}b", "type", "bridge")
        ip("addr", "add", f"{self.net}.1/24", "dev", f"{self.tag}b")
        ip("link", "set", f"{self.tag}b", "up")
        for node in (1, 2):
            space = f"{self.tag}n{node}"
            ip("netns", "add", space)
            ip("link", "add", f"{self.tag}v{node}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{self.tag}v{node}", "master", f"{self.tag}b", "up")
            ip("-n", space, "addr", "add", f"{self.net}.{node + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def _start(self):
        for node in (1, 2):
            self.agents.append(
                Agent(
                    self.folder / f"n{node}",
                    bind=f"{self.net}.{node + 1}",
                    interface="eth0",
                    netns=f"{self.tag}n{node}",
                    server=None if node == 1 else f"{self.net}.2:4647",
                    name=f"node{node}",
                ).start()
            )
        self.server.wait_ready(nodes=2)
        self.server.call("PUT", "/v1/operator/scheduler/configuration", {"SchedulerAlgorithm": "spread"})

    @property
    def server(self):
        """The node that is the cluster's server too."""
        return self.agents[0]

    @property
    def far(self):
        """The node that can be cut off."""
        return self.agents[1]

    def cut(self):
        ip("link", "set", f"{self.tag}v2", "down")

    def mend(self):
        ip("link", "set", f"{self.tag}v2", "up")

    def close(self):
        with contextlib.suppress(subprocess.CalledProcessError):
            self.mend()
        for agent in self.agents:
            agent.close()
        for arguments in (
            ("netns", "del", f"{self.tag}n1"),
            ("netns", "del", f"{self.tag}n2"),
            ("link", "del", f"{self.tag}v1"),
            ("link", "del", f"{self.tag}v2"),
            ("link", "del", f"{self.tag}b"),
        ):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*arguments)
        shutil.rmtree(self.folder, ignore_errors=True)
