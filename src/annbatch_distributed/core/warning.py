"""Warnings at the line of the user's code that has called this package."""

from __future__ import annotations

import warnings
from pathlib import Path

import annbatch

_PACKAGES = str(Path(__file__).parents[1]), str(Path(annbatch.__file__).parent)


def warn(message: str) -> None:
    """Warn at the line that called this package, directly or through annbatch's Loader."""
    warnings.warn(message, UserWarning, skip_file_prefixes=_PACKAGES)
