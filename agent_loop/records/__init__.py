"""What a rollout leaves: the result, the stored record, metrics, and the proof that both are right."""
