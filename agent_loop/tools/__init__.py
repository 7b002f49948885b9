"""What the model may call; every tool runs inside the rollout's leased sandbox."""
