"""TRL as the judge of our tokens: AsyncGRPOTrainer's own loss over our samples, with a learning rate of 0."""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Sequence
from typing import Any

from environments.rollouts.samples import Sample
from environments.trainers.trl import trl_sample


class TrlView:
    """TRL with a model by its Hugging Face name or folder."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = model
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if not torch.cuda.is_available():
            on_cpu()

    def measure(self, samples: Sequence[Sample]) -> tuple[float, float]:
        from trl.experimental.async_grpo import AsyncGRPOTrainer

        with tempfile.TemporaryDirectory() as folder:
            trainer = AsyncGRPOTrainer(
                model=self._model,
                args=trl_arguments(folder, len(samples), learning_rate=0.0, max_steps=1),
                train_dataset=no_prompts(),
                processing_class=self._tokenizer,
                rollout_worker=_Given(samples),
                weight_transfer=_NoTransfer(),
            )
            trainer.train()
        [entry] = [entry for entry in trainer.state.log_history if "ratio" in entry]
        return float(entry["ratio"]), float(entry["kl"])

    def logprobs(self, sample: Sample) -> list[float]:
        import torch

        ids = torch.tensor([sample.tokens])
        with torch.no_grad():
            scores = self._network(ids).logits[0, :-1].log_softmax(-1)
        return [0.0, *scores.gather(1, ids[0, 1:, None])[:, 0].tolist()]


def no_prompts() -> Any:
    """The dataset that AsyncGRPOTrainer insists on; a rollout worker has prompts of its own."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]]})


def trl_arguments(folder: str, batch: int, **more: Any) -> Any:
    """AsyncGRPOConfig for one machine, on the CPU where there is no GPU."""
    import torch
    from trl.experimental.async_grpo import AsyncGRPOConfig

    return AsyncGRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=batch,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        token_budget=-1,
        gradient_checkpointing=False,
        **more,
    )


class _Given:
    """A rollout worker that hands out what it was given."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._samples = samples

    def start(self) -> None:
        # Twice: the trainer asks for its second batch before it takes the first step, which is its last.
        for sample in (*self._samples, *self._samples):
            self.rollout_buffer.put(trl_sample(sample, 0, 1))

    def stop(self) -> None:
        """Nothing runs."""

    def update_model_version(self, model_version: int) -> None:
        """All samples are of the weights that are judged."""

    def check_health(self, stale_after_s: float) -> None:
        """Always well."""


class _NoTransfer:
    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


def on_cpu() -> None:
    """TRL's packing calls FlashAttention, which needs a GPU: the same sum in plain torch stands in for it."""
    import torch
    import trl.experimental.async_grpo.async_grpo_trainer as trainer
    from trl.experimental.async_grpo import packing

    class Plain:
        @staticmethod
        def flash_attn_varlen_func(
            q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: float | None = None, **__: Any
        ) -> Any:
            heads = q.shape[1] // k.shape[1]
            found = []
            bounds = zip(
                ends_q[:-1].tolist(), ends_q[1:].tolist(), ends_k[:-1].tolist(), ends_k[1:].tolist(), strict=True
            )
            for q0, q1, k0, k1 in bounds:
                own_q, own_k, own_v = (part.transpose(0, 1) for part in (q[q0:q1], k[k0:k1], v[k0:k1]))
                own_k, own_v = own_k.repeat_interleave(heads, 0), own_v.repeat_interleave(heads, 0)
                seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - q1 + q0)
                attend = torch.nn.functional.scaled_dot_product_attention
                found.append(attend(own_q[None], own_k[None], own_v[None], attn_mask=seen, scale=softmax_scale)[0])
            return torch.cat([part.transpose(0, 1) for part in found])

    packing._flash_attn = lambda: Plain
    trainer.get_peak_flops_per_device = lambda *_: None
