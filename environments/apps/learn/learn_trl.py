"""`hermes-rl learn --trainer trl`: the same model and tasks, trained by TRL's AsyncGRPOTrainer on all weights.

One process: llama.cpp samples, TRL trains in a thread and hands its weights over; held-out tasks before and after.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agent_loop import own_process
from agent_loop.local_models.cpu_model.updatable_model import UpdatableModel
from environments.apps.learn.evaluator import Evaluator, open_evaluator
from environments.apps.learn.plan import LearnPlan
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.rollouts import Rollouts
from environments.runs.store import write_whole
from environments.trainers.cpu_weights import CpuServerWeights, hugging_face_copy
from environments.trainers.trl import TrlRolloutWorker
from environments.trainers.trl_check import on_cpu, trl_arguments

LEARNING_RATE = 1e-5
"""Of all weights; the reference trainer's is that of an adapter."""


def learn_with_trl(plan: LearnPlan) -> int:
    """Train for `learn.minutes` or `trainer.steps`, whichever ends first; the exit code."""
    return own_process.run(_learn(plan))


async def _learn(plan: LearnPlan) -> int:
    plan.out.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        options = {**plan.model_options, "weights": "F16"}  # TRL must find the logprobs that were sampled with
        front = await stack.enter_async_context(UpdatableModel(**options))
        first = front.model.path
        server = plan.server(f"{front.url}/eval", first)
        evaluator = await stack.enter_async_context(open_evaluator(plan.kind, plan.config, server))
        before = await _evaluate(evaluator, 0, plan.out)
        history = await asyncio.to_thread(_train, plan, front.url, first)
        write_whole(plan.out / "trl.json", json.dumps(history, indent=1).encode())
        after = await _evaluate(evaluator, len(history), plan.out)
    print(f"held-out success: {before['success']:.1%} before, {after['success']:.1%} after {len(history)} steps")
    return 0


async def _evaluate(evaluator: Evaluator, step: int, out: Path) -> dict[str, Any]:
    figures = await evaluator.run(step, out / f"evaluation-{step}.jsonl", lambda done, total: None)
    print(json.dumps({key: figures[key] for key in ("step", "success", "parse_rate", "duration_s")}), flush=True)
    return figures


def _train(plan: LearnPlan, url: str, model: Path) -> list[dict[str, Any]]:
    """Blocking; TRL's log of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            shown = {key: logs[key] for key in ("reward", "ratio", "kl", "loss") if key in (logs or {})}
            print(json.dumps({"step": state.global_step, **shown}), flush=True)
            if minutes is not None and time.monotonic() - began > minutes * 60:
                control.should_training_stop = True

    began, minutes = time.monotonic(), plan.config.learn.minutes
    if not torch.cuda.is_available():
        on_cpu()
    folder = hugging_face_copy(model, plan.out / "model")
    env = plan.kind(plan.config.env, [plan.server(url, model)])
    batch = plan.config.env.group_size
    arguments = trl_arguments(
        str(plan.out / "trl"),
        batch,
        gradient_accumulation_steps=plan.config.trainer.groups_per_step,
        learning_rate=LEARNING_RATE,
        max_steps=plan.config.trainer.steps,
        weight_sync_steps=1,
    )
    with BlockingRollouts(Rollouts(env)) as rollouts:
        trainer = AsyncGRPOTrainer(
            model=str(folder),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]]}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_worker=TrlRolloutWorker(rollouts, waiting=2 * batch),
            weight_transfer=CpuServerWeights(url, model, plan.out),
            callbacks=[Steps()],
        )
        trainer.train()
    return [entry for entry in trainer.state.log_history if "ratio" in entry]
