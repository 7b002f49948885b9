"""verl's real AgentLoopWorker with our loop; its server client needs a GPU, so a stand-in takes its place."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import LlamaConfig
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.replica import TokenOutput

from agent_loop.local_models.standin import StandIn, chatml_tokenizer
from agent_loop.model.backends.vllm import VllmBackend
from agent_loop.model.contract import Sampling
from environments.trainers.item_rows import verl_rows
from environments.trainers.one_by_one import close_all
from support.env_tasks import sometimes_right


class Client:
    """Stands where verl has its LLMServerClient: the same call, the same answer; the stand-in samples."""

    def __init__(self, backend: VllmBackend) -> None:
        self.backend, self.log = backend, []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        sampling = Sampling(temperature=sampling_params["temperature"], max_tokens=sampling_params["max_tokens"])
        made = await self.backend.generate(prompt_ids, sampling, stop_ids=sampling_params["stop_token_ids"])
        self.log.append([request_id, prompt_ids, made.token_ids, made.logprobs])
        extra = {"global_steps": 3}
        return TokenOutput(
            token_ids=made.token_ids, log_probs=made.logprobs, stop_reason="completed", extra_fields=extra
        )


def config(folder: Path) -> Any:
    chatml_tokenizer().save_pretrained(folder / "model")
    LlamaConfig(vocab_size=len(chatml_tokenizer()), architectures=["LlamaForCausalLM"]).save_pretrained(
        folder / "model"
    )
    entry = {"name": "hermes", "_target_": "environments.trainers.verl.VerlAgentLoop"}
    entry |= {"environment": str(folder / "numbers.yaml"), "settings": ["--env.segments", "last"]}
    OmegaConf.save(OmegaConf.create([entry]), folder / "agent.yaml")
    (folder / "numbers.yaml").write_text(
        "environment: support.env_tasks:NumbersFromConfig\nopenai: {server_type: standin}\n"
    )
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={folder / 'model'}",
                "actor_rollout_ref.rollout.name=vllm",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'agent.yaml'}",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.prompt_length=512",
                "actor_rollout_ref.rollout.response_length=4096",
            ],
        )


async def main(folder: Path) -> dict[str, Any]:
    settings = config(folder)
    rows = await asyncio.to_thread(verl_rows, str(folder / "numbers.yaml"), 2)
    async with StandIn(sometimes_right, keep_log=False) as standin:
        client = Client(VllmBackend(standin.url, model="standin"))
        worker = AgentLoopWorker(settings, client)
        repeated = [row for row in rows for _ in range(4)]
        batch = DataProto.from_dict(
            non_tensors={
                "agent_name": np.array([row["agent_name"] for row in repeated], dtype=object),
                "raw_prompt": np.array([row["prompt"] for row in repeated] + [None], dtype=object)[:-1],
                "extra_info": np.array([row["extra_info"] for row in repeated], dtype=object),
                "index": np.array([row["extra_info"]["index"] for row in repeated]),
            },
            meta_info={"global_steps": 3},
        )
        made = await worker.generate_sequences(batch)
        await close_all()
        await client.backend.close()
    told = {name: made.batch[name].tolist() for name in ("input_ids", "attention_mask", "responses", "response_mask")}
    told |= {name: made.batch[name].tolist() for name in ("rollout_log_probs", "rm_scores")}
    told |= {"max_global_steps": made.non_tensor_batch["max_global_steps"].tolist(), "log": client.log}
    return told | {"prompts": [row["prompt"] for row in rows]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
