"""The room ``collect``: writes one annbatch collection of files with different layouts, genes and columns.

1. The room ``harmonize`` inspects all files, and decides what becomes of their cells, genes and labels.
2. The room ``write`` writes these cells. It knows no labels, and ``harmonize`` doesn't know how cells are stored.
3. Between them, ``matrices`` says where the values of each file are, and which cells and genes a collection has.
4. ``steps`` does one after the other, with the ``options`` of the function in ``collection``.

This room doesn't know samplers, ranks and commands.
"""

from __future__ import annotations

from annbatch_distributed.collect.collection import collect
from annbatch_distributed.collect.problems import Problems

__all__ = ["Problems", "collect"]
