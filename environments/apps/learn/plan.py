"""What `learn` is asked to do, and the settings it writes for each of its processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from agent_loop.local_models.cpu_model.llama_server import CONTEXT_TOKENS
from agent_loop.model.backends.backend import GROUP
from environments.apps.learn.trl_trainer import UNUSED, TrlJob, half_of_the_cores
from environments.apps.reference_trainer.trainer_settings import TrainerJob, TrainerSettings
from environments.base import HermesAgentBaseEnv
from environments.config.loader import masked
from environments.config.settings import RunConfig, ServerConfig
from environments.errors import UsageError
from environments.launch import load_run
from environments.rollouts.planning import longest_sequence

By = Literal["reference", "trl"]
NEEDED = {"reference": ("xllamacpp", "gguf", "jax"), "trl": ("xllamacpp", "gguf", "trl", "torch", "datasets", "peft")}
"""Trainer -> what it and the model need."""
REFERENCE_TRAINER = (sys.executable, "-P", "-m", "environments.apps.reference_trainer")
TRL_TRAINER = (sys.executable, "-P", "-m", "environments.apps.learn.trl_trainer")
SAMPLING_TIMEOUT_S = 3600.0
MIN_ROLLOUT_TIMEOUT_S = 600.0
"""Rollouts wait while a step is trained and evaluated."""


class LearnConfig(BaseModel):
    """What `hermes-rl learn` does besides training."""

    model_config = ConfigDict(extra="forbid")

    minutes: float | None = Field(default=None, gt=0)
    """No new step is started when the last evaluation would then end later than this; None: all steps are made."""
    eval_every: int = Field(default=10, ge=0)
    """Steps between two evaluations; 0: only at the start and at the end."""
    eval_items: int | None = Field(default=None, ge=1)
    """Held-out tasks of one evaluation: the same ones each time; None: env.eval_items."""
    eval_samples: int | None = Field(default=None, ge=1)
    """Rollouts of each; None: env.eval_samples."""


class LearnRunConfig(RunConfig):
    """A config with the sections that only `learn` reads."""

    learn: LearnConfig = Field(default_factory=LearnConfig)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)


@dataclass(frozen=True)
class LearnPlan:
    kind: type[HermesAgentBaseEnv]
    config: LearnRunConfig
    out: Path
    resume: bool = False
    fresh: bool = False
    by: By = "reference"
    trainer: Sequence[str] = REFERENCE_TRAINER
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

        unused = sorted(self.config.trainer.model_fields_set & set(UNUSED)) if self.by == "trl" else []
        if unused:
            raise UsageError(f"trainer.{unused[0]} is the reference trainer's: leave it out with --trainer trl")

    @property
    def model_options(self) -> dict[str, Any]:
        given = dict(self.config.servers()[0].options)
        if self.by != "trl":
            return given
        return {"threads": half_of_the_cores(), **given, "weights": "F16"}  # TRL must find the logprobs of the sampler

    def server(self, url: str, model: Path) -> ServerConfig:
        return ServerConfig(
            base_url=url,
            server_type="llamacpp",
            model_name=self.config.servers()[0].model_name,
            tokenizer_name=str(model),
            timeout_s=SAMPLING_TIMEOUT_S,
        )

    def as_run(self) -> dict[str, Any]:
        """The whole config with secrets masked, for config.yaml of the run."""
        plain: dict[str, Any] = orjson.loads(orjson.dumps(masked(self.config), default=str))
        return plain

    def rollout_config(self, server: ServerConfig, rollouts: Path, api_url: str | None = None) -> dict[str, Any]:
        """Config of the environment whose rollouts are trained on; with a run-api they are served there."""
        given = self.config.env
        settings = given.model_dump(mode="json", exclude_unset=True)
        settings |= {
            "extra_body": {**(given.extra_body or {}), GROUP: given.group_size},
            "seeded_sampling": True if given.seeded_sampling is None else given.seeded_sampling,
            "data_path_to_save_groups": str(rollouts),
            "total_steps": -1,
            "steps_per_eval": 0,
            "drain_timeout_s": 1.0,
            "trackers": [],  # `learn` itself tells them
        }
        if api_url is not None:
            settings["rollout_server_url"] = api_url
        if given.max_num_workers == -1:
            settings["max_num_workers"] = self.config.trainer.groups_per_step
        return {
            "environment": self.config.environment,
            "env": settings,
            "openai": server.model_dump(mode="json", exclude_unset=True),
        }

    def trl_job(self, rollouts: Path, model_url: str, model: Path, run_dir: Path) -> TrlJob:
        settings = self.config.trainer.model_dump()
        return TrlJob(**settings, rollouts=rollouts, model_url=model_url, model=model, run_dir=run_dir)

    def trainer_job(self, api_url: str, model_url: str, model: Path, run_dir: Path, resume: bool) -> TrainerJob:
        context = self.model_options.get("context_tokens", CONTEXT_TOKENS)
        return TrainerJob(
            **self.config.trainer.model_dump(),
            run_api_url=api_url,
            model_url=model_url,
            model=model,
            run_dir=run_dir,
            resume=resume,
            group_size=self.config.env.group_size,
            max_token_len=longest_sequence(self.config.env, model_context=context) + 1,
        )


def load_plan(
    source: str,
    settings: Sequence[str],
    out: Path,
    resume: bool = False,
    fresh: bool = False,
    by: By = "reference",
    **more: Any,
) -> LearnPlan:
    """Read the config and check that it can be run; UsageError says why not."""
    if missing := [name for name in NEEDED[by] if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{', '.join(missing)} cannot be imported: `pip install {' '.join(missing)}`")
    kind, config = load_run(source, settings, None, LearnRunConfig)
    if by == "trl":
        more["trainer"] = TRL_TRAINER
    return LearnPlan(kind, config, out, resume, fresh, by, **more)
