"""Batches as JAX arrays: over all processes for ``jax.jit``, or over this one's devices for ``jax.pmap``.

1. Whatever a loader yields becomes numpy arrays, one for each column of ``obs``.
2. They are checked: the same number of rows in each, and numbers that JAX can hold.
3. They are placed on devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse

from annbatch_distributed.ranks.jax import named_axes, rows_of

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding


__all__ = ["global_batch", "pmap_batch"]

type Tree = Any  # an array, or nested dicts of them, which no type can say

_HOW_TO_KEEP = "Leave it out, or call jax.config.update('jax_enable_x64', True) before all else"


def global_batch(batch: Tree, sharding: NamedSharding) -> Tree:
    """Make this process's batch its part of arrays that span all processes.

    Every process must call it, with batches of as many rows. No process could notice that others have more or fewer:
    JAX would compute on, with wrong sizes. ``remainder="drop"`` and ``"pad"`` have full batches only; under
    ``"exact"`` and ``"keep"``, some are smaller.

    The rows of rank r, as :func:`~annbatch_distributed.mesh_ranks` counts them, lie where the sharding has the
    devices of that rank. With devices in the order of processes, those of rank 0 come first, then those of rank 1,
    and so on. Processes of the same rank must give the same rows, as they read them with
    ``dist_info=mesh_ranks(sharding)``.

    Parameters
    ----------
    batch
        What an annbatch ``Loader`` yields; or any part of it, a numpy array, a JAX array, a sparse matrix, a pandas
        Series or DataFrame, or dicts, lists and tuples of those. Each becomes one array of JAX:

        - sparse matrices, dense ones;
        - a DataFrame such as ``obs``, a dict of its columns;
        - a categorical column, its codes, as 32-bit integers with -1 for what is missing. They mean the same in every
          process as long as the categories are the same, as they are within a collection;
        - a nullable column of pandas and a masked array, floats with NaN for what is missing, also where nothing is;
        - None, None.

        Numbers stay what they are, or are an error. JAX keeps 32 bits unless it is configured otherwise, so that whole
        numbers must lie within -2**31 and 2**31 - 1, unsigned ones below 2**32, those of a nullable column within
        -2**24 and 2**24, up to which a float holds each. Floats are rounded to the nearest of 32 bits, as JAX does;
        that makes those beyond 3.4e38 an error, and those nearer to 0 than 7e-46 a 0.

        ``var``, which a ``Loader`` repeats in every batch, is about columns instead of rows, and left out.
    sharding
        How the arrays lie on devices. Its first dimension splits rows; the others may split columns, of which every
        process has all. An array with fewer dimensions takes the first ones: labels are split as rows are.

    Returns
    -------
        An array of JAX, or a dict of them with the keys of ``batch``.

    Raises
    ------
    TypeError
        If a part has neither numbers nor categories, if the keys of a dict can't be sorted, or if ``sharding`` is no
        ``NamedSharding`` over devices.
    ValueError
        If parts have different numbers of rows; if rows or columns don't divide by the devices that they are spread
        over; if a number doesn't fit the bits that JAX has; if a table has two columns of the same name; or if rows
        can't be shared out in this mesh, see :func:`~annbatch_distributed.mesh_ranks`.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> import pandas as pd
    >>> from annbatch_distributed.integrations.jax import global_batch
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> rows = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
    >>> obs = pd.DataFrame(
    ...     {"cell_type": pd.Categorical(["T", "B", "T"]), "n_genes": [900, 700, 800]}
    ... )
    >>> batch = global_batch({"X": np.ones((3, 2)), "obs": obs, "index": None}, rows)
    >>> (
    ...     batch["X"].shape,
    ...     batch["obs"]["cell_type"].tolist(),
    ...     batch["obs"]["n_genes"].tolist(),
    ...     batch["index"],
    ... )
    ((3, 2), [1, 0, 1], [900, 700, 800], None)
    >>> global_batch(np.array([0, 2**31]), rows)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: batch has integers from 0 to 2147483648, and JAX keeps 32 bits of them, -2147483648 to 2147483647. ...
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"Expected a NamedSharding, got {sharding!r} of type {type(sharding).__name__}.")
    shares, rank = rows_of(sharding)
    arrays, n_rows = _on_host(batch, n_parts=len(shares[rank].places))
    spec = [named_axes(part) for part in sharding.spec]

    def place(name: str, array: npt.NDArray[Any]) -> jax.Array:
        for dimension, axes in enumerate(spec[1 : array.ndim], start=1):
            n_parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
            if array.shape[dimension] % n_parts:
                raise ValueError(
                    f"{name} is {array.shape[dimension]} long in dimension {dimension}, which doesn't divide by "
                    f"{n_parts}, the number of devices along {', '.join(map(repr, axes))} in {sharding.spec}. Choose "
                    "as many columns as divide, or leave this dimension out of the PartitionSpec."
                )
        leading = PartitionSpec(*sharding.spec[: array.ndim])
        placement = NamedSharding(sharding.mesh, leading, memory_kind=sharding.memory_kind)
        shape = (n_rows * len(shares), *array.shape[1:])
        placed: jax.Array = jax.make_array_from_process_local_data(placement, array, shape)
        return placed

    return _each(place, arrays)


