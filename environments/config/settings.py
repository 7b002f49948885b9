"""Settings of an agent environment, under the names that hermes-agent uses, and of the servers it asks.

`RunConfig` is what a YAML in configs/ holds: the name of the environment, and Atropos' keys `env:` and `openai:`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from agent_loop.limits import Limits
from agent_loop.model.backends.http import http_address
from agent_loop.tools.config import McpServerConfig, ToolConfig
from agent_loop.tools.toolsets import DISTRIBUTIONS, resolve
from environments.atropos.advantages import Baseline
from environments.atropos.atropos_env import AtroposEnvConfig
from environments.atropos.packing import SegmentPolicy
from environments.scoring.rewards import RewardConfig
from sandbox_pool.config import PoolConfig
from sandbox_pool.errors import did_you_mean
from sandbox_pool.spec import SandboxSpec
from tool_parsers import get_parser

ServerType = Literal[
    "auto", "openai", "vllm", "vllm-scale-out", "vllm-generate", "sglang", "llamacpp", "cpu-model", "standin"
]
Verification = Literal["workspace", "layer", "live"]

MOST_TOKENS = 100_000_000
"""No model reads more; a larger figure is a slip of the keyboard."""
ROLLOUT_TIMEOUT_S = 1800.0
"""Default of `env.limits.rollout_timeout_s`: a rollout that hangs must not hold its group for ever."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ServerConfig(_Strict):
    """One inference server. All but `openai` give training-grade tokens."""

    base_url: str = ""
    """Root of the server, with or without /v1. Not needed for `cpu-model` and `standin`, which are started here."""
    model_name: str = "default"
    server_type: ServerType = "auto"
    """`auto` asks the server what it is. `openai`: any chat endpoint; rollouts without tokens, for evaluation, SFT."""
    api_key: SecretStr | None = None
    api_key_env: str | None = None
    """Name of the variable that holds the key, read once at the start."""
    tokenizer_name: str | None = None
    """Tokenizer of this model: a Hugging Face name, a directory or a GGUF file; None takes env.tokenizer_name."""
    timeout_s: float = Field(default=1200.0, gt=0)
    usd_per_mtok_prompt: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens, for env.budget.usd and the summary."""
    usd_per_mtok_sampled: float | None = Field(default=None, ge=0)
    """Price of a million sampled tokens."""
    ca_file: Path | None = None
    """Certificates (PEM) of a private authority, for https; None: those of the system, or SSL_CERT_FILE."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of `cpu-model` and `standin`, for instance the policy that a stand-in plays."""

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if url:
            http_address(url, may_have_query=True)  # chat endpoints may need one
        return url

    @model_validator(mode="after")
    def _is_the_stand_in_where_only_options_are_given(self) -> Self:
        if self.model_fields_set == {"options"}:  # of what is started here; nothing is said of an address
            self.server_type = "standin"
        return self


class BudgetSettings(_Strict):
    """What process and evaluate may use up; they then finish what runs and stop. A larger budget goes on from there."""

    tokens: int | None = Field(default=None, gt=0, description="Prompt and sampled tokens of all rollouts.")
    usd: float | None = Field(default=None, gt=0, description="Needs the prices of every server.")


class WorkspaceSettings(_Strict):
    """What process and evaluate keep of the workspaces that agents leave, for `hermes-rl rescore`."""

    keep: bool = Field(default=True, description="Whether they are kept at all.")
    max_mb: float = Field(default=32.0, gt=0, description="A workspace that takes more, compressed, is left out.")
    total_mb: float = Field(default=4096.0, gt=0, description="Of one run; further workspaces are left out.")


class HackMeterSettings(_Strict):
    """Shares of training groups that are probes, and when cheating ends the run. Both shares 0: no meter."""

    impossible: float = Field(default=0.0, ge=0, le=1, description="Items whose checks contradict each other.")
    tripwires: float = Field(default=0.0, ge=0, le=1, description="Slots with a planted secret and reward file.")
    stop_at: float | None = Field(default=None, gt=0, le=1, description="End at this share of cheated probes.")
    least: int = Field(default=32, ge=1, description="Probed rollouts before `stop_at` counts.")

    @model_validator(mode="after")
    def _are_shares(self) -> HackMeterSettings:
        if self.impossible + self.tripwires > 1:
            raise ValueError("`impossible` and `tripwires` are shares of all groups: together at most 1")
        return self


