"""The room ``write``: writes cells whose genes and labels are known to a collection.

1. ``blocks`` reads the rows of a matrix in blocks that fit into memory.
2. ``parts`` writes each block to a folder next to the collection, from which a later run can continue.
3. ``dtypes`` chooses the form in which values are stored, by the statistics of all parts.
4. ``datasets`` writes the shuffled cells from these parts, in the form of ``storage``.

``jobs`` runs 2 and 4 in several processes, and ``folders`` makes the folders. This room doesn't know what labels mean.
"""
