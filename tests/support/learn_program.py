"""`hermes-rl learn` with another trainer, as a process; and a run of it that a test can watch and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[1]
TRAINER = Path(__file__).with_name("learn_trainer.py")


def tiny_config(path: Path, **trainer: Any) -> Path:
    """A random model of bytes, two groups of two a step, a few tokens each, two held-out tasks."""
    from support.tiny_llama import write_tiny_llama

    model = path.parent / "tiny.gguf"
    if not model.exists():
        write_tiny_llama(model)
    env = {
        "group_size": 2,
        "levels": [0],
        "enabled_toolsets": ["terminal"],
        "disabled_toolsets": ["process"],
        "tools_in_prompt": False,
        "max_agent_turns": 1,
        "system_prompt": "Use the shell.",
        "max_token_length": 500,
        "max_tokens_per_turn": 12,
        "max_batches_offpolicy": 1,
        "ensure_scores_are_not_same": False,
        "status_poll_s": 0.05,
        "limits": {"rollout_timeout_s": 1800},
        "pool": {"slots_per_host": 8, "max_hosts": 1, "state_dir": str(path.parent / "state")},
    }
    options = {"model": str(model), "context_tokens": 512, "parallel": 2, "threads": 1}
    config = {
        "environment": "terminal_tasks",
        "env": env,
        "openai": {"server_type": "cpu-model", "options": options},
        "learn": {"eval_every": 0, "eval_items": 2, "eval_samples": 2},
        "trainer": {"groups_per_step": 2, **trainer},
    }
    path.write_text(yaml.safe_dump(config))
    return path


class LearnProcess:
    """One start of `learn`, its events read as they come."""

    def __init__(self, config: Path, out: Path, *flags: str, die_at: int = -1) -> None:
        """Starts in the folder of the config."""
        command = [sys.executable, __file__, str(config), str(out), str(die_at), *flags]
        self.log = out.with_suffix(".stderr")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=config.parent,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(TESTS)},
            )
        self.events: list[dict[str, Any]] = []

    def until(self, event: str, step: int | None = None) -> dict[str, Any]:
        """The next event of this kind."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == event and step in (None, self.events[-1].get("step")):
                return self.events[-1]
        raise AssertionError(f"no {event} event: {self.events[-3:]}\n{self.said()[-2000:]}")

    def end(self) -> int:
        """Read to the end; the exit code."""
        assert self.process.stdout is not None
        self.events += [json.loads(line) for line in self.process.stdout]
        return self.process.wait(60)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """Its processes now."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> int:
    from environments.apps.learn.display import JsonDisplay
    from environments.apps.learn.learn_run import LearnFailed, learn
    from environments.apps.learn.plan import load_plan

    config, out, die_at, *flags = sys.argv[1:]
    trainer = (sys.executable, str(TRAINER), "--die-at", die_at)
    resume = "--resume" in flags
    settings = [flag for flag in flags if flag != "--resume"]
    plan = load_plan(config, settings, Path(out), resume, trainer=trainer)
    try:
        return learn(plan, JsonDisplay(sys.stdout))
    except LearnFailed as error:
        sys.stderr.write(f"hermes-rl: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