class RoleConfig(ServerConfig):
    """A further model of the run, which is not trained."""

    temperature: float | None = Field(default=None, ge=0)
    """None: 0 for a judge with one vote, else 0.7."""
    max_tokens: int = Field(default=1024, gt=0)
    """Of one answer."""
    tries: int = Field(default=5, ge=1)
    """Requests for one answer when the server fails; after the last one the rollout is lost."""
    at_once: int = Field(default=16, ge=1)
    """Requests at the same time, over all rollouts."""
    cache: Path | None = None
    """Folder of answers to keep for later runs. A judge also remembers its answers of this run."""
    prompt_price: float = Field(default=0.0, ge=0)
    """Price of a million tokens read, for the cost in the summary."""
    sampled_price: float = Field(default=0.0, ge=0)
    """Price of a million tokens written."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Passed to the server with every request."""


class JudgeConfig(RoleConfig):
    """The model that `ctx.judge` asks."""

    votes: int = Field(default=1, ge=1, le=100)
    """Verdicts that one judgement is the mean of."""
    max_material_chars: int = Field(default=60_000, ge=2)
    """Of each text that is judged; a longer one is cut in the middle."""

    @model_validator(mode="after")
    def _votes_can_differ(self) -> JudgeConfig:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(f"{self.votes} votes at temperature 0 are all the same: raise `temperature`")
        return self


class UserConfig(RoleConfig):
    """The model that plays the user: it answers each turn of the agent that has no calls."""

    max_replies: int = Field(default=10, ge=1)
    """The conversation ends after so many."""
    end: str = Field(default="###END###", min_length=1)
    """What the user says to end the conversation."""


