"""Whether all ranks have the same configuration, and have read the plan.

What a process says of itself, how all processes hear of it, and the verdict on it. This room knows texts, tallies and
the stores in which processes meet; it knows nothing of how a pass runs.
"""
