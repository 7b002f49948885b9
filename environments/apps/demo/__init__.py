"""`hermes-rl demo`: a real model and three scripted policies on the same tasks, down to tokens, rewards and a page."""
