"""The room ``collect``: writes one annbatch collection of files with different layouts, genes and columns.

1. ``entries`` are the files that a user names, one by one or in a sample sheet.
2. ``files`` inspects each of them, element by element, and ``values`` some of its values; ``formats`` says what other
   files are.
3. ``contents`` combines all files: ``genes`` their genes, and ``labels`` their columns of ``obs``. All problems that
   are known by now are one error, before any file is read to its end.
4. ``parts`` writes the values in blocks to a folder next to the collection.
5. ``datasets`` writes the shuffled cells from these parts.
6. ``writing`` does one step after the other, and ``jobs`` runs 4 and 5 in several processes.

This room doesn't know samplers, ranks and commands.
"""

from __future__ import annotations

from annbatch_distributed.collect.collection import collect
from annbatch_distributed.collect.problems import Problems

__all__ = ["Problems", "collect"]
