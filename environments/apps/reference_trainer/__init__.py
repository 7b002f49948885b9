"""A small trainer to read and to run: LoRA and GRPO in JAX, fed by run-api as any trainer is (extra `[learn]`).

It shows how each field of a batch is used. `rows` reads the wire, turns scores into advantages,
`microbatches` pads, `llama` computes the logprobs of the trained tokens again, `loss` is GRPO with truncated importance
weights, `learner` is one step, `trainer` the loop around it:

python -m environments.apps.reference_trainer SETTINGS.json
"""
