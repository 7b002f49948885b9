"""Code with hidden tests: write a function. Shows tests that the agent's code cannot read, patch or answer by printing.

python examples/code_with_tests.py process --env.total_steps 3 --env.group_size 4 --out runs/code_with_tests
"""

from __future__ import annotations

import shlex
from typing import Any

from hermes_rl import AgentResult, HermesAgentBaseEnv, ToolContext, Verdict

Item = dict[str, Any]
TASKS: list[Item] = [
    {
        "id": "clamp",
        "text": "clamp(x, low, high) returns x, but never less than low and never more than high",
        "code": "def clamp(x, low, high):\n    return max(low, min(x, high))\n",
        "cases": [([5, 0, 3], 3), ([-5, 0, 3], 0), ([2, 0, 3], 2)],
    },
    {
        "id": "initials",
        "text": "initials(name) returns the first letters of the words of a name in capitals, such as 'AL'",
        "code": "def initials(name):\n    return ''.join(word[0].upper() for word in name.split())\n",
        "cases": [(["ada lovelace"], "AL"), (["grace brewster hopper"], "GBH"), ([""], "")],
    },
    {
        "id": "runs",
        "text": "runs(text) returns how many runs of equal characters a text has",
        "code": "def runs(text):\n    return sum(a != b for a, b in zip(text, ' ' + text[:-1]))\n",
        "cases": [(["aabbb"], 2), (["abc"], 3), ([""], 0)],
    },
]


class CodeEnv(HermesAgentBaseEnv):
    name = "code_with_tests"

    async def setup(self) -> None:
        self.next = 0

    async def get_next_item(self) -> Item:
        self.next += 1
        return TASKS[(self.next - 1) % len(TASKS)]

    def format_prompt(self, item: Item) -> str:
        return f"Write solution.py with this Python function: {item['text']}."

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> Verdict:
        """Asks the code for its answers and compares them here: the expected values never enter the sandbox."""
        answers = await ctx.ask_python("solution.py", [(item["id"], arguments) for arguments, _ in item["cases"]])
        return Verdict.of(
            [
                f"{item['id']}{tuple(arguments)} is not {value!r} but {answer.raises or answer.returned!r}"
                for (arguments, value), answer in zip(item["cases"], answers, strict=True)
                if answer.raises or answer.returned != value
            ]
        )

    def solution(self, item: Item) -> list[str]:
        return [f"printf %s {shlex.quote(item['code'])} > solution.py"]


if __name__ == "__main__":
    CodeEnv.cli()
