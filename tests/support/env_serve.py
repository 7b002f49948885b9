"""An environment that is served by a real process, and what a test needs around it: settings, process, ledger."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from agent_loop.local_models.standin import Exchange, PolicyRequest
from agent_loop.local_models.standin.policies import call
from environments.base import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext
from environments.errors import ConfigError
from sandbox_pool.pool.lent_pool import LentPool

TESTS = Path(__file__).resolve().parents[1]


class FiniteConfig(HermesAgentEnvConfig):
    """Numbers from `first` on."""

    items: int = 4
    first: int = 0
    seconds: float = Field(default=0.0, description="How long the command of each rollout takes.")
    broken_workers: bool = Field(default=False, description="Whether its set-up fails in workers of `serve`.")


class FiniteEnv(HermesAgentBaseEnv):
    """Write the number of the item into answer.txt; `items` items, then the end."""

    name = "finite"
    env_config_cls = FiniteConfig
    config: FiniteConfig

    async def setup(self) -> None:
        self.given = 0
        if self.config.broken_workers and isinstance(self.pool, LentPool):
            raise ConfigError("no tasks for workers")

    async def get_next_item(self) -> dict[str, Any] | None:
        if self.given == self.config.items:
            return None
        self.given += 1
        number = self.config.first + self.given - 1
        return {"id": f"n{number}", "number": number}

    def format_prompt(self, item: dict[str, Any]) -> str:
        return f"Write {item['number']} into answer.txt after {self.config.seconds} s"

    async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
        answer = await ctx.terminal("cat answer.txt")
        return float(answer["output"].strip() == str(item["number"]))


def play(request: PolicyRequest) -> str:
    """Right three times in four, by the number of the request."""
    found = re.search(r"Write (\d+) into answer.txt after ([\d.]+) s", request.text)
    if request.results or found is None:
        return f"Done, request {request.number}."
    answer = found[1] if request.number % 4 else "wrong"
    return call("terminal", {"command": f"sleep {found[2]}; echo {answer} > answer.txt # {request.number}"})


class ServedEnv:
    """`hermes-rl serve` as a process."""

    def __init__(self, folder: Path, name: str, api_url: str, model_url: str, **env: Any) -> None:
        settings = {
            "wandb_name": name,
            "rollout_server_url": api_url,
            "group_size": 4,
            "total_steps": -1,
            "tokenizer_name": "standin",
            "max_token_length": 8192,
            "max_agent_turns": 4,
            "status_poll_s": 0.05,
            "ensure_scores_are_not_same": False,
            "enabled_toolsets": ["terminal"],
            "data_path_to_save_groups": str(folder / f"{name}.jsonl"),
            "pool": {"slots_per_host": 8, "max_hosts": 1, "state_dir": str(folder / "state")},
        }
        config = {
            "environment": "support.env_serve:FiniteEnv",
            "env": settings | env,
            "openai": {"server_type": "vllm", "base_url": model_url, "model_name": "standin", "api_key": "sk-hush-7"},
        }
        self.name = name
        self.folder = folder
        self.path = folder / f"{name}.yaml"
        self.path.write_text(yaml.safe_dump(config))
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        command = [sys.executable, "-m", "environments.apps.cli.main", "serve", str(self.path), *flags]
        environ = os.environ | {"PYTHONPATH": str(TESTS)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=self.folder)

    def signal(self, number: int) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        if self.running():
            self.signal(signal.SIGTERM)
            try:
                self.wait(20)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                self.wait(10)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for_line(self, text: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.said():
            if time.monotonic() > deadline or not self.running():
                raise AssertionError(f"{text!r} never came:\n{self.said()[-3000:]}")
            time.sleep(0.05)


Piece = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""What the model saw, what it sampled, and with which logprobs."""


def sampled_by_server(log: Iterable[Exchange]) -> Counter[Piece]:
    """Every answered request."""
    return Counter((tuple(e.prompt_ids), tuple(e.sampled_ids), tuple(e.logprobs)) for e in log if e.status == 200)


def trained_by_trainer(groups: Iterable[dict[str, Any]]) -> Counter[Piece]:
    """Every stretch of trained tokens that a trainer got, with what came before it."""
    pieces: Counter[Piece] = Counter()
    for group in groups:
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert len(tokens) == len(masks) == len(logprobs)
            start = None
            for position in range(len(tokens) + 1):
                trained = position < len(tokens) and masks[position] != -100
                if trained:
                    assert masks[position] == tokens[position]
                elif position < len(tokens):
                    assert logprobs[position] == 1.0
                if trained and start is None:
                    start = position
                elif not trained and start is not None:
                    pieces[tuple(tokens[:start]), tuple(tokens[start:position]), tuple(logprobs[start:position])] += 1
                    start = None
    return pieces
