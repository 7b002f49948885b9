"""`AtroposEnv`: atroposlib's BaseEnv with our serve loop, checked groups and no work done at construction.

Subclasses see the same hooks as under BaseEnv: setup, get_next_item, collect_trajectories, postprocess_histories,
evaluate, cleanup, wandb_log. `self.server` (atroposlib's ServerManager) is made when it is first used, because making
it loads a tokenizer and opens clients that most of our environments never touch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from agent_loop.model.backends.http import http_address
from agent_loop.model.tokens.ledger import MASKED
from environments.atropos.api import ApiLink, RolloutApi
from environments.atropos.compat import plain_chat_template, usable_api_key, wandb_obstacle
from environments.atropos.deferred import deferred_imports
from environments.atropos.groups import Group, GroupRejected, check_group
from environments.atropos.outbox import EncodedGroup, Outbox
from environments.atropos.serve_loop import Pace, ServeCounts, ServeHooks, ServeLoop, SilenceWatch, batch_problem
from environments.atropos.stops import Stop
from environments.errors import ConfigError
from environments.runs.status import StatusFile, add_figures, slot_facts, sole_writer
from environments.runs.store import write_whole
from environments.trackers import TrackerName, Trackers, tracked

with deferred_imports():
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
    from atroposlib.envs.server_handling.server_baseline import ReasoningConfig
    from atroposlib.envs.server_handling.server_manager import ServerManager

log = logging.getLogger(__name__)

SAID_OF_A_STEP = {
    "score": "rollouts/verifier_score",
    "reward": "rollouts/score",
    "tokens a sequence": "train/completion_lengths",
    "groups sent": "delivery/groups",
    "lost": "outcomes/lost_to_infrastructure",
    "proven hacks": "hacks/rate",
    "evaluation": "eval/mean_score",
}
"""What the log's line of a step holds. The trackers and figures.jsonl get everything."""


