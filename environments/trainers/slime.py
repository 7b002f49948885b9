"""slime and miles: our rollouts as their generate function; SGLang behind their router samples.

    --custom-generate-function-path environments.trainers.slime.generate
    --custom-config-path hermes.yaml        # hermes_environment: terminal_tasks, hermes_settings: [...]

Rows are those of `slime_rows`. The reward is set, so no reward function is needed. A rollout that infrastructure ended
raises: there is no place for it, and it is never a reward.
"""

from __future__ import annotations

import asyncio
import copy
from functools import lru_cache
from typing import Any

from agent_loop.model.backends.sglang import SGLangBackend
from environments.models import load_tokenizer
from environments.rollouts.samples import Sample
from environments.runs.summary import LIMIT_OUTCOMES
from environments.trainers.one_by_one import opened


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A rollout of the sample's item: the sample, filled; with several segments a list, one for each."""
    tokenizer = await asyncio.to_thread(_tokenizer, str(args.hf_checkpoint))
    rollouts = await opened(
        str(args.hermes_environment),
        list(getattr(args, "hermes_settings", None) or ()),
        tokenizer,
        most_tokens=getattr(args, "rollout_max_context_len", None),
        one_sequence=False,
    )
    backend = rollouts.server(f"http://{args.sglang_router_ip}:{args.sglang_router_port}", SGLangBackend)
    ours = await rollouts.roll_out(sample.metadata["item"], backend, sampling_params.get("temperature"))
    filled = [fill(sample if own.last else copy.deepcopy(sample), own) for own in ours]
    return filled[0] if len(filled) == 1 else filled


def fill(theirs: Any, ours: Sample) -> Any:
    """Their sample with our tokens; all lists but `tokens` are of the response alone."""
    record, begins = ours.record, ours.prompt_len
    status = type(theirs).Status
    theirs.tokens = list(ours.tokens)
    theirs.response_length = len(ours.tokens) - begins
    theirs.loss_mask = ours.mask[begins:]
    theirs.rollout_log_probs = ours.logprobs[begins:]
    theirs.response = "".join(str(message.get("content") or "") for message in record.messages[-1:])
    theirs.reward = ours.reward
    theirs.weight_versions = [weights for weights in ours.weights if weights is not None]
    theirs.status = status.TRUNCATED if record.outcome in LIMIT_OUTCOMES else status.COMPLETED
    theirs.metadata = {**theirs.metadata, "rollout_id": ours.rollout_id, "outcome": record.outcome}
    return theirs


@lru_cache(maxsize=1)
def _tokenizer(checkpoint: str) -> Any:
    return load_tokenizer(checkpoint)
