"""The real apptainer for tests, run by an ordinary user with a home of its own, and small images for it.

The image is a folder of links into the machine's /usr, which is bound into it: it takes no time to make.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from support.containers import TOOLS, Unavailable

PREPARE = "tests/live/apptainer/prepare.sh"
SEARCH = f"{TOOLS.resolve()}/apptainer/usr/bin:{os.environ['PATH']}:/usr/sbin:/sbin"
USER = "nobody"
OPTIONS = {"binds": ["/usr:/usr:ro"], "image_python": "/usr/bin/python3"}


class ApptainerPlace:
    """Where an ordinary user runs apptainer: as root that is `nobody`, else whoever runs the tests."""

    def __init__(self, folder):
        self.folder = folder
        program = shutil.which("apptainer", path=SEARCH)
        if program is None:
            raise Unavailable(f"there is no apptainer here: run {PREPARE}")
        self.program = program
        self.home, self.scratch = folder / "home", folder / "scratch"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        for path in (self.home, self.scratch):
            path.mkdir(mode=0o700)
        self._become = []
        if os.getuid() == 0:
            for path in (self.home, self.scratch):
                shutil.chown(path, USER)
            # Everywhere else /dev/fuse is for everybody; here that holds in a mount namespace of the test.
            os.mknod(folder / "fuse", 0o020666, os.makedev(10, 229))
            (folder / "fuse").chmod(0o666)
            script = (
                f'mount --bind {folder}/fuse /dev/fuse; exec setpriv --reuid={USER} --regid=nogroup --clear-groups "$@"'
            )
            self._become = ["unshare", "--mount", "sh", "-c", script, "sh"]
        self.environment = {"HOME": str(self.home), "PATH": SEARCH}
        self.box = self._make_box(folder / "box")
        self.python = folder / "python"
        settings = [f"{name}={text}" for name, text in self.environment.items()]
        command = shlex.join([*self._become, "env", *settings, "/usr/bin/python3"])
        self.python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        self.python.chmod(0o755)
        try:
            self.run("exec", *self._binds(), str(self.box), "true")
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"apptainer runs nothing here: {error.stderr.strip()[-300:]}") from error

    def run(self, *words):
        """Output of an apptainer command of the user."""
        command = [*self._become, self.program, *words]
        done = subprocess.run(command, env=self.environment, cwd="/", check=True, capture_output=True, text=True)
        return done.stdout

    def instances(self):
        """Name -> pid of the user's instances."""
        found = json.loads(self.run("instance", "list", "--json"))["instances"]
        return {each["instance"]: each["pid"] for each in found}

    def options(self, **more):
        return {"apptainer": self.program, "python": str(self.python), "image": str(self.box), **OPTIONS, **more}

    def left(self):
        """What hosts could leave besides instances: folders, and files about them in the user's home."""
        about = (self.home / ".apptainer").rglob("hrl-*")
        return [*self.scratch.rglob("*"), *about]

    @staticmethod
    def _binds():
        return [word for bind in OPTIONS["binds"] for word in ("--bind", bind)]

    @staticmethod
    def _make_box(box):
        for name in ("usr", "sbin", "tmp", "var/tmp", "run", "root", "etc", "proc", "sys", "dev"):
            (box / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64"):
            (box / name).symlink_to(f"usr/{name}")
        for name in ("passwd", "group", "ld.so.cache"):
            shutil.copy(Path("/etc") / name, box / "etc" / name)
        return box
