"""Metrics of a step: always a log line; wandb too when it was asked for and is logged in."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from environments.atropos.api import RolloutApi
from environments.atropos.compat import wandb_obstacle

log = logging.getLogger(__name__)


class MetricsLog:
    """Where the metrics of one environment go."""

    def __init__(self) -> None:
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
        import wandb

        group, project = await api.wandb_info()
        self._prefix = f"{name}_"
        self._run = await asyncio.to_thread(wandb.init, name=name, project=project, group=group, config=config)
        return group, project

    def write(self, metrics: dict[str, Any], step: int) -> None:
        """One line, and one wandb entry."""
        log.info("step %d: %s", step, metrics)
        if self._run is not None:
            self._run.log({f"{self._prefix}{key}": value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the wandb run, if there is one."""
        if self._run is not None:
            self._run.finish()
            self._run = None
