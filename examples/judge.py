"""A judge: poems are scored by a second model. Without one (the default) a stub counts lines, so this runs anywhere.

python examples/judge.py process --env.total_steps 2 --env.group_size 4 --out runs/judge
python examples/judge.py process --env.judge_url http://127.0.0.1:8001/v1 --env.judge_model Qwen/Qwen3-8B
"""

from __future__ import annotations

import re
import shlex

from hermes_rl import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext

SUBJECTS = ("rain", "bread", "the sea", "winter")
QUESTION = "Rate this poem about {subject} from 0 (not a poem) to 10. Answer with the number alone.\n\n{poem}"


class JudgeConfig(HermesAgentEnvConfig):
    judge_url: str = ""  # any chat endpoint; empty: the stub
    judge_model: str = "default"


class JudgeEnv(HermesAgentBaseEnv):
    name = "judge"
    env_config_cls = JudgeConfig
    config: JudgeConfig

    async def setup(self) -> None:
        self.number = 0

    async def get_next_item(self) -> dict[str, str]:
        self.number += 1
        return {"id": f"poem-{self.number}", "subject": SUBJECTS[self.number % len(SUBJECTS)]}

    def format_prompt(self, item: dict[str, str]) -> str:
        return f"Write a poem of three lines about {item['subject']} into poem.txt."

    async def compute_reward(self, item: dict[str, str], result: AgentResult, ctx: ToolContext) -> float:
        poem = (await ctx.exec("head -c 2000 poem.txt 2>/dev/null")).output
        if not poem.strip():
            return 0.0  # nothing to judge: what the agent did is known without asking
        return await self._ask(item["subject"], poem) if self.config.judge_url else stub(item["subject"], poem)

    async def _ask(self, subject: str, poem: str) -> float:
        """An exception loses the rollout, which is then tried again: a judge that is away is never a score of 0."""
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=self.config.judge_url, api_key="none") as judge:
            question = QUESTION.format(subject=subject, poem=poem)
            answer = await judge.chat.completions.create(
                model=self.config.judge_model, temperature=0, messages=[{"role": "user", "content": question}]
            )
        found = re.search(r"\d+(\.\d+)?", answer.choices[0].message.content or "")
        if found is None:
            raise ValueError(f"the judge gave no number: {answer.choices[0].message.content!r}")
        return min(float(found[0]), 10.0) / 10

    def solution(self, item: dict[str, str]) -> list[str]:
        lines = f"I thought of {item['subject']} today\nit stayed a while and went away\nI wrote it down anyway\n"
        return [f"printf %s {shlex.quote(lines)} > poem.txt"]


def stub(subject: str, poem: str) -> float:
    """Half for three lines, half for the subject."""
    return 0.5 * (len(poem.strip().splitlines()) == 3) + 0.5 * (subject in poem)


if __name__ == "__main__":
    JudgeEnv.cli()
