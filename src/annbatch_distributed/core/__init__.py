"""Core: which rows each rank reads in each epoch, computed without communication.

Read the modules in this order; each one imports only from the ones before:

1. ``values``, ``rows``: checked integers; row indices as ranges.
2. ``lanes``, ``sharding``: batches and rows are divided.
3. ``rank``, ``worker``, ``masks``, ``wrapped``, ``units``, ``state``: what a user passes, and what is saved.
4. ``config``, ``plan``, ``stream``, ``epochs``: arguments become the plan of an epoch, and load requests.
"""
