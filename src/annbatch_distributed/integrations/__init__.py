"""Integrations with frameworks, with one module each, which imports its framework only in functions.

The modules depend on batches and loaders, and not on the planning of epochs.
"""

from __future__ import annotations
