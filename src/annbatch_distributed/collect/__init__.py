"""The room ``collect``: writes one annbatch collection of h5ad files with different layouts, genes and columns.

1. ``files`` inspects all files, and reports all problems before it reads a whole file.
2. ``parts`` reads the files one by one, with one file in memory, and writes each to a temporary folder.
3. ``genes`` and ``labels`` combine the genes and the columns of ``obs`` of all files.
4. ``writing`` lets annbatch shuffle and write the cells to a folder, which is renamed when it is complete.

This room doesn't know samplers, ranks and commands.
"""

from __future__ import annotations

from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.writing import write_collection

__all__ = ["Problems", "write_collection"]