class HermesAgentEnvConfig(AtroposEnvConfig):
    """Everything about an environment but its servers. Fields of atroposlib's BaseEnvConfig keep their meaning."""

    model_config = ConfigDict(extra="forbid")

    enabled_toolsets: list[str] | None = Field(
        default=None, description="Toolsets or tools; None: terminal and file; []: no tools, no slot."
    )
    disabled_toolsets: list[str] | None = Field(default=None, description="Taken away from what is enabled.")
    distribution: str | None = Field(default=None, description="Draw toolsets per group from this distribution.")
    distributions: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="Distributions of your own: by name, the probability of each toolset."
    )
    max_agent_turns: int = Field(default=30, ge=1)
    max_token_length: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Tokens of the longest sequence; None: the model's own context length (at most 131,072) where the "
        "server tells it, else 32,768.",
    )
    system_prompt: str | None = None
    agent_temperature: float = Field(default=1.0, ge=0)
    eval_temperature: float | None = Field(default=None, ge=0, description="For evaluate; None: agent_temperature.")
    max_tokens_per_turn: int | None = Field(default=None, gt=0, description="Sampled tokens of one turn.")
    max_context_tokens: int | None = Field(
        default=None, gt=0, description="Prompts are truncated to this; None: max_token_length less one turn."
    )
    tool_call_parser: str = Field(default="hermes", description="Format of tool calls in the model's text.")
    tools_in_prompt: bool = Field(default=True, description="Let the chat template write the tools' schemas.")
    extra_body: dict[str, Any] | None = Field(default=None, description="Passed to the server with every request.")
    terminal_timeout: float = Field(default=120.0, gt=0, description="Seconds a command may take by default.")
    terminal_lifetime: float = Field(default=3600.0, gt=0, description="Seconds a rollout may hold its sandbox.")
    dataset_name: str | None = None
    dataset_split: str = "train"
    prompt_field: str = "prompt"
    default_result_size_chars: int = Field(default=100_000, gt=0)
    turn_budget_chars: int = Field(default=200_000, gt=0)
    preview_size_chars: int = Field(
        default=1_500, gt=0, description="Characters that a result keeps at least when its turn is over budget."
    )
    tool_result_overrides: dict[str, int | None] = Field(
        default_factory=dict, description="Characters of one result by tool; null: no limit."
    )

    pool: PoolConfig = Field(default_factory=PoolConfig)
    sandbox: SandboxSpec = Field(default_factory=SandboxSpec, description="Slots for items that ask for nothing else.")
    tools: ToolConfig = Field(default_factory=ToolConfig)
    limits: Limits = Field(
        default_factory=lambda: Limits(rollout_timeout_s=ROLLOUT_TIMEOUT_S),
        description="Limits of one rollout; `max_agent_turns` is its `max_turns`.",
    )
    rewards: RewardConfig = Field(default_factory=RewardConfig)
    judge: JudgeConfig | None = Field(default=None, description="The model that `ctx.judge` asks.")
    user: UserConfig | None = Field(default=None, description="The model that plays the user; None: there is none.")
    mcp: dict[str, McpServerConfig] = Field(
        default_factory=dict, description="MCP servers by name; their tools join those of the model."
    )

    segments: SegmentPolicy = Field(default="all", description="What becomes of rollouts with several segments.")
    advantages: Baseline = Field(default="normalized", description="How explicit advantages are computed.")
    rollout_tries: int = Field(default=3, ge=1, description="Tries for a rollout that infrastructure ended.")
    group_deadline_s: float = Field(default=3600.0, gt=0, description="No new try after so long; the group is dropped.")
    max_failed_items: int | None = Field(
        default=50, ge=0, description="Items whose `prepare` may fail before the run ends; None: all of them."
    )
    prepare_cache_mb: int = Field(
        default=0,
        ge=0,
        description="Keep what `prepare` gave for later groups and runs, as files of up to so many MB in all in the "
        "pool's state directory; 0: never.",
    )
    verification: Verification = Field(
        default="workspace",
        description="What verifiers see: the workspace on a clean system, the slot's whole layer, or the running slot.",
    )
    store_end_state: bool = Field(
        default=False, description="Keep the text files that each rollout left in its record, for `view` to compare."
    )
    seed: int = Field(default=0, description="Order of items, draws of toolsets, sampling in process and evaluate.")
    sampling_seed: int = Field(default=0, description="Another number samples the same items anew.")
    seeded_sampling: bool | None = Field(
        default=None, description="Send a seed with each request; None: in process and evaluate only."
    )
    groups_at_once: int = Field(default=4, ge=1, description="Groups side by side in process and evaluate.")
    eval_items: int = Field(default=64, ge=0, description="Items of one evaluation.")
    eval_samples: int = Field(default=1, ge=1, description="Rollouts per evaluation item, for pass@k.")
    quarantine: Path | None = Field(
        default=None, description="Items to leave out: the list that `hermes-rl validate` writes."
    )
    budget: BudgetSettings = Field(
        default_factory=BudgetSettings, description="What process and evaluate may use up: tokens, US dollars."
    )
    hack_meter: HackMeterSettings = Field(
        default_factory=HackMeterSettings, description="Probes that prove cheating, while serving."
    )
    workspaces: WorkspaceSettings = Field(
        default_factory=WorkspaceSettings, description="Workspaces that process and evaluate keep, for rescore."
    )
    cassettes: bool = Field(
        default=False, description="Process and evaluate record each rollout whole, for `hermes-rl replay`."
    )
    run_dir: Path | None = Field(default=None, description="Where process and evaluate write; None: runs/<name>.")

    def pool_config(self) -> PoolConfig:
        """The pool's settings; unless they name a spec, its first hosts are started for `sandbox`."""
        given = "spec" in self.pool.model_fields_set
        return self.pool if given else self.pool.model_copy(update={"spec": self.sandbox})

    @model_validator(mode="after")
    def _is_a_distribution(self) -> HermesAgentEnvConfig:
        names = {*DISTRIBUTIONS, *(self.distributions or {})}
        if self.distribution is not None and self.distribution not in names:
            raise ValueError(f"unknown distribution {self.distribution!r}; {did_you_mean(self.distribution, names)}")
        return self

    @model_validator(mode="after")
    def _one_choice_of_tools(self) -> HermesAgentEnvConfig:
        if self.distribution is not None and self.enabled_toolsets is not None:
            raise ValueError("give either `distribution` or `enabled_toolsets`, not both")
        return self

    @model_validator(mode="after")
    def _a_turn_fits(self) -> HermesAgentEnvConfig:
        turn, longest = self.max_tokens_per_turn, self.max_token_length
        if turn is not None and longest is not None and turn >= longest:
            raise ValueError(
                f"`max_tokens_per_turn` ({turn}) leaves no room for a prompt in `max_token_length` ({longest})"
            )
        return self

    @field_validator("tool_call_parser")
    @classmethod
    def _is_a_parser(cls, name: str) -> str:
        get_parser(name)
        return name

    @field_validator("enabled_toolsets", "disabled_toolsets")
    @classmethod
    def _are_tools(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            resolve([name])
        return names

    @field_validator("limits", mode="before")
    @classmethod
    def _with_rollout_timeout(cls, given: Any) -> Any:
        return {"rollout_timeout_s": ROLLOUT_TIMEOUT_S, **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _one_number_of_turns(self) -> HermesAgentEnvConfig:
        if "max_turns" in self.limits.model_fields_set and self.limits.max_turns != self.max_agent_turns:
            raise ValueError("set `max_agent_turns` instead of `limits.max_turns`")
        return self


class RunConfig(_Strict):
    """One YAML of configs/: which environment, its settings, its servers."""

    environment: str = Field(default="", description="A shipped environment, or `module:Class`.")
    env: HermesAgentEnvConfig = Field(default_factory=HermesAgentEnvConfig)
    openai: ServerConfig | list[ServerConfig] = Field(default_factory=lambda: ServerConfig(server_type="standin"))
    learn: Any = None
    """Read and checked by `hermes-rl learn` alone."""
    trainer: Any = None
    """Read and checked by `hermes-rl learn` alone."""

    def servers(self) -> list[ServerConfig]:
        """The servers, however many were given."""
        return self.openai if isinstance(self.openai, list) else [self.openai]
