"""A Slurm cluster of this machine alone: munged, slurmctld and two slurmd with a configuration of their own."""

import os
import shutil
import socket
import subprocess
import time

from support.containers import Unavailable

SEARCH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NODES = ("n1", "n2")
READY_S = 60.0
CONFIG = """ClusterName=hrl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Runs until `close`; needs root, as slurmd does."""

    def __init__(self, folder):
        if os.getuid() != 0:
            raise Unavailable("slurmd needs root")
        programs = {name: shutil.which(name, path=SEARCH) for name in ("munged", "slurmctld", "slurmd", "srun")}
        if lacking := [name for name, path in programs.items() if path is None]:
            raise Unavailable(f"there is no {lacking[0]} here: apt-get install slurm-wlm")
        self._folder, self._processes = folder, []
        folder.chmod(0o755)
        (folder / "state").mkdir()
        config = folder / "slurm.conf"
        names = {"host": socket.gethostname().partition(".")[0], "ports": _free_ports(3), "cores": os.cpu_count()}
        config.write_text(CONFIG.format(folder=folder, **names))
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self.environment = {"SLURM_CONF": str(config)}
        try:
            self._start_munge(programs["munged"])
            self._start(programs["slurmctld"], "-D", "-f", str(config))
            for node in NODES:
                self._start(programs["slurmd"], "-D", "-N", node, "-f", str(config))
            self._wait(lambda: self.run("sinfo", "--noheader", "--states=idle", "--format=%D") == "2", "idle nodes")
        except BaseException:
            self.close()
            raise

    def run(self, *command, check=True):
        """Output of a command of Slurm."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, check=check, capture_output=True, text=True)
        return done.stdout.strip()

    def allocate(self, nodes=2):
        """A job that has nodes and runs nothing; its id."""
        before = set(self._jobs())
        self.run("salloc", f"--nodes={nodes}", "--exclusive", "--no-shell", "--quiet")
        (job,) = set(self._jobs()) - before
        return job

    def steps(self, job):
        """Ids of the steps that run in a job, without the one that stands for the allocation itself."""
        found = self.run("squeue", "--steps", "--noheader", "--format=%i|%j", f"--jobs={job}", check=False).split()
        return [line.split("|")[0] for line in found if line.endswith("|hermes-rl")]

    def close(self):
        for job in self._jobs() if len(self._processes) > 1 else ():
            self.run("scancel", job, check=False)
        for process in reversed(self._processes):
            process.terminate()
            process.wait()

    def _jobs(self):
        return self.run("squeue", "--noheader", "--format=%i", check=False).split()

    def _start_munge(self, program):
        key = self._folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = {"key": "key", "socket": "munge", "pid": "munge.pid", "log": "munge.log", "seed": "munge.seed"}
        options = {
            f"--{kind}{'' if kind == 'socket' else '-file'}={self._folder}/{name}" for kind, name in files.items()
        }
        self._start(program, "--force", "--foreground", "--num-threads=2", *options)
        self._wait((self._folder / "munge").exists, "a socket of munged")

    def _start(self, *command):
        with (self._folder / f"log-{len(self._processes)}").open("wb") as log:
            self._processes.append(
                subprocess.Popen(command, env={**os.environ, **self.environment}, stdout=log, stderr=log)
            )

    def _wait(self, condition, what):
        deadline = time.monotonic() + READY_S
        while not condition():
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = " ".join(path.read_text(errors="replace")[-200:] for path in self._folder.glob("log-*"))
                raise Unavailable(f"Slurm does not start here, no {what}: {logs}")
            time.sleep(0.05)


def _free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
