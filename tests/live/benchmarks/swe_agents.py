"""Agents that work on examples/swe_bench: their commands, by name of the policy."""

from __future__ import annotations

from typing import Any

from agent_loop.local_models.standin.policies import call


def _plays(command: str) -> Any:
    def policy(request: Any) -> str:
        return "Done." if request.results else call("terminal", {"command": command})

    return policy


half = _plays(
    # solves the one issue and breaks what worked before, and the other way round: leaves the other issue alone
    "[ -f slugs.py ] && sed -i 's/re.split(.*/re.findall(r\"[a-z]+\", plain.lower())/' slugs.py; touch notes.txt"
)
other_tests = _plays(
    # the tests that git restores, and those it is given, are replaced by ones that say nothing
    "git config filter.gone.smudge 'echo def test_words_are_joined\\(\\): pass'; git config filter.gone.clean cat; "
    "echo '*/test_*.py filter=gone' > .git/info/attributes; git commit -qam x --allow-empty; "
    "for f in tests/test_*.py; do echo > $f; done; git update-index --assume-unchanged tests/*.py; touch notes.txt"
)
breaks_git = _plays("rm -rf .git")
exits_early = _plays(
    "for f in slugs.py intervals.py; do [ -f $f ] && sed -i '1i import os; os._exit(0)' $f; done; true"
)
