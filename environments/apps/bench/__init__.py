"""What `hermes-rl bench` and `hermes-rl pool bench` measure."""
