"""requirements/*.txt are uv.lock in pip's words, without what `override-dependencies` leaves out.

`PYTHONPATH=tests .venv/bin/python tests/support/lean_requirements.py` makes them anew after `uv lock`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {"lean.txt": (), "lean-learn.txt": ("--extra", "learn")}
LEFT_OUT = "sys_platform == 'never'"
OPTIONS = ("--offline", "--frozen", "--no-dev", "--no-hashes", "--no-annotate", "--no-header", "--no-emit-project")
HEAD = """\
# All that hermes-rl{extra} imports, without 600 MB that atroposlib names and never uses:
# pip install --no-deps -r requirements/{name} -e .
"""


def find_uv() -> str | None:
    return shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def lean(name: str, uv: str) -> str:
    """The text of one file."""
    command = [uv, "export", "--quiet", *OPTIONS, *FILES[name]]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept = [line for line in listed.splitlines(keepends=True) if LEFT_OUT not in line]
    return HEAD.format(name=name, extra="[learn]" if FILES[name] else "") + "".join(kept)


if __name__ == "__main__":
    for file in FILES:
        (ROOT / "requirements" / file).write_text(lean(file, find_uv() or "uv"))
