"""Whole jobs in one thread: ranks are generators, and one seed decides what they read and what happens to them.

1. :mod:`jobs` draws a job: its kind of loader, its sources, its numbers of ranks.
2. :mod:`timelines` is a model: the batch of each rank in each step, cut out of the batches of uninterrupted epochs.
3. :mod:`events` draws what happens, and makes it happen to the ranks and to the model.
4. :mod:`run` runs jobs, and finds the shortest that still fails.

``python -m tests.simulated SEED`` shows a job step by step. :mod:`planted` checks that changed code is found.
"""
