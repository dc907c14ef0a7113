"""How far an epoch is: positions and states, the cursor that workers share, and what is left to plan.

This room knows positions and workers, and runs passes through to see what they did; it doesn't know where ranks come
from.
"""
