"""Real sshd processes with keys of their own: on loopback, and in namespaces that stand for whole machines.

A namespaced machine has its own processes, its own network behind a cable (veth) and its own small disk. It can be cut
off, rebooted and filled up. Everything ends with `close`, by the process that was started.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from support.pool_leftovers import cgroup_name

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
MISSING = "there is no sshd here: apt-get install openssh-server"
DISK = Path("/var/tmp")
"""Where the disk of a namespaced machine is, seen from inside."""
READY_S = 60.0


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def namespaces_work():
    """Whether machines with a network of their own can be made here."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        return False
    link = f"hrp{os.getpid() % 10**7}"
    try:
        run("unshare", "--pid", "--mount", "--net", "--fork", "--mount-proc", "true")
        run("ip", "link", "add", link, "type", "veth", "peer", "name", f"{link}p")
        run("ip", "link", "del", link)
    except subprocess.CalledProcessError:
        return False
    return True


class Keys:
    """A user's key, the hosts' keys, and the ssh config that names the machines."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True)
        for name in ("user", "host"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        self.config = folder / "config"
        self.config.touch()
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.touch()

    def add(self, name, address, port, *extra):
        """Make a machine known to the user."""
        lines = [f"Host {name}", f"HostName {address}", f"Port {port}", f"IdentityFile {self.folder / 'user'}"]
        lines += ["IdentitiesOnly yes", f"UserKnownHostsFile {self.known_hosts}", *extra]
        with self.config.open("a") as file:
            file.write("\n  ".join(lines) + "\n")
        kind, key = (self.folder / "host.pub").read_text().split()[:2]
        with self.known_hosts.open("a") as file:
            file.write(f"{address if port == 22 else f'[{address}]:{port}'} {kind} {key}\n")

    def sshd_config(self, name, address, port, *extra):
        """Settings of an sshd that lets only this user's key in."""
        cache = self.folder / f"cache-{name}"
        path = self.folder / f"sshd-{name}"
        lines = [
            f"ListenAddress {address}:{port}",
            f"HostKey {self.folder / 'host'}",
            f"AuthorizedKeysFile {self.folder / 'user.pub'}",
            f"SetEnv XDG_CACHE_HOME={cache}",
            *("PidFile none", "StrictModes no", "UsePAM no", "PasswordAuthentication no", "PermitRootLogin yes"),
            *extra,
        ]
        path.write_text("\n".join(lines) + "\n")
        return path


def wait_open(address, port, process):
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "sshd ended"
        with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
            return
        time.sleep(0.02)
    raise TimeoutError(f"no sshd at {address}:{port}")


class LoopbackMachine:
    """An sshd on this machine."""

    def __init__(self, keys, name, *sshd_settings, known=True):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.name = name
        self.keys = keys
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        if known:
            keys.add(name, "127.0.0.1", self.port)
        self._config = keys.sshd_config(name, "127.0.0.1", self.port, *sshd_settings)
        self.start()

    def start(self):
        with (self.keys.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(self._config)], stderr=log)
        wait_open("127.0.0.1", self.port, self._process)

    def close(self):
        self._process.terminate()
        self._process.wait()


class NamespacedMachine:
    """An sshd with processes, network and disk of its own."""

    def __init__(self, keys, number, disk_mb=400):
        self.name = f"m{number}"
        self._keys = keys
        self._link = f"hr{os.getpid() % 10**7}{number}"
        self._here, self.address = (f"10.213.{os.getpid() % 256}.{4 * number + last}" for last in (1, 2))
        self.disk = keys.folder / f"disk-{self.name}"
        self.disk.mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", f"size={disk_mb}m,mode=1777", "tmpfs", str(self.disk))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        keys.add(self.name, self.address, 22)
        self._config = keys.sshd_config(self.name, self.address, 22)
        self.start()

    def start(self):
        """Switch it on."""
        cable = f"ip addr add {self.address}/30 dev {self._link}p; ip link set {self._link}p up; ip link set lo up"
        script = f"mount --bind {self.disk} {DISK}; read go; {cable}; {SSHD} -D -e -f {self._config} & wait"
        apart = ["--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc"]
        with (self._keys.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", *apart, "bash", "-c", script], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", f"{self._link}p")
        run("ip", "addr", "add", f"{self._here}/30", "dev", self._link)
        run("ip", "link", "set", self._link, "up")
        deadline = time.monotonic() + READY_S
        while (pid := self.first_process()) is None or not self._apart(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run("ip", "link", "set", f"{self._link}p", "netns", str(pid))
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()
        wait_open(self.address, 22, self._process)

    def first_process(self):
        """Its pid 1, as this machine numbers it."""
        text = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(text[0]) if text else None

    @staticmethod
    def _apart(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        return False

    def cut(self):
        """Pull the cable."""
        run("ip", "link", "set", self._link, "down")

    def mend(self):
        """Put the cable back."""
        run("ip", "link", "set", self._link, "up")

    def switch_off(self):
        """All processes at once, without a word; the disk stays. The kernel of a real machine forgets cgroups too."""
        self._process.kill()
        self._process.wait()
        subprocess.run(["ip", "link", "del", self._link], check=False, capture_output=True)

    def fill_disk(self):
        """Leave no free block."""
        with contextlib.suppress(OSError), (self.disk / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))

    def free_disk(self):
        (self.disk / "filler").unlink()

    def processes(self):
        """Pid and command line of all that its first process is an ancestor of, slots included; without sshd."""
        parents, texts = {}, {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit():
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    texts[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
        inside, before = {self.first_process()}, set()
        while inside != before:
            before = inside
            inside = before | {pid for pid, parent in parents.items() if parent in before}
        inside.discard(self.first_process())
        return [(pid, texts[pid]) for pid in inside if texts.get(pid) and "sshd" not in texts[pid]]

    def found(self, word):
        """Processes there with this word in their command line."""
        return [(pid, text) for pid, text in self.processes() if word in text]

    def files(self):
        """What is on its disk."""
        return sorted(str(path.relative_to(self.disk)) for path in self.disk.rglob("*"))

    def cgroups(self):
        """Names of the cgroups that hosts whose folders are there would have."""
        hosts = self.disk.glob("hermes-rl-*/*")
        return [cgroup_name(DISK / host.relative_to(self.disk) / "scratch") for host in hosts]

    def close(self):
        self.switch_off()
        subprocess.run(["umount", "-l", str(self.disk)], check=False)
