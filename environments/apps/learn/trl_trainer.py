"""`python -m environments.apps.learn.trl_trainer SETTINGS.json`: TRL in the place of the reference trainer.

The same adapter and learning rates, trained by AsyncGRPOTrainer. It rolls out by itself, without run-api, and hands
whole weights, the adapter merged into them, to the front. Events are lines of JSON, as the reference trainer writes
them. It ends with its parent, and on SIGTERM at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from agent_loop.own_process import end_with_parent
from environments.apps.reference_trainer.trainer_settings import TrainerSettings
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.rollouts import Rollouts
from environments.trainers.checks.trl_check import no_prompts, on_cpu, trl_arguments
from environments.trainers.cpu_weights import CpuServerWeights, hugging_face_copy
from environments.trainers.trl import TrlRolloutWorker

GROUPS_AT_ONCE = 2
"""One is sampled while the tools of the other run."""
PARTS = 2
"""A step is read in so many parts: what the prompts of a part share is computed once, and TRL takes one part ahead,
which is then a step old."""
UNUSED = ("ratio_cap", "std_floor", "microbatch_segments", "synchronous", "keep_checkpoints", "control")
"""Settings of the reference trainer that TRL has other words for, or none."""
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FIGURES = {
    "reward": "reward",
    "loss": "loss",
    "ratio": "ratio_mean",
    "kl": "kl",
    "grad_norm": "gradient_norm",
    "sample/staleness_mean": "staleness_mean",
    "hermes/groups_without_signal_total": "groups_without_signal",
    "perf/rollout_wait_s": "wait_s",
    "perf/fwd_bwd_s": "train_s",
    "perf/weight_sync_s": "sync_s",
}
"""TRL's names of what a step measured, and those of metrics.jsonl."""


def half_of_the_cores() -> int:
    """Threads of the sampler, and of the trainer: both work at the same time, and wait by spinning."""
    return max(1, (os.cpu_count() or 1) // 2)


class TrlJob(TrainerSettings):
    """One run: the settings, and where everything is."""

    rollouts: Path
    """Config of the environment that is trained on."""
    model_url: str
    model: Path
    """The GGUF that samples: TRL starts from exactly these weights."""
    run_dir: Path


class _Stopped(Exception):
    """SIGTERM or SIGINT."""


def _stop(*_: object) -> None:
    raise _Stopped


@contextlib.contextmanager
def events() -> Iterator[TextIO]:
    """Standard output for events alone: what libraries print goes to the log."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        yield out


def train(job: TrlJob, out: TextIO) -> None:
    """All steps, or until a signal."""
    import torch
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    if not torch.cuda.is_available():
        on_cpu()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(half_of_the_cores())
    work = job.run_dir / "trl"
    weights = job.run_dir / "weights"
    weights.mkdir(exist_ok=True)
    folder = hugging_face_copy(job.model, work / "model")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    adapter = LoraConfig(
        r=job.rank,
        lora_alpha=job.alpha,
        target_modules=LINEARS,
        layers_to_transform=list(range(min(job.first_layer, layers - 1), layers)),
    )
    with BlockingRollouts(Rollouts(job.rollouts)) as rollouts:
        size = rollouts.rollouts.env.config.group_size
        trainer = AsyncGRPOTrainer(
            model=str(folder),
            args=trl_arguments(str(work / "out"), **_arguments(job, size)),
            train_dataset=no_prompts(),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=adapter,
            rollout_worker=TrlRolloutWorker(rollouts, groups_at_once=GROUPS_AT_ONCE, waiting=size),
            weight_transfer=CpuServerWeights(job.model_url, job.model, weights),
            callbacks=[_reporting(out)],
        )
        shutil.rmtree(folder)
        with contextlib.suppress(_Stopped):
            trainer.train()
        trainer.save_model(str(job.run_dir / "adapter"))
    shutil.rmtree(work)


def _arguments(job: TrlJob, group_size: int) -> dict[str, Any]:
    parts = PARTS if job.groups_per_step % PARTS == 0 else 1
    return {
        "batch": job.groups_per_step // parts * group_size,
        "gradient_accumulation_steps": parts,
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"lr_end": job.final_learning_rate, "power": 1.0},
        "adam_beta1": job.adam_beta1,
        "adam_beta2": job.adam_beta2,
        "max_grad_norm": job.max_gradient_norm or 0.0,
        "max_staleness": job.max_staleness,
        "weight_sync_steps": 1,
        "seed": job.seed,
    }


def _reporting(out: TextIO) -> Any:
    from transformers import TrainerCallback

    def report(event: Mapping[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")

    class Reporting(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report({"event": "ready", "step": state.global_step})

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report({"event": "batch", "step": state.global_step + 1})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "ratio" in (logs or {}):  # the last line of a run sums it up, and is of no step
                figures = {ours: logs[theirs] for theirs, ours in FIGURES.items() if logs.get(theirs) is not None}
                report({"event": "step", "step": state.global_step, **figures})

    return Reporting()


def main(arguments: list[str]) -> int:
    end_with_parent(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    with events() as out, contextlib.suppress(_Stopped):
        train(TrlJob.model_validate_json(Path(arguments[0]).read_text()), out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
