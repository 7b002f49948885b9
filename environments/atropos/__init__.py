"""What atroposlib 0.4.0 needs around it: scheduling that cancels nothing, checked groups, delivery that survives.

Of agents it knows the records of finished rollouts, and how to sample from atroposlib's own servers (`servers`).
`environments.base` puts agents, sandboxes and this together.
"""
