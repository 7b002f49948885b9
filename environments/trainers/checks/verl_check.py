"""verl as the judge of our tokens: its log-probabilities and its own measure of rollout against training policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from environments.rollouts.samples import Sample
from environments.trainers.verl import verl_output

NO_LIMIT = 1 << 30


class VerlView:
    """verl's arithmetic with a model by its Hugging Face name or folder."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def measure(self, samples: Sequence[Sample]) -> tuple[float, float]:
        import torch
        from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
        from verl.utils.torch_functional import masked_mean

        rows = [self._responses(sample) for sample in samples]
        theirs, ours, mask = (torch.cat([row[part] for row in rows])[None] for part in range(3))
        found = compute_offpolicy_metrics(theirs, ours, mask)
        return float(masked_mean((theirs - ours).exp(), mask)), float(found["k3_kl"])

    def logprobs(self, sample: Sample) -> list[float]:
        theirs: list[float] = self._responses(sample)[0].tolist()
        return [0.0] * (len(sample.tokens) - len(theirs)) + theirs

    def _responses(self, sample: Sample) -> tuple[Any, Any, Any]:
        """Of the response as verl gets it: its logprobs, ours, and the mask."""
        import torch
        from verl.utils.torch_functional import logprobs_from_logits

        row = verl_output(sample, NO_LIMIT).as_dict()
        ids, prompt = torch.cat([row["prompts"], row["responses"]]), len(row["prompts"])
        with torch.no_grad():
            logits = self._network(ids[None]).logits[0, prompt - 1 : -1]
        return logprobs_from_logits(logits, row["responses"]), row["rollout_log_probs"], row["response_mask"]
