"""NeMo Gym: `POST /run` of an agent server (`hermes-rl offer CONFIG --to nemo-gym`).

A request names an item (`nemo_gym_rows`); the answer is the finished episode in OpenAI's Responses format, with the
exact ids and logprobs of every call of the model on the last thing that it said, and the reward. What infrastructure
ended is named as a failure, which NeMo Gym keeps apart and tries again, and never a score. The model is the config's.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from agent_loop.model.contract import Message
from agent_loop.records.record import RolloutRecord
from agent_loop.turn.messages import arguments_text
from environments.errors import RolloutLost
from environments.rollouts.blocking import BlockingRollouts

FAILURE = "_ng_failure_class"
"""Rollouts with this key are written to a file of failures."""


def nemo_gym_app(rollouts: BlockingRollouts, _items: int = 0) -> FastAPI:
    """The server as an ASGI application."""
    app = FastAPI(title=f"{rollouts.rollouts.env.name} for NeMo Gym")
    env = rollouts.rollouts.env

    @app.post("/run")
    async def run(request: Request) -> dict[str, Any]:
        body = await request.json()
        try:
            item = env.item_from_json(json.loads(body["item"]))
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPException(422, f"`item` is not one of nemo_gym_rows: {type(error).__name__}: {error}") from error
        params = dict(body.get("responses_create_params") or {})
        try:
            work = rollouts.rollouts.run_member(item, env.item_id(item), params.get("temperature"))
            record = (await asyncio.wrap_future(rollouts.submit(work))).record
        except RolloutLost as lost:
            failed = {FAILURE: "sandbox_or_model_lost", "mask_sample": True, "failure_reason": str(lost)}
            return {**body, **run_result(lost.records[-1], params), **failed}
        return {**body, **run_result(record, params)}

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(request: Request) -> dict[str, Any]:
        answers = (await request.json())["verify_responses"]
        rewards = [float(answer["reward"]) for answer in answers if not answer.get(FAILURE)]
        found: dict[str, float] = {"rollouts": len(rewards), "lost": len(answers) - len(rewards)}
        if rewards:
            found |= {"mean/reward": fmean(rewards)}
        return {"agent_metrics": found, "key_metrics": found, "group_level_metrics": []}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def run_result(record: RolloutRecord, params: dict[str, Any]) -> dict[str, Any]:
    """A rollout as the answer to `/run`; the last segment, where there are several: a response is one conversation."""
    return {
        "responses_create_params": params | {"tools": _tools(record)},
        "response": {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": time.time(),
            "model": record.policy,
            "object": "response",
            "output": list(_output(record)),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": _tools(record),
        },
        "reward": record.score or 0.0,
        "outcome": record.outcome,
        "rollout_id": record.rollout_id,
        **{f"reward_{name}": value for name, value in record.reward_components.items()},
    }


def _tools(record: RolloutRecord) -> list[dict[str, Any]]:
    return [{"type": "function", "strict": False, **tool["function"]} for tool in record.tools]


def _output(record: RolloutRecord) -> Iterator[dict[str, Any]]:
    last = len(record.segments) - 1
    for place, message in enumerate(record.messages):
        turn = record.sampled_by[place] if place < len(record.sampled_by) else None
        if message["role"] == "tool":
            said = str(message.get("content") or "")
            known = {
                "id": f"fco_{record.rollout_id}:{place}",
                "call_id": message["tool_call_id"],
                "status": "completed",
            }
            yield {"type": "function_call_output", **known, "output": said}
        if turn is None:
            continue
        items = list(_said(message, f"{record.rollout_id}:{place}"))
        call = record.sampled_calls[turn] if turn < len(record.sampled_calls) else None
        if call is not None and call.segment == last:
            items[-1] |= {
                "prompt_token_ids": call.prompt_ids,
                "generation_token_ids": call.sampled_ids,
                "generation_log_probs": call.logprobs,
            }
        yield from items


def _said(message: Message, name: str) -> Iterator[dict[str, Any]]:
    """What one call of the model gave: thinking, words, calls."""
    if thought := message.get("reasoning_content"):
        yield {"type": "reasoning", "id": f"rs_{name}", "summary": [{"type": "summary_text", "text": thought}]}
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        text = {"type": "output_text", "text": str(message.get("content") or ""), "annotations": []}
        yield {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [text]}
    for call in calls:
        yield {
            "type": "function_call",
            "id": f"fc_{name}:{call['id']}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": arguments_text(call["function"]["arguments"]),
            "status": "completed",
        }
