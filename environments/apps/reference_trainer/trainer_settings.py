"""Settings of the reference trainer: `TrainerSettings` is the `trainer:` section of a config, `TrainerJob` one run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Control = Literal["none", "shuffled", "shifted"]


class TrainerSettings(BaseModel):
    """How to train; the defaults teach SmolLM2-135M on two cores."""

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(default=30, ge=0)
    """Steps in total, including those before a resume."""
    groups_per_step: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    final_learning_rate: float = Field(default=3e-4, ge=0)
    """The learning rate falls to this in a straight line, so that late steps undo less of what was learned before."""
    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    """The adapter is scaled by alpha / rank."""
    first_layer: int = Field(default=10, ge=0)
    """Layers below it have no adapter, so they need no backward pass."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    ratio_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight: p_trainer / p_sampler of a token is truncated here."""
    std_floor: float = Field(default=0.05, ge=0)
    """Added to a group's deviation, so that groups that hardly differ are not amplified."""
    max_gradient_norm: float | None = Field(default=None, gt=0)
    microbatch_segments: int = Field(default=36, ge=2)
    """Segments (tasks, and different continuations) that go through the model together: bounds the memory."""
    max_staleness: int = Field(default=2, ge=0)
    """Rows sampled by weights older than this many updates are not trained on."""
    synchronous: bool = True
    """Sampling pauses while a step is trained, so that every row comes from the newest weights."""
    keep_checkpoints: int = Field(default=3, ge=1)
    seed: int = 0
    control: Control = "none"
    """Negative controls, which must not learn. `shuffled`: advantages change rows within their group; `shifted`: masks
    and logprobs come one token too late."""


class TrainerJob(TrainerSettings):
    """One run of the trainer process: the settings, and where everything is."""

    run_api_url: str
    model_url: str | None = None
    """The server whose weights are updated (`/control/...`); None: adapters are only written."""
    model: Path
    """The GGUF that samples: the trainer starts from exactly these weights."""
    run_dir: Path
    resume: bool = False
    group_size: int = Field(ge=1)
    """Sequences of a group, `env.group_size`: run-api counts a batch in sequences."""
    max_token_len: int = Field(ge=2)
    """`env.max_token_length` + 1: run-api's limit is exclusive."""
    compilation_cache: Path | None = None
    """Where compiled programs are kept between runs; None: hermes-rl's cache folder."""

    @property
    def batch_size(self) -> int:
        """Sequences of a step."""
        return self.groups_per_step * self.group_size
