"""JAX arrays that span all processes, from batches, for ``jax.jit``.

1. Every part of a batch becomes a NumPy array in a dtype that JAX has; ``obs`` becomes one array per column.
2. All arrays must have the same number of rows.
3. The arrays are placed on devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse

from annbatch_distributed.ranks.jax import rows_of

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding


__all__ = ["global_batch"]

type Tree = Any  # an array, or nested dicts, lists and tuples of arrays


def global_batch(batch: Tree, sharding: NamedSharding) -> Tree:
    """Combine the batches of all processes into JAX arrays that span them.

    Every process must call it, with the same number of rows. If the numbers differ, JAX silently computes with wrong
    sizes. Under ``remainder="drop"`` and ``"pad"``, all batches are full; under ``"exact"`` and ``"keep"``, some are
    smaller.

    The rows of a rank, as :meth:`.Rank.from_mesh` counts ranks, are placed on the devices of the rank in the sharding.
    If the devices are in the order of processes, the rows of rank 0 come first, then the rows of rank 1, and so on.
    Processes of the same rank must pass the same rows, which ``dist_info=Rank.from_mesh(sharding)`` ensures.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> import pandas as pd
    >>> from annbatch_distributed.integrations.jax import global_batch
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> rows = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
    >>> obs = pd.DataFrame(
    ...     {
    ...         "cell_type": pd.Categorical(["T", "B", "T"]),
    ...         "n_genes": [900, 700, 800],
    ...     }
    ... )
    >>> batch = global_batch({"X": np.ones((3, 2)), "obs": obs, "index": None}, rows)
    >>> (
    ...     batch["X"].shape,
    ...     batch["obs"]["cell_type"].tolist(),
    ...     batch["obs"]["n_genes"].tolist(),
    ...     batch["index"],
    ... )
    ((3, 2), [1, 0, 1], [900, 700, 800], None)
    >>> global_batch(
    ...     {"obs": obs.astype({"n_genes": "Int64"})}, rows
    ... )  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    TypeError: batch['obs']['n_genes'] must be an array of numbers or a categorical column, got Series ...

    Parameters
    ----------
    batch
        Batch of an annbatch ``Loader``, or any part of it: a NumPy array, a JAX array, a sparse matrix, a pandas Series
        or DataFrame, or dicts, lists and tuples of them. Each part becomes one JAX array:

        - a sparse matrix becomes a dense array;
        - a DataFrame such as ``obs`` becomes a dict of its columns;
        - a categorical column becomes its codes, as 32-bit integers with -1 for missing values. The codes are the same
          in every process if the categories are the same, as they are within a collection;
        - None stays None.

        JAX uses 32 bits unless it is configured for 64. Floats are rounded to 32 bits, large ones to infinity; integers
        that don't fit raise. ``var``, which a ``Loader`` repeats in every batch, has no rows of the batch and is left
        out.
    sharding
        Placement of the arrays on devices. Its first dimension splits rows, and the other dimensions may split columns;
        every process passes all columns of its rows. Arrays with fewer dimensions use the first ones, so labels are
        split like rows.

    Returns
    -------
    jax.Array | dict
        JAX array of shape ``(n_ranks * n_rows, ...)``, or a dict of arrays with the keys of ``batch``.

    Raises
    ------
    TypeError
        If a part of the batch is neither an array of numbers nor a categorical column, which excludes strings, nullable
        columns and masked arrays; or if ``sharding`` is not a ``NamedSharding`` over devices.
    ValueError
        If parts have different numbers of rows, if rows or columns can't be split evenly among their devices, if an
        integer doesn't fit into the bits that JAX uses, or if rows can't be sharded in this mesh, see
        :meth:`.Rank.from_mesh`.
    """
    import jax
    from jax.experimental.sparse import CSR
    from jax.sharding import NamedSharding, PartitionSpec
    from jax.tree_util import keystr

    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"sharding must be a NamedSharding, got {sharding!r} of type {type(sharding).__name__}.")
    shares, rank = rows_of(sharding)
    if isinstance(batch, Mapping) and isinstance(batch.get("var"), pd.DataFrame):
        batch = {key: part for key, part in batch.items() if key != "var"}
    arrays = jax.tree.map_with_path(
        lambda path, part: _on_host(f"batch{keystr(path)}", part),
        batch,
        is_leaf=lambda part: isinstance(part, CSR),  # otherwise JAX would treat its three arrays as parts
    )
    # numbers of rows by the names of the arrays, such as batch['obs']['cell_type']
    lengths = {f"batch{keystr(path)}": len(array) for path, array in jax.tree.leaves_with_path(arrays)}
    if len({*lengths.values()}) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"All parts of a batch must have the same number of rows, got {listed}.")
    n_rows, n_parts = max(lengths.values(), default=0), len(shares[rank].places)
    if n_rows % n_parts:
        raise ValueError(
            f"The rows of a batch must be a multiple of {n_parts}, because the devices of a process split them into "
            f"{n_parts} parts, got {n_rows} rows. Pass a batch_size that is a multiple of {n_parts}, and "
            "remainder='drop' or 'pad', under which all batches are full."
        )

    arrays = jax.tree.map_with_path(partial(_numbered_through, rank), arrays)

    # arrays with fewer dimensions than the sharding use its first dimensions
    def place(path: tuple[Any, ...], array: npt.NDArray[Any]) -> jax.Array:
        spec = PartitionSpec(*sharding.spec[: array.ndim])
        placement = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        # (rows of this process, columns) -> (rows of all ranks, columns)
        shape = (n_rows * len(shares), *array.shape[1:])
        try:
            placed: jax.Array = jax.make_array_from_process_local_data(placement, array, shape)
        except ValueError as error:
            error.add_note(f"The array is batch{keystr(path)}, which {sharding.spec} splits.")
            raise
        return placed

    return jax.tree.map_with_path(place, arrays)


def _numbered_through(rank: int, path: tuple[Any, ...], array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array of a batch; numbers of sets begin at 0 in each process, and then count through all ranks."""
    keys = [getattr(entry, "key", None) for entry in path]
    if keys[-1:] != ["set"] or "obs" in keys or not len(array):  # obs may have a column of this name
        return array
    # every rank has as many sets: with 2 each, sets 0 1 of rank 1 are the sets 2 3 of the global batch
    numbered: npt.NDArray[Any] = array + np.asarray(rank * (int(array.max()) + 1), dtype=array.dtype)
    return numbered


