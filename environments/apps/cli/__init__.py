"""The `hermes-rl` command: one module per verb, imported only when that verb is called."""
