"""Tinker as the judge of our tokens: it samples the rollouts, and its forward pass scores them.

The address and the key are Tinker's own: TINKER_BASE_URL and TINKER_API_KEY.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from environments.errors import UsageError
from environments.rollouts.samples import Sample
from environments.trainers.tinker import TinkerBackend, tinker_datum


class TinkerView:
    """Tinker with a base model by the name that the service knows it by."""

    def __init__(self, model: str) -> None:
        import tinker

        try:
            service = tinker.ServiceClient()
            self._training: Any = service.create_lora_training_client(base_model=model, rank=8)
            sampling = self._training.save_weights_and_get_sampling_client(name="train-check")
        except (tinker.TinkerError, ValueError) as error:
            raise UsageError(
                f"Tinker does not give us {model}: {error}: set TINKER_BASE_URL, TINKER_API_KEY"
            ) from error
        self.backend = TinkerBackend(sampling)
        self.tokenizer: Any = self._training.get_tokenizer()

    def measure(self, samples: Sequence[Sample]) -> tuple[float, float]:
        logs = [
            theirs - ours
            for sample, scores in zip(samples, self._forward(samples), strict=True)
            for theirs, ours, mask in zip(scores, sample.logprobs, sample.mask, strict=True)
            if mask
        ]
        ratios = [math.exp(log) for log in logs]
        return sum(ratios) / len(logs), sum(r - 1 - log for r, log in zip(ratios, logs, strict=True)) / len(logs)

    def logprobs(self, sample: Sample) -> list[float]:
        return self._forward([sample])[0]

    def _forward(self, samples: Sequence[Sample]) -> list[list[float]]:
        """With every position trained: some services score only what has an advantage."""
        whole = [replace(s, advantage=1.0, token_advantages=None, mask=[1] * len(s.tokens)) for s in samples]
        outputs = self._training.forward([tinker_datum(s) for s in whole], "importance_sampling").result()
        return [[0.0, *map(float, found["logprobs"].tolist())] for found in outputs.loss_fn_outputs]
