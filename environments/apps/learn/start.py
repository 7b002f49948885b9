"""From a config to a run of `learn`."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_loop import own_process
from environments.apps.learn.display import Show
from environments.apps.learn.learn_run import LearnRun
from environments.apps.learn.plan import LearnPlan
from environments.errors import UsageError
from environments.launch import load_run

NEEDED = ("xllamacpp", "gguf", "jax")


def load_plan(
    source: str, settings: Sequence[str], out: Path, resume: bool = False, fresh: bool = False, **more: Any
) -> LearnPlan:
    """The plan; UsageError for what cannot work."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{', '.join(missing)} cannot be imported: uv pip install 'hermes-rl[learn]'")
    kind, config = load_run(source, settings)
    return LearnPlan(kind, config, out, resume, fresh, **more)


def learn(plan: LearnPlan, show: Show) -> int:
    """Run it; the exit code."""
    # What happens is on the board and in metrics.jsonl: no log lines between them.
    logging.getLogger("environments").setLevel(logging.ERROR)
    return own_process.run(LearnRun(plan, show).run())
