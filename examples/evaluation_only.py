"""An evaluation without training: a fixed set of questions, several samples each, pass@k and standard errors.

python examples/evaluation_only.py evaluate --env.eval_samples 4 --out runs/evaluation_only
"""

from __future__ import annotations

from collections.abc import Sequence

from hermes_rl import AgentResult, HermesAgentBaseEnv, SandboxContext, ToolContext

Item = dict[str, str]
QUESTIONS: list[Item] = [
    {
        "id": "lines",
        "category": "count",
        "ask": "How many lines has log.txt?",
        "answer": "40",
        "how": "wc -l < log.txt",
    },
    {
        "id": "errors",
        "category": "count",
        "ask": "How many lines of log.txt hold the word ERROR?",
        "answer": "8",
        "how": "grep -c ERROR log.txt",
    },
    {
        "id": "last",
        "category": "search",
        "ask": "Which number stands in the last line of log.txt that holds the word ERROR?",
        "answer": "35",
        "how": "grep ERROR log.txt | tail -1 | cut -d' ' -f2",
    },
]


class EvaluationEnv(HermesAgentBaseEnv):
    name = "evaluation_only"

    async def setup(self) -> None:
        self.log = "".join(f"line {n} {'OK' if n % 5 else 'ERROR'}\n" for n in range(40))

    async def get_next_item(self) -> None:
        """There is nothing to train on."""

    async def evaluation_items(self) -> Sequence[Item]:
        return QUESTIONS

    async def prepare(self, item: Item, ctx: SandboxContext) -> None:
        await ctx.write_file("log.txt", self.log)

    def format_prompt(self, item: Item) -> str:
        return f"{item['ask']} Write the answer, and nothing else, into answer.txt."

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return float((await ctx.exec("cat answer.txt")).output.strip() == item["answer"])

    def solution(self, item: Item) -> list[str]:
        return [f"{item['how']} > answer.txt"]


if __name__ == "__main__":
    EvaluationEnv.cli()
