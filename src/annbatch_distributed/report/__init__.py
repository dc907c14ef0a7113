"""How a plan looks: as text, as HTML, as a table of pandas', as a picture; and the labels of its ranks.

It knows what an :class:`~annbatch_distributed.EpochPlan` answers, and nothing of how that comes about.
"""
