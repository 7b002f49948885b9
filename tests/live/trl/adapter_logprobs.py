"""Runs in TRL's own environment: how far recorded logprobs are from those of a model with and without an adapter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agent_loop.records.record import RolloutRecord


def differences(model, calls) -> list[float]:
    found = []
    for call in calls:
        ids = torch.tensor([[*call.prompt_ids, *call.sampled_ids]])
        with torch.no_grad():
            scores = model(ids).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
        theirs = scores.gather(1, torch.tensor(call.sampled_ids)[:, None])[:, 0].tolist()
        found += [abs(a - b) for a, b in zip(theirs, call.logprobs, strict=True)]
    return found


def main(base: str, adapter: str, evaluation: str) -> dict:
    records = [RolloutRecord.from_json(line) for line in Path(evaluation).read_bytes().splitlines()]
    calls = [call for record in records for call in record.sampled_calls]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    without = differences(model, calls)
    with_adapter = differences(PeftModel.from_pretrained(model, adapter).eval(), calls)
    count = len(without)
    return {"tokens": count, "with_adapter": sum(with_adapter) / count, "without": sum(without) / count}


print(json.dumps(main(*sys.argv[1:])))
