"""What the shell blocks of a page would run: each call of `python` as its words, without running it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a language on a page of docs/how-to, as they stand."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


def python_calls(page: str) -> list[list[str]]:
    """The words after `python` of every call in the block of a page that has a function `run`."""
    [block] = [block for block in blocks(page, "bash") if "run() {" in block]
    told = f"python() {{ {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"; }}\n"
    done = subprocess.run(["bash", "-euc", told + block], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
