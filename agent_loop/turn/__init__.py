"""What happens between a sampled turn and the next prompt: calls are read, normalized, run and answered."""
