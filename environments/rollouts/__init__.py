"""One rollout, one group, what each is told, and evaluation."""
