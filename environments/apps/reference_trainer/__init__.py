"""A small trainer to read and to run: LoRA and GRPO in JAX, fed by run-api as any trainer is (extra `[learn]`).

It shows how each field of a batch is used. `rows` reads the batch and turns scores into advantages, `microbatches`
pads, `llama` computes the logprobs of the trained tokens again, `learner` is one step (GRPO's loss with truncated
importance weights, and Adam), `checkpoint` writes the files, and `trainer` is the loop around them.
"""