class MetricsLog:
    """Where the metrics of one environment go."""

    def __init__(self) -> None:
        self.trackers = Trackers((), "", Path(), {})
        self.rollouts: Path | None = None
        """Where they are stored, if they are: beside it `view --live` and `top` look."""
        self._run: Any = None
        self._prefix = ""

    async def open(
        self, api: RolloutApi, use_wandb: bool, name: str, config: dict[str, Any]
    ) -> tuple[str | None, str | None]:
        """Join the trainer's wandb group, if wandb is wanted and works; otherwise one line says why not."""
        if not use_wandb:
            return None, None
        if obstacle := wandb_obstacle():
            log.warning("%s", obstacle)
            return None, None
        import environments.atropos.wandb_folders  # noqa: F401 - before wandb  # isort: skip
        import wandb

        group, project = await api.wandb_info()
        self._prefix = f"{name}_"
        self._run = await asyncio.to_thread(wandb.init, name=name, project=project, group=group, config=config)
        return group, project

    def write(self, metrics: dict[str, Any], step: int) -> None:
        """One line of what matters most, and all of it for the trackers."""
        said = (f"{name} {metrics[key]:.4g}" for name, key in SAID_OF_A_STEP.items() if key in metrics)
        log.info("step %d: %s", step, ", ".join(said))
        log.debug("all of step %d: %s", step, metrics)
        self.trackers.log(metrics, step)
        if self.rollouts is not None:
            add_figures(self.rollouts, step, metrics)
        if self._run is not None:
            self._run.log({f"{self._prefix}{key}": value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the wandb run, if there is one."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class AtroposEnvConfig(BaseEnvConfig):  # type: ignore[misc]
    """BaseEnvConfig with defaults that fit long rollouts, and the settings of our serve loop."""

    group_size: int = Field(default=4, ge=1, description="Rollouts of each item.")
    total_steps: int = Field(
        default=1000, ge=-1, description="Steps of the trainer, or groups of process; -1: as many as the trainer makes."
    )
    max_num_workers: int = Field(
        default=-1, ge=-1, description="Groups at once in serve; -1: max_num_workers_per_node for each model server."
    )
    max_num_workers_per_node: int = Field(default=8, ge=1, description="Groups at once for each model server.")
    eval_limit_ratio: float = Field(
        default=0.5, ge=0, le=1, description="Part of the groups that may run during an evaluation."
    )
    min_batch_allocation: float | None = Field(
        default=None, ge=0, le=1, description="Part of each batch that is kept for this environment."
    )
    rollout_server_url: str = Field(default="http://localhost:8000", description="Address of run-api.")
    trackers: list[TrackerName] = Field(
        default_factory=list, description="Where the figures of a run go as well: wandb, tensorboard, mlflow, trackio."
    )
    use_wandb: bool = Field(default=False, description="Log to wandb, if it is logged in.")
    worker_timeout: float = Field(default=-1, description="Seconds before a running group is cancelled; -1 is never.")
    steps_per_eval: int = Field(
        default=0, ge=0, description="Evaluate each time the trainer passes a multiple; 0 is never."
    )
    drain_timeout_s: float = Field(default=60.0, ge=0, description="How long SIGTERM waits for running groups.")
    api_wait_s: float = Field(default=600.0, ge=0, description="How long run-api may stay away before serve gives up.")
    status_poll_s: float = Field(default=0.1, gt=0, description="Pause between two looks at run-api's queue.")
    outbox_groups: int = Field(default=8, ge=1, description="Finished groups that may wait to be sent.")

    @field_validator("rollout_server_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        http_address(url)
        return url

    @field_validator("max_num_workers")
    @classmethod
    def _some_workers(cls, workers: int) -> int:
        if workers == 0:
            raise ValueError("0 would start nothing: give at least 1, or -1")
        return workers


class AtroposEnv(BaseEnv):  # type: ignore[misc]
    """BaseEnv that loses nothing."""

    env_config_cls = AtroposEnvConfig

    def __init__(
        self, config: Any, server_configs: Sequence[APIServerConfig] | Any, slurm: bool = False, testing: bool = False
    ) -> None:
        # BaseEnv.__init__ loads a tokenizer from the hub and opens clients, so its plain attributes are set here
        # instead; a test compares them with the real ones.
        self.config = config
        self.server_configs = server_configs
        self._slurm, self._testing = slurm, testing
        self.items_sent_this_step = 0
        self.eval_runner = None
        self.workers_added_list: list[int] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_duration: list[float] = []
        self.mainloop_timings: list[float] = []
        self.task_successful: list[int] = []
        self.last_loop_time = None
        self.last_completed_item: Any = None
        self.workers: set[Any] = set()
        self.eval_workers: set[Any] = set()
        self.backlog: list[Any] = []
        self.rollouts_for_wandb: list[Any] = []
        self.running_items: dict[str, Any] = {}
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.wandb_prepend: str | None = None
        self.curr_step = 0
        self.max_token_len = -1
        self.completion_lengths: list[int] = []
        self.max_num_workers = config.max_num_workers
        if self.max_num_workers == -1:
            self.max_num_workers = config.max_num_workers_per_node * self._server_count()
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.jsonl_writer = None
        self.counts = ServeCounts()
        self._groups_sent = 0
        self._silence = SilenceWatch()
        self.outbox: Outbox | None = None
        self.send_group: Callable[[Group | EncodedGroup], Awaitable[None]] | None = None
        """Takes each checked group; None where groups go nowhere."""
        self.metrics_log = MetricsLog()

    def _server_count(self) -> int:
        return max(1, len(self.server_configs)) if isinstance(self.server_configs, list) else 1

    @cached_property
    def server(self) -> Any:
        """atroposlib's ServerManager over the configured servers, with keys that every openai client accepts."""
        if not isinstance(self.server_configs, list) or not self.server_configs:
            raise TypeError(
                "server_configs must be a list of APIServerConfig: atroposlib ignores the URL of a bare one"
            )
        configs = [c.model_copy(update={"api_key": usable_api_key(c.api_key)}) for c in self.server_configs]
        reasoning = ReasoningConfig(
            enabled=self.config.thinking_mode,
            effort=self.config.reasoning_effort,
            max_tokens=self.config.max_reasoning_tokens,
        )
        return ServerManager(
            configs, slurm=self._slurm, testing=self._testing, server_class=self.server_cls, reasoning_config=reasoning
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer named by the config, mended for transformers 5."""
        from transformers import AutoTokenizer

        return plain_chat_template(AutoTokenizer.from_pretrained(self.config.tokenizer_name))

    async def env_manager(self) -> None:
        """Serve: everything between `setup` and `/disconnect-env`. SIGTERM finishes what runs first."""
        stop, stored = Stop(), self.config.data_path_to_save_groups
        with stop.on_signals(), contextlib.nullcontext() if stored is None else sole_writer(Path(stored)):
            try:
                await self.open_up()
                await self.setup()
                async with RolloutApi(self.config.rollout_server_url) as api:
                    await self._serve(api, stop)
            finally:
                await self.shut_down()
                self._log_end()

    async def open_up(self) -> None:
        """Open what rollouts need, before `setup`."""

    async def shut_down(self) -> None:
        """Close what `open_up` opened; called once, however serve, process or evaluate ended."""

    async def _serve(self, api: RolloutApi, stop: Stop) -> None:
        link = ApiLink(api, self._registration_request(), stop, self.config.api_wait_s)
        try:
            registration = await stop.unless_draining(link.register())
            if registration is None:
                return
            self._adopt(registration)
            self.wandb_group, self.wandb_project = await self.metrics_log.open(
                api, self.config.use_wandb, str(self.wandb_prepend), self.public_config()
            )
            stored = self.config.data_path_to_save_groups
            folder = Path("runs") / str(self.name) if stored is None else Path(stored).parent
            async with (
                tracked(self.config.trackers, f"{self.name}-serve", folder, self.public_config()) as trackers,
                Outbox(link, self.config.outbox_groups) as outbox,
                self._status_kept(),
            ):
                self.metrics_log.trackers = trackers
                self.outbox, self.send_group = outbox, outbox.put
                await ServeLoop(link, outbox, self.config, self._hooks(api), stop, self.counts).run()
        finally:
            await link.disconnect()

    def _status_kept(self) -> AbstractAsyncContextManager[object]:
        """Tells `view --live` and `top` how it goes, beside the stored rollouts where there are any."""
        stored = self.config.data_path_to_save_groups
        if stored is None:
            return contextlib.nullcontext()
        self.metrics_log.rollouts = Path(stored)
        return StatusFile(Path(stored), "serve", self.status_facts)

    def status_facts(self) -> dict[str, Any]:
        """What goes on right now."""
        return {
            "step": self.curr_step,
            "queue": self.counts.queue,
            "sent": self._groups_sent,
            "running": self.counts.running,
            "unsent": 0 if self.outbox is None else self.outbox.unsent,
            "rejected": dict(self.counts.rejected),
            **slot_facts(getattr(self, "pool", None)),
        }

    def longest_sequence(self) -> int:
        """Tokens a sequence may have, as run-api is told."""
        return int(self.config.max_token_length)

    def _registration_request(self) -> dict[str, Any]:
        return {
            "max_token_length": self.longest_sequence(),
            # run-api answers 422 to a missing name, and atroposlib's own default never reaches it
            "desired_name": self.config.wandb_name or self.name or type(self).__name__,
            "weight": self.config.inference_weight,
            "min_batch_allocation": self.config.min_batch_allocation,
            "group_size": self.config.group_size,
        }

    def _adopt(self, registration: Any) -> None:
        self.env_id = registration.env_id
        self.wandb_prepend = registration.name
        self.curr_step = registration.starting_step
        self.checkpoint_dir = registration.checkpoint_dir
        self.checkpoint_interval = registration.checkpoint_interval
        if self.config.total_steps == -1:
            self.config.total_steps = registration.num_steps
        if self.curr_step > 0:
            self.load_checkpoint()

    def _hooks(self, api: RolloutApi) -> ServeHooks:
        async def pace() -> Pace:
            info = await api.trainer_info()
            if (info.batch_size, info.max_token_len) != (self.config.batch_size, self.max_token_len):
                log.info("the trainer takes %d sequences of fewer than %d tokens", info.batch_size, info.max_token_len)
            self.config.batch_size, self.max_token_len = info.batch_size, info.max_token_len
            if problem := batch_problem(self.config.group_size, info.batch_size):
                raise ConfigError(f"env.group_size does not fit the trainer: {problem}")
            return Pace(
                group_size=self.config.group_size,
                batch_size=info.batch_size,
                max_batches_offpolicy=self.config.max_batches_offpolicy,
                max_workers=self.max_num_workers,
                min_batch_allocation=self.config.min_batch_allocation,
            )

        return ServeHooks(self._next_item, self._run_group, self.evaluate, self._on_step, self._checkpoint, pace)

    async def next_item(self) -> Any:
        """What `serve` asks for the next item."""
        return await self.get_next_item()

    async def _next_item(self) -> Any:
        return self.backlog.pop() if self.backlog else await self.next_item()

    async def _run_group(self, item: Any) -> None:
        await self.play(item)
        self._silence.group_ended(self._groups_sent, self.counts.rejected)

    async def play(self, item: Any) -> None:
        """Roll out an item, and hand on what can be trained on."""
        group, backlog = await self.collect_trajectories(item)
        self.backlog.extend(backlog)
        if group:
            await self.handle_send_to_api(await self.postprocess_histories(group), item)
        await self.cleanup()

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Any = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Check each group and hand what passes to the outbox; what does not is counted by reason and logged."""
        limit = self.max_token_len if abort_on_any_max_length_exceeded else -1
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            if group is None:
                continue
            if await self._accept(group, limit) and do_send_to_api and self.send_group is not None:
                await self.hand_over(group)

    async def hand_over(self, group: Group | EncodedGroup) -> None:
        """Send a checked group, and count it."""
        assert self.send_group is not None
        await self.send_group(group)
        self.items_sent_this_step += 1
        self._groups_sent += 1

    async def _accept(self, group: Group, max_token_len: int) -> bool:
        # An explicit advantage is a signal of its own: groups that carry one need no spread of scores.
        must_differ = self.config.ensure_scores_are_not_same and group.get("advantages") is None
        try:
            if not self._checked_before(group, max_token_len):
                await asyncio.to_thread(check_group, group, self.config.group_size, max_token_len, must_differ)
        except GroupRejected as rejection:
            self.counts.rejected[rejection.reason] += 1
            log.warning("group not sent (%s): %s", rejection.reason, rejection)
            return False
        self.completion_lengths.extend(len(masks) - masks.count(MASKED) for masks in group["masks"])
        if not self.config.include_messages:
            group.pop("messages", None)
        return True

    def _checked_before(self, group: Group, max_token_len: int) -> bool:
        """Whether this group was checked when it was made, and nothing could have changed since."""
        return False

    async def _on_step(self, step: int) -> None:
        self.curr_step = step
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            self.items_sent_this_step = 0
            await self.wandb_log({})

    def public_config(self) -> dict[str, Any]:
        """The config as it may be shown and stored: plain values, no secrets."""
        return dict(self.config.model_dump(mode="json"))

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log metrics of this step; to wandb too when it is in use."""
        metrics = dict(wandb_metrics or {})
        if self.completion_lengths:
            lengths, self.completion_lengths = self.completion_lengths, []
            metrics["train/completion_lengths"] = sum(lengths) / len(lengths)
            metrics["train/completion_lengths_max"] = max(lengths)
        if self.outbox is not None:
            metrics |= {f"delivery/{key}": value for key, value in vars(self.outbox.delivery).items()}
        metrics |= {f"groups/rejected_{reason}": count for reason, count in self.counts.rejected.items()}
        self.metrics_log.write(metrics, self.curr_step)

    def checkpoint_state(self) -> dict[str, Any]:
        """What a restarted environment needs to go on; JSON. Override together with `restore_checkpoint`."""
        return {}

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        """Take back what `checkpoint_state` gave."""

    def _checkpoint(self, step: int) -> None:
        interval = max(1, self.checkpoint_interval)
        self.save_checkpoint(step // interval * interval)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Write the environment's state into the trainer's checkpoint folder (atroposlib itself saves nothing)."""
        state = self.checkpoint_state() if data is None else data
        if not state:
            return
        write_whole(self._checkpoint_path(step), json.dumps(state).encode())

    def load_checkpoint(self) -> None:
        """Restore the state stored for the trainer's step, if there is one."""
        path = self._checkpoint_path(self.curr_step)
        if path.exists():
            self.restore_checkpoint(json.loads(path.read_text()))

    def _checkpoint_path(self, step: int) -> Path:
        return Path(self.checkpoint_dir) / "env_checkpoints" / str(self.wandb_prepend) / f"step-{step}.json"

    def _log_end(self) -> None:
        delivery = vars(self.outbox.delivery) if self.outbox is not None else {}
        log.info("served: %s; delivery: %s", vars(self.counts), delivery)
        self.metrics_log.close()
