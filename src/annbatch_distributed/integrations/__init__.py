"""What frameworks need besides a rank: a module for each, which imports its framework in the function that needs it.

They know batches and loaders, and nothing of how an epoch is planned.
"""
