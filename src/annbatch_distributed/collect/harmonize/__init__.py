"""The room ``harmonize``: which file has what, and what becomes of it in the collection.

1. ``entries`` are the files that a user names, one by one or in a sample sheet.
2. ``files`` inspects each of them, element by element.
3. ``genes`` combines their genes, and ``labels`` their columns of ``obs``.
4. ``contents`` does one step after the other. All problems that are known by then are one error.

It returns one table of all cells, one index of genes, and for each file where to read its values and a matrix that
selects its genes. This room writes nothing, and doesn't know processes, memory and dtypes on disk.
"""
