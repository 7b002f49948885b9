"""Environments as servers, for trainers that call environments; `hermes-rl offer` starts them."""
