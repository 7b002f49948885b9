"""The judgement of `train-check`: our samples in a trainer's own logprob code."""
