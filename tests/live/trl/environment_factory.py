"""Runs in TRL's own environment: a real GRPOTrainer with our `environment_factory`, and a scripted policy.

Every other rollout plays the oracle's commands, the rest give up at once. Printed: what TRL trained on.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import trl
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.rollouts import Rollouts
from environments.trainers.trl_environment import trl_environment, trl_rows

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def small_model(tokenizer):
    ids = {"pad_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=16384, **SMALL, **ids))


def scripted(tokenizer, solutions):
    """In the place of TRL's sampling: ids of the next turn for each conversation."""

    def turn(prompt_ids, *_, **__):
        told = []
        for number, ids in enumerate(prompt_ids):
            text = tokenizer.decode(ids)
            commands = next(commands for prompt, commands in solutions.items() if prompt in text)
            done = text.count("<tool_response>")
            if (number % 2 and not done) or done >= len(commands):
                said = "done"
            else:
                call = {"name": "terminal", "arguments": {"command": commands[done]}}
                said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            told.append(tokenizer(f"{said}<|im_end|>", add_special_tokens=False)["input_ids"])
        return told, None

    return turn


def main(tokenizer_folder: str) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen2_5.jinja").read_text()
    made = Rollouts("terminal_tasks", ["--env.levels", "[0,1]"])
    with BlockingRollouts(made) as rollouts, tempfile.TemporaryDirectory() as out:
        env = rollouts.rollouts.env
        rows = trl_rows(rollouts, 2)
        items = [env.item_from_json(json.loads(row["item"])) for row in rows]
        arguments = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=4,
            num_generations=2,
            max_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            max_completion_length=2048,
            max_tool_calling_iterations=8,
        )
        factory = trl_environment(rollouts)
        trainer = GRPOTrainer(
            model=small_model(tokenizer),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            environment_factory=factory,
        )
        trainer._generate_single_turn = scripted(tokenizer, {item.prompt: item.solution for item in items})
        rewards, masks = [], []
        loss = trainer._compute_loss
        get_reward = factory.get_reward

        def seen(model, inputs):
            written = inputs["completion_mask"]
            masks.append([written.sum().item(), (written * inputs["tool_mask"]).sum().item()])
            return loss(model, inputs)

        def rewarded(self):
            rewards.append(get_reward(self))
            return rewards[-1]

        factory.get_reward, trainer._compute_loss = rewarded, seen
        trainer.train()
        log = trainer.state.log_history[0]
    return {"rewards": rewards, "masks": masks, "mean": log["reward"]}


print(json.dumps(main(sys.argv[1])))
