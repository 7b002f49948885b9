"""Public benchmarks, each by name and whole. Their data comes from an installed package or from a path."""