def _on_host(name: str, part: Any) -> Any:  # noqa: ANN401 whatever a loader yields
    """Return a part of a batch as a dense NumPy array in a dtype of JAX; a table as a dict of arrays."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.sparse import CSR

    if isinstance(part, pd.DataFrame):
        return {column: _on_host(f"{name}[{column!r}]", values) for column, values in part.items()}
    if isinstance(part, CSR):
        # JAX would compile its own conversion again for every number of values
        part = sparse.csr_matrix(tuple(map(np.asarray, (part.data, part.indices, part.indptr))), shape=part.shape)
    if sparse.issparse(part):
        part = part.toarray()
    if isinstance(getattr(part, "dtype", None), pd.CategoricalDtype):
        part = pd.Series(part).cat.codes.to_numpy(np.int32)
    dtype = getattr(part, "dtype", None)
    is_numeric = isinstance(dtype, np.dtype) and jnp.isdtype(dtype, ("bool", "numeric"))
    # NumPy would drop the mask of a masked array
    if not is_numeric or not part.shape or isinstance(part, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be an array of numbers or a categorical column, got {type(part).__name__} of dtype {dtype}. "
            "Pass only the parts that you need, such as {'X': batch['X'], 'y': batch['obs']['cell_type']}, or convert "
            "strings to categories, and nullable or masked values to floats with NaN."
        )
    array = np.asarray(part)
    # JAX would cast silently, and integers of 64 bits would wrap around
    converted = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if jnp.isdtype(array.dtype, "integral") and not np.array_equal(converted, array):
        raise ValueError(
            f"{name} has {array.dtype} values that don't fit into {converted.dtype}, which JAX uses. Omit it, or call "
            "jax.config.update('jax_enable_x64', True) before anything else."
        )
    return converted
