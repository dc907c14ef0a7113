"""What frameworks need besides a rank and a loader: a module for each, which imports it in the function that needs it.

They know batches and loaders, and nothing of how an epoch is planned.
"""

from __future__ import annotations
