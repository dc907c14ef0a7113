"""How a plan looks: as text, as HTML, as a table of pandas', as a picture; and what would lose fewer rows.

It knows the public answers of an :class:`~annbatch_distributed.EpochPlan` and of ``Rows``, and nothing of how they come
about. pandas and matplotlib are imported in the function that needs them.
"""
