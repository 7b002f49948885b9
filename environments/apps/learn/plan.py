"""What `learn` is asked to do, and the settings it writes down for each of its processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agent_loop.local_models.cpu_model.llama_server import CONTEXT_TOKENS
from agent_loop.model.backends.backend import GROUP
from environments.apps.reference_trainer.trainer_settings import TrainerJob
from environments.base import HermesAgentBaseEnv
from environments.config import masked
from environments.config.settings import RunConfig, ServerConfig
from environments.errors import UsageError
from environments.rollouts.planning import Plan

REFERENCE_TRAINER = (sys.executable, "-m", "environments.apps.reference_trainer")
SAMPLING_TIMEOUT_S = 3600.0
MIN_ROLLOUT_TIMEOUT_S = 600.0
"""Rollouts wait for a training step and an evaluation."""


@dataclass(frozen=True)
class LearnPlan:
    """One run of `learn`."""

    kind: type[HermesAgentBaseEnv]
    config: RunConfig
    out: Path
    resume: bool = False
    fresh: bool = False
    trainer: Sequence[str] = field(default=REFERENCE_TRAINER)
    """Command of the trainer; the path of its settings is added."""

    def __post_init__(self) -> None:
        servers = self.config.servers()
        if len(servers) != 1 or servers[0].server_type != "cpu-model":
            raise UsageError("learn trains a model that it serves itself: set openai.server_type to cpu-model")
        limit = self.config.env.limits.rollout_timeout_s
        if self.config.trainer.synchronous and limit is not None and limit < MIN_ROLLOUT_TIMEOUT_S:
            raise UsageError(
                f"env.limits.rollout_timeout_s is {limit:.0f} s: rollouts wait for the new weights while a step is "
                f"trained and evaluated, so give at least {MIN_ROLLOUT_TIMEOUT_S:.0f} s"
            )

    @property
    def model_options(self) -> dict[str, Any]:
        """How the model is served."""
        return dict(self.config.servers()[0].options)

    def server(self, url: str, model: Path) -> ServerConfig:
        """The front as a server that environments ask."""
        return ServerConfig(
            base_url=url,
            server_type="llamacpp",
            model_name=self.config.servers()[0].model_name,
            tokenizer_name=str(model),
            timeout_s=SAMPLING_TIMEOUT_S,
        )

    def as_run(self) -> dict[str, Any]:
        """The whole config, secrets masked, for the reader of the run."""
        plain: dict[str, Any] = orjson.loads(orjson.dumps(masked(self.config), default=str))
        return plain

    def serve_config(self, api_url: str, server: ServerConfig, rollouts: Path) -> dict[str, Any]:
        """Config of the environment that trains."""
        given = self.config.env
        settings = given.model_dump(mode="json", exclude_unset=True)
        settings |= {
            "rollout_server_url": api_url,
            "extra_body": {**(given.extra_body or {}), GROUP: given.group_size},
            "seeded_sampling": True if given.seeded_sampling is None else given.seeded_sampling,
            "data_path_to_save_groups": str(rollouts),
            "total_steps": -1,
            "steps_per_eval": 0,
            "drain_timeout_s": 1.0,
        }
        if given.max_num_workers == -1:
            settings["max_num_workers"] = self.config.trainer.groups_per_step
        return {
            "environment": self.config.environment,
            "env": settings,
            "openai": server.model_dump(mode="json", exclude_unset=True),
        }

    def trainer_job(self, api_url: str, model_url: str, model: Path, run_dir: Path, resume: bool) -> TrainerJob:
        """Settings of the trainer's process."""
        longest = Plan(self.config.env, model_context=self.model_options.get("context_tokens", CONTEXT_TOKENS))
        return TrainerJob(
            **self.config.trainer.model_dump(),
            run_api_url=api_url,
            model_url=model_url,
            model=model,
            run_dir=run_dir,
            resume=resume,
            group_size=self.config.env.group_size,
            max_token_len=longest.longest_sequence() + 1,
        )
