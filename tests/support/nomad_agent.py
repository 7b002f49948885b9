"""A private Nomad agent on loopback: own ports, own data directory, ACLs on; everything it started ends with it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = "no `nomad` on PATH nor in .tools: install it as its makers say, or run `make nomad`"
POOL_RULES = """
namespace "default" {
  capabilities = ["list-jobs", "read-job", "submit-job", "dispatch-job", "alloc-lifecycle", "read-logs", "read-fs"]
}
"""
"""All that a pool's token must be allowed to do."""


def find_nomad():
    built = ROOT / ".tools" / "nomad"
    return shutil.which("nomad") or (str(built) if built.exists() else None)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


CONFIG = """
data_dir = "{data}"
name = "{name}"
bind_addr = "{bind}"
log_level = "WARN"
disable_update_check = true
leave_on_interrupt = false
leave_on_terminate = false
ports {{
  http = {http}
  rpc = {rpc}
  serf = {serf}
}}
advertise {{
  http = "{bind}"
  rpc = "{bind}"
  serf = "{bind}"
}}
consul {{
  auto_advertise = false
  server_auto_join = false
  client_auto_join = false
}}
plugin "raw_exec" {{
  config {{
    enabled = true
  }}
}}
plugin "docker" {{
  config {{
    allow_caps = ["all"]
    {docker}
    gc {{
      image = false
    }}
  }}
}}
acl {{
  enabled = true
  token_min_expiration_ttl = "1s"
}}
server {{
  enabled = {server}
  bootstrap_expect = {expect}
  min_heartbeat_ttl = "2s"
  heartbeat_grace = "2s"
  event_buffer_size = 100
}}
client {{
  enabled = true
  servers = [{servers}]
  network_interface = "{interface}"
  cpu_total_compute = 16000
  memory_total_mb = {memory_mb}
  gc_max_allocs = 500
  options = {{
    "driver.allowlist" = "{drivers}"
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }}
}}
"""


class Agent:
    """One agent, server and client by default."""

    def __init__(
        self,
        folder,
        *,
        bind="127.0.0.1",
        interface="lo",
        server=None,
        netns=None,
        memory_mb=16000,
        name="one",
        docker_host=None,
    ):
        self.folder = Path(folder)
        self.data = self.folder / "data"
        self.netns = netns
        self.mark = f"hrl-test-agent-{uuid.uuid4().hex}"
        http, rpc, serf = (4646, 4647, 4648) if netns else free_ports(3)
        self.address = f"http://{bind}:{http}"
        self.rpc_address = f"{bind}:{rpc}"
        self.token = None
        self.process = None
        self.data.mkdir(parents=True)
        config = CONFIG.format(
            data=self.data,
            name=name,
            bind=bind,
            http=http,
            rpc=rpc,
            serf=serf,
            server="false" if server else "true",
            expect=0 if server else 1,
            servers=f'"{server}"' if server else "",
            interface=interface,
            memory_mb=memory_mb,
            docker=f'endpoint = "{docker_host}"' if docker_host else "",
            drivers="raw_exec,docker" if docker_host else "raw_exec",
        )
        (self.folder / "agent.hcl").write_text(config)

    def start(self):
        # Not `ip netns exec`, which hides the cgroups behind a /sys of its own.
        inside = ["nsenter", f"--net=/run/netns/{self.netns}"] if self.netns else []
        command = [*inside, find_nomad(), "agent", "-config", str(self.folder / "agent.hcl")]
        environment = {**{k: v for k, v in os.environ.items() if not k.startswith("NOMAD_")}, "HRL_MARK": self.mark}
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        return self

    def wait_ready(self, nodes=1, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "agent.log").read_text()[-3000:]
            with contextlib.suppress(OSError, ValueError):
                if self.token is None:
                    self.token = self.call("PUT", "/v1/acl/bootstrap")["SecretID"]
                ready = [node for node in self.call("GET", "/v1/nodes") if node["Status"] == "ready"]
                if len(ready) >= nodes:
                    return self
            time.sleep(0.1)
        raise AssertionError("the agent was not ready: " + (self.folder / "agent.log").read_text()[-3000:])

    def call(self, method, path, body=None, **query):
        query = f"?{urllib.parse.urlencode(query)}" if query else ""
        request = urllib.request.Request(
            f"{self.address}{path}{query}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-Nomad-Token": self.token} if self.token else {},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            text = response.read()
        return json.loads(text) if text else None

    def pool_token(self, ttl=None):
        """A token with just what a pool needs."""
        self.call("PUT", "/v1/acl/policy/pool", {"Name": "pool", "Rules": POOL_RULES})
        token = {"Name": "pool", "Type": "client", "Policies": ["pool"], **({"ExpirationTTL": ttl} if ttl else {})}
        return self.call("PUT", "/v1/acl/token", token)["SecretID"]

    def children(self):
        """Dispatched jobs that exist in any state."""
        return [job["ID"] for job in self.call("GET", "/v1/jobs", prefix="hermes-rl") if "/" in job["ID"]]

    def running(self):
        """Allocations of ours that are meant to run."""
        return [
            each
            for each in self.call("GET", "/v1/allocations")
            if each["JobID"].startswith("hermes-rl") and each["ClientStatus"] == "running"
        ]

    def processes(self):
        """Every process below the agent's data directory: loaders, slot servers, slots."""
        needle = str(self.data).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if needle in command and b"\0agent\0" not in command and b"nomad\0executor" not in command:
                    found.append((int(entry.name), command.replace(b"\0", b" ").decode(errors="replace")[:300]))
        return found

    def kill(self, number=signal.SIGKILL):
        """End the agent alone, as a crash would; its tasks go on."""
        self.process.send_signal(number)
        self.process.wait(30)

    def restart(self):
        return self.start().wait_ready()

    def close(self):
        """Stop every job, then the agent, then what outlives an agent (logmon, executors), each by its pid."""
        if self.process.poll() is None and self.token is not None:
            with contextlib.suppress(OSError):
                for job in self.call("GET", "/v1/jobs", prefix="hermes-rl"):
                    self.call("DELETE", f"/v1/job/{urllib.parse.quote(job['ID'], safe='')}", purge="true")
                deadline = time.monotonic() + 15
                while self.running() and time.monotonic() < deadline:
                    time.sleep(0.1)
        if self.process.poll() is None:
            self.kill(signal.SIGKILL)
        for pid in self._marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            point = line.split(" ")[1]
            if point.startswith(str(self.data)):
                subprocess.run(["umount", "-l", point], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _marked(self):
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found
