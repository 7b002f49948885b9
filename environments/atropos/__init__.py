"""What atroposlib 0.4.0 needs around it: scheduling that cancels nothing, checked groups, delivery that survives.

It takes finished rollouts and knows nothing of how they were made; `environments.base` makes them.
"""
