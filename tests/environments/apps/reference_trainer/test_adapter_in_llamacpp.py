"""llama.cpp with the written adapter and the trainer compute the same: the server's logprobs move to the trainer's."""

from __future__ import annotations

from importlib.util import find_spec

import aiohttp
import numpy as np
import pytest

if any(find_spec(name) is None for name in ("jax", "gguf", "xllamacpp")):
    pytest.skip("jax, gguf or xllamacpp is not installed (extra learn)", allow_module_level=True)

from agent_loop.local_models.cpu_model import CpuModel
from environments.apps.reference_trainer.checkpoint import write_adapter
from environments.apps.reference_trainer.learner import Learner
from environments.apps.reference_trainer.llama import load_model
from environments.apps.reference_trainer.rows import read_batch
from environments.apps.reference_trainer.trainer_settings import TrainerSettings
from support.tiny_llama import SPECIAL, VOCABULARY, write_tiny_llama

SETTINGS = TrainerSettings(first_layer=1, rank=2, alpha=4, learning_rate=2e-2)
TOKENS = 12


def marks(answer):
    """llama.cpp gives no logprob to a token that ends inside a character, as single bytes often do: masked here."""
    given = iter(answer["completion_probabilities"])
    masks, logprobs, known = [], [], next(given, None)
    for token in answer["tokens"]:
        found = known is not None and known["id"] == token
        masks.append(token if found else -100)
        logprobs.append(known["logprob"] if found else 1.0)
        known = next(given, None) if found else known
    return masks, logprobs


async def sampled_group(model, adapter, rng):
    """Two rollouts of one prompt, with the logprobs that the server gives its own tokens."""
    prompt = [int(i) for i in rng.integers(len(SPECIAL), len(VOCABULARY), 40)]
    group = {"tokens": [], "masks": [], "inference_logprobs": [], "scores": [0.0, 1.0], "advantages": None}
    async with (
        CpuModel(model=model, lora=adapter, parallel=1, threads=1, context_tokens=256) as server,
        aiohttp.ClientSession() as session,
    ):
        for seed in (1, 2):
            request = {"prompt": prompt, "n_predict": TOKENS, "seed": seed, "ignore_eos": True, "n_probs": 1}
            request |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "return_tokens": True}
            async with session.post(f"{server.url}/completion", json=request) as response:
                answer = await response.json()
            masks, logprobs = marks(answer)
            group["tokens"].append(prompt + answer["tokens"])
            group["masks"].append([-100] * len(prompt) + masks)
            group["inference_logprobs"].append([1.0] * len(prompt) + logprobs)
    return group


@pytest.mark.ci
async def test_recomputed_logprobs_are_the_servers_before_and_after_training(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    learner = Learner(load_model(path, SETTINGS.first_layer), SETTINGS)
    rng = np.random.default_rng(0)
    first = read_batch([await sampled_group(path, None, rng)], SETTINGS.std_floor)
    state, before = learner.train(learner.start(), first)
    assert before.logprob_difference_mean <= 0.005
    for _ in range(4):
        state, moved = learner.train(state, first)
    assert moved.logprob_difference_mean > 0.05
    write_adapter(tmp_path / "adapter.gguf", state.lora, SETTINGS.alpha, SETTINGS.first_layer)
    second = read_batch([await sampled_group(path, tmp_path / "adapter.gguf", rng)], SETTINGS.std_floor)
    _, after = learner.train(state, second)
    assert after.logprob_difference_mean <= 0.005
    _, without = learner.train(learner.start(), second)
    assert without.logprob_difference_mean > 0.05
