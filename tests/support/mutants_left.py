"""What `mutmut run` left alive in a tree: the share that tests killed, and each survivor as a difference.

python tests/support/mutants_left.py build/mutants
"""

from __future__ import annotations

import ast
import difflib
import json
import sys
from pathlib import Path

SURVIVED, NO_TESTS = 0, {5, 33}


def functions(source: str) -> dict[str, list[str]]:
    """The lines of each function by its name; mutmut keeps every mutant as a function of its own."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: (ast.get_source_segment(source, node) or "").splitlines() for node in found}


def difference(before: list[str], after: list[str]) -> list[str]:
    """Changed lines, without the one that names the function."""
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line.rstrip() for line in lines if line[0] in "+-" and "__mutmut_" not in line]


def main(tree: Path) -> int:
    killed = total = 0
    for meta in sorted(tree.glob("mutants/**/*.meta")):
        codes = json.loads(meta.read_text())["exit_code_by_key"]
        alive = [name for name, code in codes.items() if code == SURVIVED or code in NO_TESTS]
        checked = sum(code is not None for code in codes.values())
        if not checked:
            continue
        total, killed = total + checked, killed + checked - len(alive)
        module = meta.relative_to(tree / "mutants").with_suffix("")
        print(f"{module}: {checked - len(alive)} of {checked} killed, {len(codes) - checked} not tried")
        known = functions(meta.with_suffix("").read_text())
        for name in (full.rpartition(".")[2] for full in alive):
            original = known.get(name.rpartition("__mutmut_")[0] + "__mutmut_orig", [])
            print(f"  {name}", *difference(original, known.get(name, [])), sep="\n    ")
    print(f"{killed} of {total} killed: {100 * killed / max(1, total):.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
