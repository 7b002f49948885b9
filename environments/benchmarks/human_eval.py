"""HumanEval: its 164 problems as an evaluation of their own; see `code_tasks`, which runs them."""

from __future__ import annotations

from pydantic import Field

from environments.code_tasks.code_env import CodeTasksConfig, CodeTasksEnv


class HumanEvalConfig(CodeTasksConfig):
    """All 164 problems."""

    dataset_name: str | None = "human_eval"
    eval_items: int = Field(default=164, ge=0, description="Problems of one evaluation, from the first one on.")


class HumanEvalEnv(CodeTasksEnv):
    """HumanEval's problems."""

    name = "human_eval"
    env_config_cls = HumanEvalConfig
    config: HumanEvalConfig


if __name__ == "__main__":
    HumanEvalEnv.cli()
