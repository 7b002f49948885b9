"""Runs in TRL's own environment: AsyncGRPOTrainer as it talks to vLLM, with our rollouts sampling there meanwhile.

TRL's own client and order of calls are real, and so is the loop. In the place of vLLM is the stand-in behind a front
that has vLLM's endpoints for weights; in the place of NCCL, which needs GPUs, a function that reads the weights and
sends nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import yaml
from aiohttp import web
from transformers import LlamaConfig, LlamaForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer, weight_transfer

from agent_loop.local_models.standin import StandIn, chatml_tokenizer, named_policy
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.rollouts import Rollouts
from environments.trainers.checks.trl_check import no_prompts, on_cpu, trl_arguments
from environments.trainers.trl import TrlRolloutWorker

STEPS = 2
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


class Front:
    """vLLM's endpoints for weights; whoever samples while it is paused waits, as with `mode=keep`."""

    def __init__(self, standin_url: str) -> None:
        self.calls: list[str] = []
        self._standin, self._open = standin_url, asyncio.Event()
        self._open.set()

    async def answer(self, request: web.Request) -> web.Response:
        path, body = request.path, await request.read()
        match path.rsplit("/", 1)[-1]:
            case "health":
                return web.Response()
            case "get_world_size":
                return web.json_response({"world_size": 1})
            case "server_info":
                return web.json_response({"vllm_config": {"model_config": {"dtype": "torch.float32"}}})
            case "pause":
                self._open.clear()
                self.calls.append(f"pause {request.query['mode']}")
            case "resume":
                self.calls.append("resume")
                self._open.set()
            case "init_weight_transfer_engine" | "start_weight_update" | "finish_weight_update" as name:
                self.calls.append(name)
            case "update_weights":
                self.calls.append(f"update_weights {len(json.loads(body)['update_info']['names'])}")
            case _:
                return await self._sample(request, body)
        return web.json_response({})

    async def _sample(self, request: web.Request, body: bytes) -> web.Response:
        await self._open.wait()
        headers = {"Content-Type": "application/json"}
        async with aiohttp.request(request.method, self._standin + request.path, data=body, headers=headers) as got:
            return web.Response(body=await got.read(), status=got.status, content_type="application/json")


def serve(ready, done: threading.Event) -> None:
    async def main() -> None:
        async with StandIn(named_policy("good")) as standin:
            front = Front(standin.url)
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", front.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ready.append((front, f"http://127.0.0.1:{runner.addresses[0][1]}"))
            await asyncio.to_thread(done.wait)
            await runner.cleanup()

    asyncio.run(main())


def without_nccl(sent: list[int]) -> None:
    group = SimpleNamespace(group=SimpleNamespace())
    weight_transfer.is_vllm_available = lambda *_, **__: True
    weight_transfer._HAS_STATEFUL_TRAINER_ENGINE = True
    weight_transfer.get_ip, weight_transfer.get_open_port = (lambda: "127.0.0.1"), (lambda: 1)
    weight_transfer.open_trainer_endpoint = lambda _: group
    weight_transfer.packed_nccl_broadcast_producer = lambda iterator, **_: sent.append(sum(1 for _ in iterator))


def config(folder: Path, url: str) -> Path:
    path = folder / "run.yaml"
    env = {"group_size": 2, "levels": [0], "ensure_scores_are_not_same": False, "max_token_length": 8192}
    server = {"base_url": url, "server_type": "vllm", "model_name": "standin", "tokenizer_name": "standin"}
    path.write_text(yaml.safe_dump({"environment": "terminal_tasks", "env": env, "openai": server}))
    return path


def main() -> dict:
    on_cpu()
    ready: list = []
    done, sent = threading.Event(), []
    thread = threading.Thread(target=serve, args=(ready, done), daemon=True)
    thread.start()
    while not ready:
        thread.join(0.05)
    front, url = ready[0]
    without_nccl(sent)
    tokenizer = chatml_tokenizer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder / "model")
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=8192, **SMALL)).save_pretrained(
            folder / "model"
        )
        trainer = AsyncGRPOTrainer(
            model=str(folder / "model"),
            args=trl_arguments(name, 2, max_steps=STEPS, vllm_server_base_url=url, max_staleness=STEPS),
            train_dataset=no_prompts(),
            processing_class=tokenizer,
            rollout_worker=TrlRolloutWorker(BlockingRollouts(Rollouts(config(folder, url)))),
        )
        trainer.train()
    done.set()
    thread.join()
    logs = [entry for entry in trainer.state.log_history if "ratio" in entry]
    lost = sum(entry.get("hermes/lost_groups_total") or 0 for entry in logs)
    return {"calls": front.calls, "sent": sent, "steps": len(logs), "lost": lost, "version": trainer.model_version}


print(json.dumps(main()))
sys.stdout.flush()
