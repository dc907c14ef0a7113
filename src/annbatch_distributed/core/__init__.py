"""Core: which rows each rank reads in each epoch, computed without communication.

Read it in this order: ``rows``, ``lanes``, ``sharding``, ``request``, ``units``, ``state``, ``plan``, ``stream``,
``epochs``, ``clock``. The other modules check what users pass, and hide what annbatch and PyTorch don't expose.
"""
