"""How much memory a process tree really costs: what its processes share is not counted again and again."""

from __future__ import annotations

from pathlib import Path


def private_kb_below(root: int) -> int:
    """Private (not shared) memory of all descendants of a process, in kB."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat[stat.rfind(")") + 2 :].split()[1]), []).append(int(entry.name))
    total_kb, queue = 0, list(parents.get(root, []))
    while queue:
        pid = queue.pop()
        queue += parents.get(pid, [])
        total_kb += _private_kb(pid)
    return total_kb


def _private_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
