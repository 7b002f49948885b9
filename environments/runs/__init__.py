"""What `process` and `evaluate` do around rollouts: order, concurrency, storage, progress, export."""