def pmap_batch(batch: Tree, devices: Sequence[jax.Device] | int | None = None) -> Tree:
    """Split this process's batch over its devices, for functions under ``jax.pmap``.

    Arrays get a first dimension, one entry for each device: of 6 rows, two devices get the rows 0:3 and 3:6. The
    number of rows must divide by that of devices.

    Parameters
    ----------
    batch
        As for :func:`global_batch`.
    devices
        Devices of this process, in the order in which they get the rows; or how many of ``jax.local_devices()``. None
        takes all of those. Give ``jax.pmap`` the same.

    Returns
    -------
        An array of JAX, or a dict of them with the keys of ``batch``.

    Raises
    ------
    TypeError
        If a part of the batch has neither numbers nor categories, or if the keys of a dict can't be sorted.
    ValueError
        If parts have different numbers of rows; if rows don't divide by the number of devices; if a number doesn't fit
        the bits that JAX has; if a table has two columns of the same name; or if this process has no such devices.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> from annbatch_distributed.integrations.jax import pmap_batch
    >>> batch = pmap_batch({"X": np.ones((4, 3)), "index": np.arange(4)}, devices=1)
    >>> batch["X"].shape, batch["index"].shape
    ((1, 4, 3), (1, 4))
    >>> jax.pmap(lambda batch: batch["X"].sum())(batch).tolist()
    [12.0]
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    chosen = _local_devices(devices)
    arrays, n_rows = _on_host(batch, n_parts=len(chosen))
    # where jax.pmap would put them, and finds them without another copy
    one_each = NamedSharding(Mesh(np.array(chosen), ("devices",)), PartitionSpec("devices"))

    def place(_: str, array: npt.NDArray[Any]) -> jax.Array:
        split = array.reshape(len(chosen), n_rows // len(chosen), *array.shape[1:])
        placed: jax.Array = jax.device_put(split, one_each)
        return placed

    return _each(place, arrays)


def _local_devices(devices: Sequence[jax.Device] | int | None) -> list[jax.Device]:
    import jax

    local: list[jax.Device] = jax.local_devices()
    if devices is None:
        return local
    if isinstance(devices, int):
        if not 1 <= devices <= len(local):
            raise ValueError(
                f"devices must be from 1 to {len(local)}, which is how many this process has, got {devices}."
            )
        return local[:devices]
    chosen = list(devices)
    if not chosen or any(device.process_index != jax.process_index() for device in chosen):
        raise ValueError(f"devices must be some of this process's, {local}, got {chosen}.")
    return chosen


def _on_host(batch: Tree, n_parts: int) -> tuple[Tree, int]:
    """Return a batch as dense arrays that JAX can hold, and its number of rows, which must divide by ``n_parts``."""
    if isinstance(batch, Mapping) and isinstance(batch.get("var"), pd.DataFrame):
        batch = {key: part for key, part in batch.items() if key != "var"}
    lengths: list[tuple[str, int]] = []

    def check(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        checked = _checked(name, array)
        lengths.append((name, len(checked)))
        return checked

    arrays = _each(check, _dense(batch))
    if len({length for _, length in lengths}) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths)
        raise ValueError(f"All parts of a batch must have as many rows as each other, got {listed}.")
    n_rows = lengths[0][1] if lengths else 0
    if n_rows % n_parts:
        raise ValueError(
            f"A batch of {n_rows} rows doesn't divide by {n_parts}, the number of parts into which the devices of a "
            f"process split its rows. Use a batch_size that is a multiple of {n_parts}, with remainder='drop' or "
            "'pad', under which all batches are full."
        )
    return arrays, n_rows


def _dense(part: Tree) -> Tree:
    """Turn what a loader yields into numpy arrays, which may be masked."""
    from jax.experimental.sparse import CSR

    if part is None:
        return None
    if isinstance(part, Mapping | pd.DataFrame):
        _check_names(list(part))
        return {name: _dense(each) for name, each in part.items()}
    if isinstance(part, tuple | list):
        parts = [_dense(each) for each in part]
        return parts if isinstance(part, list) else tuple(parts)
    if isinstance(part, pd.Series | pd.Index | pd.api.extensions.ExtensionArray):
        return _column(pd.Series(part))
    if isinstance(part, CSR):
        # in JAX this would be compiled anew for every number of values
        part = sparse.csr_matrix(tuple(map(np.asarray, (part.data, part.indices, part.indptr))), shape=part.shape)
    if sparse.issparse(part):
        return part.toarray()
    return part if isinstance(part, np.ma.MaskedArray) else np.asarray(part)


def _check_names(names: list[Any]) -> None:
    if repeated := [name for name, many in Counter(names).items() if many > 1]:
        raise ValueError(
            "A table of the batch has two columns of the same name: "
            f"{', '.join(map(repr, repeated))}. Rename them, or give the columns that you need."
        )
    try:
        sorted(names)
    except TypeError as error:
        raise TypeError(f"The names in a batch must be of one type, since JAX sorts them, got {names}.") from error


def _column(column: pd.Series[Any]) -> npt.NDArray[Any]:
    """Return a column, in a type that follows from the column's type alone, so that it is the same in every batch."""
    dtype = column.dtype
    array: npt.NDArray[Any]
    if isinstance(dtype, pd.CategoricalDtype):
        array = column.cat.codes.to_numpy(np.int32)
    elif isinstance(dtype, pd.SparseDtype):
        array = column.to_numpy(dtype.subtype)  # pandas would choose floats for some integers
    elif isinstance(dtype, pd.api.extensions.ExtensionDtype) and pd.api.types.is_numeric_dtype(dtype):
        numbers = column.to_numpy(getattr(dtype, "numpy_dtype", np.float64), na_value=0)
        array = np.ma.MaskedArray(numbers, column.isna().to_numpy())
    else:
        array = column.to_numpy()
    return array


