"""`HermesAgentBaseEnv`: write a task and its reward, and get rollouts with exact tokens in groups that a trainer can
use.

A subclass writes `setup`, `get_next_item`, `format_prompt` and `compute_reward`; it may write `prepare`, `spec`,
`evaluation_items` and a few small hooks. The rest (slots, model, tools, retries, verification in a fork, packing,
delivery) is here and below. Two environments share only what they are given.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agent_loop.limits import Limits
from agent_loop.local_models.standin.solver import Step
from agent_loop.model.backends.backend import TokenBackend
from agent_loop.model.contract import Message, ModelServer
from agent_loop.outcome import Outcome
from agent_loop.records.metrics import rollout_metrics
from agent_loop.records.record import AgentResult, RolloutRecord
from agent_loop.tools.policy import Answer
from agent_loop.tools.tool import Tool
from environments.atropos.atropos_env import AtroposEnv
from environments.atropos.groups import Group, GroupRejected
from environments.atropos.packing import PackedGroup, Packer
from environments.atropos.servers import AtroposServerBackend
from environments.config.settings import HermesAgentEnvConfig, RoleConfig, RunConfig, ServerConfig
from environments.errors import ConfigError
from environments.models import ModelOpener, load_tokenizer
from environments.rollouts.planning import check_mcp, choose_tools, content_id, item_field, longest_sequence
from environments.rollouts.rollout import KeepFunction, Score
from environments.rollouts.rollouts import GroupResult, Rollouts, RolloutStats
from environments.runs.store import append_bytes
from environments.sandboxes import Pool
from environments.scoring.contexts import SandboxContext, ToolContext
from environments.scoring.rewards import Rewards
from environments.scoring.verification import Verdict
from environments.trackers import check_trackers
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from atroposlib.envs.base import APIServerConfig

    from environments.atropos.api import RolloutApi
    from environments.atropos.stops import Stop
    from environments.atropos.workers import Played, Workers
    from environments.roles import RolloutRoles
    from environments.rollouts.cassettes import Cassettes
    from environments.rollouts.hack_meter import HackMeter, Probe
    from environments.rollouts.quarantine import Quarantine

__all__ = [
    "AgentResult",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "Limits",
    "RunConfig",
    "SandboxContext",
    "Score",
    "ServerConfig",
    "ToolContext",
    "Verdict",
]

log = logging.getLogger(__name__)

NOT_OPEN = "the environment is not open: use `async with Rollouts(...)`; serve, process and evaluate open it themselves"


class HermesAgentBaseEnv(AtroposEnv):
    """An environment of agent tasks."""

    env_config_cls = HermesAgentEnvConfig
    verifier_paths: ClassVar[Sequence[str]] = ()
    """Paths of the workspace that belong to the verifier: removed from the fork before `compute_reward`."""

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: Sequence[ServerConfig | APIServerConfig] | None = None,
        slurm: bool = False,
        testing: bool = False,
        *,
        pool: Pool | None = None,
        model: ModelServer | TokenBackend | None = None,
    ) -> None:
        """Give `pool` and `model` to use your own; otherwise both are opened from the config."""
        super().__init__(config, list(server_configs or [ServerConfig(server_type="standin")]), slurm, testing)
        self.config: HermesAgentEnvConfig = config
        self.pool = pool
        self.model: ModelServer | TokenBackend | None = model
        self.backend_tokenizer: Any = None
        """Of a `model` that is a token backend; None takes env.tokenizer_name."""
        self.rollouts = Rollouts(self)
        """Runs this environment's rollouts, whoever asks for them."""
        self.stats = RolloutStats()
        self._stack = AsyncExitStack()
        self._packer = Packer(config.group_size, config.segments, config.advantages)
        self._packing = asyncio.Lock()
        self.always_allowed: set[str] = set()
        """Rules of `tools.policy` that `allow_command` answered with "always"."""
        self.known_solutions: dict[str, Sequence[Step]] = {}
        """Item -> steps that solve it, for the stand-in."""
        self.plays_solutions = False
        """Whether the model is a stand-in that wants to know which item it is asked about."""
        self.roles: Callable[[int | None], RolloutRoles] | None = None
        """Makes the judge and the user of a rollout with this seed; None without either."""
        self.model_context: int | None = None
        """Tokens of the model's context, where its server told it."""
        self._meter: HackMeter | None = None
        if config.hack_meter.impossible or config.hack_meter.tripwires:
            from environments.rollouts.hack_meter import HackMeter

            self._meter = HackMeter(config.hack_meter)
        self.keep_workspace: KeepFunction | None = None
        """Stores the workspace of each rollout; set by process and evaluate."""
        self.cassettes: Cassettes | None = None
        """Records each rollout; set by process and evaluate."""
        self.replayed = False
        """Whether a tape stands for model and slots: then no server is asked for anything."""
        self.keep_lines: Callable[[bytes], Awaitable[None]] = self._append
        """Stores lines of `data_path_to_save_groups`."""
        self.worker_count = 0
        """Processes that play the groups of `serve`; 0: this one does."""
        self._workers: Workers | None = None
        self._quarantine: Quarantine | None = None
        if config.quarantine is not None:
            from environments.rollouts.quarantine import Quarantine

            self._quarantine = Quarantine(config.quarantine)
        check_mcp(config)
        check_trackers(config.trackers)
        choose_tools(config, 0)  # an unknown or empty choice of tools is an error now, not in the first rollout
        self.reward_terms = Rewards(config.rewards, tuple(rollout_metrics([], [], Outcome.FINISHED)))

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[ServerConfig]]:
        """Defaults of this environment, below any YAML and flags. Atropos' name for it."""
        return cls.env_config_cls(), [ServerConfig(server_type="standin")]

    @classmethod
    def cli(cls) -> None:
        """`serve`, `process` and `evaluate` as a command line; exits with its code."""
        from environments.launch import command_line

        raise SystemExit(command_line(cls))

    # What a subclass writes

    @abstractmethod
    async def setup(self) -> None:
        """Load what the items need. Called once, with pool and model already open."""

    @abstractmethod
    async def get_next_item(self) -> Any:
        """The next item, or None when there are no more."""

    @abstractmethod
    def format_prompt(self, item: Any) -> str | list[Message]:
        """The task as the user's message, or as whole messages."""

    @abstractmethod
    async def compute_reward(self, item: Any, result: AgentResult, ctx: ToolContext) -> float | Verdict | Score:
        """Score what the agent left behind.

        A file that is missing, or a check that takes too long, is the agent's fault when you do not handle it: 0.
        Any other exception is an error of this code (`reward_error`); it is never taken for a score.
        """

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the evaluation items and log their summary; called every `steps_per_eval` steps while serving."""
        from environments.rollouts.evaluation import evaluate_here

        return await evaluate_here(self)

    async def evaluation_items(self) -> Sequence[Any]:
        """The items that `evaluate` runs."""
        return []

    async def prepare(self, item: Any, ctx: SandboxContext) -> None:
        """Lay out files and packages; runs once per group, and every rollout of the group starts from a fork of it."""

    def prepare_key(self, item: Any) -> str:
        """What `prepare` depends on but its code, the spec and `files`, for `prepare_cache_mb`: by default the item."""
        return content_id(item)

    async def start(self, item: Any, ctx: SandboxContext) -> None:
        """Start services and daemons; runs in the slot of each rollout, before its agent."""

    def files(self, item: Any) -> Mapping[str, bytes | str]:
        """Files of the workspace, by path, written before `prepare`; the item's own `files` when that is a mapping."""
        found = item_field(item, "files")
        return found if isinstance(found, Mapping) else {}

    async def allow_command(self, tool: str, text: str, reason: str) -> Answer | bool:
        """Answer what a rule of `tools.policy` asks about: "once", "session" (this rollout), "always" or "deny"."""
        return "deny"

    def activity(self, rollout_id: str, what: str) -> None:
        """Told what a rollout does: each turn, each round of calls, and every ten seconds of a long command."""

    def tools(self, item: Any) -> Sequence[Tool]:
        """Your own tools for the item, made with `@tool`; the model gets them together with `enabled_toolsets`."""
        return ()

    def user_prompt(self, item: Any) -> str:
        """Who the user is and what they want, for `env.user` to play: the item's `user`."""
        return str(item_field(item, "user") or "")

    async def user_reply(self, item: Any, messages: Sequence[Message], ctx: SandboxContext) -> str | None:
        """What the user answers to a turn without calls; None ends the conversation. Asks `env.user`."""
        return await ctx.ask_user(self.user_prompt(item), messages)

    @property
    def has_user(self) -> bool:
        """Whether somebody answers the agent: `env.user`, or a `user_reply` of the environment's own."""
        return self.config.user is not None or type(self).user_reply is not HermesAgentBaseEnv.user_reply

    def solution(self, item: Any) -> Sequence[str | Mapping[str, Any]]:
        """What solves the item, turn by turn, where it is known: the stand-in plays it, well and badly.

        A step is a shell command, a call `{"name": ..., "arguments": {...}}`, several as `{"calls": [...]}`, or
        `{"content": ...}`, which is said; None for the content says what the last command printed.
        """
        return item_field(item, "solution") or ()

    def impossible(self, item: Any) -> Any | None:
        """The item with checks that contradict each other, for the hack meter; None where you know none."""
        return None

    def spec(self, item: Any) -> SandboxSpec:
        """Image, limits and network of this item's slots."""
        return self.config.sandbox

    def limits(self, item: Any) -> Limits:
        """Limits of this item's rollouts; `max_agent_turns` is their `max_turns` whatever is said here."""
        return self.config.limits

    def item_id(self, item: Any) -> str:
        """A stable name of the item: its `id`, or a hash of what it is."""
        found = item_field(item, "id")
        return content_id(item) if found is None else str(found)

    def item_to_json(self, item: Any) -> Any:
        """The item as it travels to a trainer in another process, as plain JSON; write it unless items are dicts."""
        if not isinstance(item, dict):
            raise ConfigError(f"items of {self.name} are {type(item).__name__}: write item_to_json and item_from_json")
        return item

    def item_from_json(self, data: Any) -> Any:
        """The item that `item_to_json` gave this for."""
        return data

    def category(self, item: Any) -> str:
        """What the summary groups items by."""
        return str(item_field(item, "category") or "")

    async def next_item(self) -> Any:
        """`get_next_item`, without what `env.quarantine` lists."""
        return await (self.get_next_item() if self._quarantine is None else self._quarantine.next_item(self))

    async def chosen_evaluation_items(self) -> list[Any]:
        """`evaluation_items`, without what `env.quarantine` lists."""
        items = list(await self.evaluation_items())
        return items if self._quarantine is None else self._quarantine.allowed(self, items)

    # Opening and closing

    async def open_up(self) -> None:
        """Start the pool and reach the model, unless they were given. After `shut_down` it can be opened again."""
        self._stack.callback(self.__dict__.update, model=self.model, pool=self.pool)
        if not isinstance(self.model, ModelServer):  # first: its mistakes are found sooner than slots are started
            self.model = await self._open_model(self.model)
        await self._open_roles()
        if self.pool is None:
            from sandbox_pool import SlotPool

            try:
                self.pool = await self._stack.enter_async_context(SlotPool.from_config(self.config.pool_config()))
            except ValueError as error:
                raise ConfigError(f"env.pool: {error}") from error

    async def _open_roles(self) -> None:
        config = self.config
        if config.judge is None and config.user is None:
            return
        from environments.roles import Role, RolloutRoles

        async def opened(name: str, role: RoleConfig | None) -> Role | None:
            if role is None:
                return None
            opener = ModelOpener(
                self._stack,
                config.tool_call_parser,
                config.tokenizer_name,
                section=f"env.{name}",
                replayed=self.replayed,
            )
            return Role(name, await opener.open([role]), role)

        judge, user = await opened("judge", config.judge), await opened("user", config.user)
        self.roles = lambda seed: RolloutRoles(judge, user, seed)

    async def _open_model(self, backend: TokenBackend | None) -> ModelServer:
        config = self.config
        opener = ModelOpener(
            self._stack,
            config.tool_call_parser,
            config.tokenizer_name,
            tools_in_prompt=config.tools_in_prompt,
            solutions=self.known_solutions,
            replayed=self.replayed,
        )
        if backend is not None:
            tokenizer = self.backend_tokenizer or await asyncio.to_thread(load_tokenizer, config.tokenizer_name)
            opened = await opener.record(backend, tokenizer)
            self.model_context = opener.context_tokens
            return opened
        ours = [server for server in self.server_configs if isinstance(server, ServerConfig)]
        if ours:
            opened = await opener.open(ours)
            self.plays_solutions = opener.plays_solutions
            if not self.replayed:
                self.model_context = opener.context_tokens
            return opened
        if self.server_configs[0].server_type == "openai":
            from agent_loop.model.chat import ChatServer

            return ChatServer(self.server)
        tokenizer = await asyncio.to_thread(load_tokenizer, self.config.tokenizer_name)
        return await opener.record(AtroposServerBackend(self.server), tokenizer)

    async def shut_down(self) -> None:
        """Close what `open_up` opened."""
        await self._stack.aclose()

    async def _serve(self, api: RolloutApi, stop: Stop) -> None:
        if not self.worker_count:
            await super()._serve(api, stop)
            return
        from environments.atropos.workers import Workers

        async with Workers(self, self.worker_count) as workers:
            if await stop.unless_draining(workers.all_ready()) is not None:
                self._workers = workers
                await super()._serve(api, stop)

    def status_facts(self) -> dict[str, Any]:
        """What goes on right now."""
        return super().status_facts() | ({} if self._workers is None else self._workers.status_facts())

    # Groups

    async def play(self, item: Any) -> None:
        """Roll out an item, here or in a worker."""
        if self._workers is None:
            await super().play(item)
            return
        played = await self._workers.play(item)
        self.counts.rejected += played.rejected
        self.completion_lengths += played.completion_lengths
        self.backlog += map(self.item_from_json, played.backlog)
        self._packer.tokens.add(*played.tokens)
        if played.stats is not None:
            self.stats.merge(played.stats)
        if self._meter is not None:
            self._meter.count(*played.probes)
        for failed in played.failed_items:
            self.rollouts.count_failed(*failed)

    def take_played(self) -> Played:
        """In a worker: figures of what was played since the last call."""
        from environments.atropos.workers import Played

        backlog, self.backlog = [self.item_to_json(item) for item in self.backlog], []
        lengths, self.completion_lengths = self.completion_lengths, []
        rejected, self.counts.rejected = self.counts.rejected, Counter()
        stats, self.stats = self.stats, RolloutStats()
        return Played(
            rejected,
            lengths,
            backlog,
            stats,
            self._packer.tokens.take(),
            self._packer.waiting,
            (0, 0) if self._meter is None else self._meter.take_counts(),
            self.rollouts.take_failed(),
        )

    async def collect_trajectories(self, item: Any) -> tuple[list[Group] | None, list[Any]]:
        """Run a group and pack it; None when it is not complete or must not be trained on."""
        index = self.rollouts.next_index()
        probe = None if self._meter is None else self._meter.probe(self, item, index)
        if probe is not None:
            return await self._run_probe(probe, index)
        return await self._deliver(await self.rollouts.run_group(item, index, self.config.group_size)), []

    async def _run_probe(self, probe: Probe, index: int) -> tuple[list[Group] | None, list[Any]]:
        """A group of the hack meter: it reaches the trainer when it was possible and nobody cheated."""
        assert self._meter is not None
        tag = f"{self.rollouts.run_tag}-impossible" if probe.wire is None else None
        result = await self.rollouts.run_group(probe.item, index, self.config.group_size, tag=tag, wire=probe.wire)
        proven = self._meter.judge(probe, result.records(), self.config.rewards.solved_at)
        if probe.wire is not None and not proven:
            return await self._deliver(result), []
        self.counts.rejected["probe"] += 1
        await self.save(result)
        self._meter.check()
        return None, []

    async def save(self, result: GroupResult) -> None:
        """Append a group's rollouts to `data_path_to_save_groups`."""
        if self.config.data_path_to_save_groups is not None:
            await self.keep_lines(b"".join(record.to_json() + b"\n" for record in result.records()))

    async def _append(self, lines: bytes) -> None:
        await asyncio.to_thread(append_bytes, Path(str(self.config.data_path_to_save_groups)), lines)

    async def _deliver(self, result: GroupResult) -> list[Group] | None:
        await self.save(result)
        if not result.complete:
            self.counts.rejected["incomplete"] += 1
            log.warning("group %s dropped: %d of %d rollouts", result.group_id, len(result.scored), result.wanted)
            return None
        try:
            return await self._pack(result)
        except GroupRejected as rejection:
            self.counts.rejected[rejection.reason] += 1
            log.info("group %s not sent (%s): %s", result.group_id, rejection.reason, rejection)
            return None

    async def _pack(self, result: GroupResult) -> list[Group]:
        params = {"temperature": self.config.agent_temperature, "item_id": result.item_id}
        async with self._packing:
            return await asyncio.to_thread(
                self._packer.pack,
                result.group_id,
                result.scored,
                params,
                self.max_token_len,
                self.config.ensure_scores_are_not_same,
            )

    def _checked_before(self, group: Group, max_token_len: int) -> bool:
        kind = type(self)
        if not isinstance(group, PackedGroup) or max_token_len != self.max_token_len:
            return False
        if kind.collect_trajectories is not HermesAgentBaseEnv.collect_trajectories:
            return False
        if kind.postprocess_histories is not AtroposEnv.postprocess_histories:
            return False
        # The trainer may have been replaced by one that takes less while segments waited to fill a group.
        return max_token_len <= 0 or all(len(tokens) < max_token_len for tokens in group["tokens"])

    @property
    def policy_name(self) -> str:
        """Name of the model, for the records."""
        return str(self.server_configs[0].model_name) if self.server_configs else ""

    def longest_sequence(self) -> int:
        """Tokens a sequence may have, by the config, the model and the trainer."""
        return longest_sequence(self.config, self.max_token_len, self.model_context)

    def check_open(self) -> None:
        """RuntimeError before `open_up` and after `shut_down`."""
        self.opened_pool()
        self.opened_model()

    def opened_pool(self) -> Pool:
        """Where slots are leased."""
        if self.pool is None:
            raise RuntimeError(NOT_OPEN)
        return self.pool

    def opened_model(self) -> ModelServer:
        """What samples."""
        if not isinstance(self.model, ModelServer):
            raise RuntimeError(NOT_OPEN)
        return self.model

    def keep(self, record: RolloutRecord) -> None:
        """Called with every rollout as it ends, lost ones too: figures for the log."""
        self.stats.add(record)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log figures of the rollouts since the last log line, and of the delivery."""
        tokens = self._packer.tokens
        waiting = 0 if self._workers is None else self._workers.segments_waiting
        figures: dict[str, Any] = {
            "delivery/token_fraction": tokens.fraction,
            "delivery/segments_waiting": self._packer.waiting + waiting,
        }
        if self._quarantine is not None:
            figures["quarantine/left_out"] = self._quarantine.left_out
        if self._meter is not None:
            figures |= self._meter.take()
        await super().wandb_log({**self.stats.take(), **figures, **(wandb_metrics or {})})
