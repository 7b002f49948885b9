"""What atroposlib 0.4.0 needs around it: scheduling that cancels nothing, checked groups, delivery that survives.

Nothing here knows of agents or sandboxes; `environments.base` puts the two together.
"""