def _checked(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array as JAX keeps it, or say why it can't."""
    import jax
    import jax.numpy as jnp

    if not jnp.isdtype(array.dtype, ("bool", "numeric")):
        raise TypeError(
            f"{name} has dtype {array.dtype}, and JAX has no arrays of it, only of numbers. Give the columns that you "
            "need, for instance global_batch({'X': batch['X'], 'y': batch['obs']['cell_type']}, ...), or make it "
            "categorical in the collection, to have its codes."
        )
    if array.ndim == 0:
        raise ValueError(f"{name} must have rows, got the single value {array}.")
    # floats even where nothing is missing, as it may be in another batch
    widest = np.promote_types(array.dtype, np.float64) if isinstance(array, np.ma.MaskedArray) else array.dtype
    kept = jax.dtypes.canonicalize_dtype(widest)
    if jnp.issubdtype(array.dtype, np.integer) and kept != array.dtype:
        _check_integers(name, array, kept)
    if isinstance(array, np.ma.MaskedArray):
        array = np.ma.filled(array.astype(widest), np.nan)
    try:
        with np.errstate(over="raise"):
            return array.astype(kept, copy=False)
    except FloatingPointError:
        sizes = np.abs([array.real, array.imag])
        most, limits = sizes[np.isfinite(sizes)].max(), np.finfo(kept)
        raise ValueError(
            f"{name} has numbers of up to {most:.3g}, and JAX keeps {limits.bits} bits of them, up to "
            f"{limits.max:.3g}. {_HOW_TO_KEEP}."
        ) from None


def _check_integers(name: str, array: npt.NDArray[Any], kept: np.dtype[Any]) -> None:
    import jax.numpy as jnp

    there = array.compressed() if isinstance(array, np.ma.MaskedArray) else array
    if not there.size:
        return
    least, most = int(there.min()), int(there.max())
    if jnp.issubdtype(kept, np.integer):
        low, high = int(np.iinfo(kept).min), int(np.iinfo(kept).max)
        what = f"{np.iinfo(kept).bits} bits of them, {low} to {high}"
    else:
        high = 2 ** (np.finfo(kept).nmant + 1)  # the next one is no float
        low, what = -high, f"those that may be missing as {kept}, which holds each from {-high} to {high}"
    if least < low or most > high:
        raise ValueError(f"{name} has integers from {least} to {most}, and JAX keeps {what}. {_HOW_TO_KEEP}.")


def _each(change: Callable[[str, npt.NDArray[Any]], object], arrays: Tree) -> Tree:
    import jax

    return jax.tree.map_with_path(lambda path, array: change(f"batch{jax.tree_util.keystr(path)}", array), arrays)
