"""The StatefulLoader: annbatch's Loader whose epochs can be saved and resumed.

1. Adding datasets that annbatch would read wrongly raises.
2. annbatch's own Loader reads one load request at a time. Here, the thread that asks for a collection on a local disk
   reads it, see :mod:`local_reader`.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from inspect import signature
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import anndata as ad
import numpy as np
import numpy.typing as npt
import pandas as pd
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler, SequentialSampler
from annbatch.types import LoadRequest
from annbatch.utils import CSRContainer
from anndata.io import read_elem, sparse_dataset
from zarr import Array, AsyncArray
from zarr.storage import LocalStore

from annbatch_distributed.core.masks import AnyMask, AnyNames, resolve_mask
from annbatch_distributed.core.request import MAX_GAP, Marks, Request
from annbatch_distributed.core.values import BOUND, as_bytes, check_arguments, integer
from annbatch_distributed.loader import chunk_reader, zarrs_checks
from annbatch_distributed.loader._annbatch import (
    arrays_in,
    batches_on_gpu,
    check_layout,
    collection_of,
    data_in,
    file_dtype_of,
    has_room_for_pointers,
    iterated,
    loaded,
    obs_at,
    options_of,
    preloads_to_gpu,
    shapes_of,
    stores_of,
    take_data_of,
)
from annbatch_distributed.loader.batches import batches_of, in_framework, with_dtype
from annbatch_distributed.loader.collection import AnyCollection, as_collection
from annbatch_distributed.loader.epoch_loader import EpochLoader, column_of
from annbatch_distributed.loader.labels import Labels, Names, Strings, in_memory
from annbatch_distributed.loader.local_reader import LocalReader
from annbatch_distributed.loader.sizes import sizes_of_draws, sizes_of_sets, stored, suggest_sizes
from annbatch_distributed.ranks import DistInfo
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.sets import CellSets
from annbatch_distributed.weights import Weights

if TYPE_CHECKING:
    from annbatch_distributed.loader.workers import WorkerDataLoader


#: Names of arguments of ``DistributedSampler``, of annbatch's ``Loader``, and of a StatefulLoader, for its callers.
SAMPLER_ARGUMENTS = signature(DistributedSampler).parameters.keys() - {"sampler"}
_LOADER_ARGUMENTS = {"return_index", "preload_to_gpu", "to"}
_OWN_ARGUMENTS = {"prefetch", "return_file", "dtype"}


class StatefulLoader(EpochLoader, Loader[Any, Any]):
    """annbatch ``Loader`` that can be saved within an epoch and resumed there.

    :meth:`from_collection` makes a loader and its sampler in one call. The class itself takes a
    :class:`DistributedSampler` and the arguments of :class:`annbatch.Loader`.

    A batch is a dict of ``n`` cells. ``n`` is ``batch_size`` or less, times the virtual ranks of a rank and the cells
    of a set, if there are any:

    ``"X"``
        Values of shape ``(n, n_var)`` in the dtype that ``dtype`` describes: a CSR matrix of SciPy, or a NumPy array if
        the collection is dense. Under ``to="torch"`` a tensor (CSR layout if sparse), under ``to="jax"`` an array
        (``jax.experimental.sparse.CSR`` if sparse). Sparse cells under ``dtype="stored"`` are :class:`.CSRRows`,
        whatever ``to`` is.
    ``"obs"``, ``"var"``
        pandas DataFrames of the ``n`` cells and of the ``n_var`` genes; None where a dataset was added without them.
    ``"index"``
        With ``return_index=True``, the rows of the cells in the collection, int64; else None.
    ``"file"``
        With ``return_file=True``, the line of each cell's file in :attr:`genes_measured`, int64.
    ``"repeated"``
        Under ``remainder="pad"`` of the loader or of :class:`CellSets`, True for rows that are read again, to fill
        batches or sets.
    ``"set"``, ``"is_control"``
        With ``sets``, the number of each cell's set within the batch, int64, and True for controls.

    The last five are NumPy arrays of shape ``(n,)``, whatever ``to`` is.

    ``len()`` is the number of batches of the whole epoch, also after a resume, as Lightning and PyTorch expect. The
    number of remaining batches is ``len(loader) - loader.batches_done``.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
    >>> def make_loader():
    ...     sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=4)
    ...     distributed = DistributedSampler(sampler, dist_info=Rank(0, 2), seed=0)
    ...     loader = StatefulLoader(
    ...         batch_sampler=distributed, return_index=True, preload_to_gpu=False
    ...     )
    ...     return loader.add_adata(ad.AnnData(np.arange(48.0).reshape(48, 1)))
    >>> loader = make_loader()
    >>> whole_epoch = [batch["index"].tolist() for batch in loader]
    >>> loader.set_epoch(0)
    >>> batches = iter(loader)
    >>> before = [next(batches)["index"].tolist() for _ in range(3)]
    >>> state = loader.state_dict()
    >>> loader = make_loader()  # in a restarted job
    >>> loader.load_state_dict(state)
    >>> after = [batch["index"].tolist() for batch in loader]
    >>> before + after == whole_epoch
    True

    Parameters
    ----------
    batch_sampler
        Sampler of the rows that this rank reads.
    prefetch
        Number of load requests to prefetch, each in its own thread, while the current one is trained on (default 0).
        All of them are held in memory in addition to the current one. 1 hides reading behind training steps that take
        about as long; larger numbers hide the latency of object storage. 0 reads when a batch is needed, as annbatch
        does. Batches, states and errors are the same for any number.
    return_file
        True to add the key ``"file"`` to each batch: for each cell, the line of its file in :attr:`genes_measured`
        (default False). The collection must have been written by ``annbatch-distributed collect``.
    dtype
        Dtype of the values of ``X``, such as ``"float32"``. None yields the dtype of the files that the collection was
        made of by ``annbatch-distributed collect``, which stores counts in smaller dtypes, and the stored dtype of
        other collections (default). ``"stored"`` yields the stored dtype, and sparse rows as :class:`.CSRRows`, whose
        indices are narrow, too.
    kwargs
        Other arguments of :class:`annbatch.Loader`.

    Raises
    ------
    TypeError
        If ``batch_sampler`` is not a :class:`DistributedSampler`, ``prefetch`` is not an integer, or ``dtype`` is not a
        dtype of numbers.
    ValueError
        If ``prefetch`` is negative, or above 0 with ``preload_to_gpu=True``, since its threads would use the GPU; or if
        ``dtype`` is ``"stored"`` with it. If
        ``to`` is not ``"torch"``, ``"jax"`` or None.
    ImportError
        If the framework that ``to`` names is not installed.
    """

    def __init__(
        self,
        *,
        batch_sampler: DistributedSampler,
        prefetch: int = 0,
        return_file: bool = False,
        dtype: str | None = None,
        **kwargs: Any,  # noqa: ANN401 annbatch's own
    ) -> None:
        if not isinstance(batch_sampler, DistributedSampler):
            raise TypeError(
                f"batch_sampler must be a DistributedSampler, got {batch_sampler!r}. Wrap the sampler; in a single "
                "process, pass DistributedSampler(sampler, dist_info=Rank(0, 1), seed=...)."
            )
        check_arguments(type(self).__name__, kwargs, signature(Loader).parameters, _OWN_ARGUMENTS)
        if (to := kwargs.get("to")) not in (None, "torch", "jax"):
            raise ValueError(f"to must be 'torch', 'jax', or None for NumPy and SciPy arrays, got {to!r}.")
        if to is not None and find_spec(to) is None:  # annbatch looks only if it converts the batches
            raise ImportError(f"to={to!r} requires {to}, which is not installed. Install annbatch-distributed[{to}].")
        self._options = {"prefetch": prefetch, "return_file": return_file, "dtype": dtype, **kwargs}
        self._is_as_stored = dtype == "stored"
        self._dtype = None if dtype is None or self._is_as_stored else _number_dtype(dtype)
        self._tells_files = return_file
        self._genes_measured: pd.DataFrame | None = None
        # frameworks may be set up for one thread only, so the thread that takes batches converts them
        self._to_be = kwargs.pop("to", None) if prefetch else None
        EpochLoader.__init__(self, batch_sampler, prefetch)
        self._one_request = _OneRequest(batch_sampler)
        self._local_reader = LocalReader()
        Loader.__init__(self, batch_sampler=self._one_request, **kwargs)
        if prefetch and preloads_to_gpu(self):
            raise ValueError(
                f"preload_to_gpu must be False under prefetch={prefetch}, because its threads would use the GPU at "
                "the same time as the training. Pass preload_to_gpu=False, and move batches in the training step."
            )
        if self._is_as_stored and preloads_to_gpu(self):
            raise ValueError(
                "preload_to_gpu must be False under dtype='stored', because CuPy has no such sparse matrices. Pass "
                "preload_to_gpu=False, and move batches in the training step."
            )
        # by dataset number: names of the cells, which annbatch doesn't keep for datasets without columns of obs
        self._names: dict[int, AnyNames] = {}
        # labels that aren't in memory; None if those that there are are in annbatch's tables
        self._labels: Labels | None = None
        # the number of datasets, and their identity: progress bars call len() in each step
        self._identified: tuple[int, dict[str, Any]] = (0, {})
        # the number of datasets, and the dtype of their files, which is asked for with each load request
        self._file_dtype: tuple[int, np.dtype[Any] | None] = (0, None)

    @classmethod
    def from_collection(
        cls,
        collection: AnyCollection,
        *,
        dist_info: DistInfo,
        batch_size: int = 256,
        mask: AnyMask | None = None,
        seed: int = 0,
        shuffle: bool = True,
        sets: CellSets | None = None,
        memory: int | str = 1 << 30,
        prefetch: int = 1,
        names: bool = False,
        load_adata: Callable[[zarr.Group], ad.AnnData] | None = None,
        cache: str | PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        **options: Any,  # noqa: ANN401 of DistributedSampler and annbatch's Loader
    ) -> Self:
        """Make a loader of a collection, with sizes that fit into memory.

        Each cell is read once per epoch. The sampler is a :class:`DistributedSampler` around annbatch's
        ``RandomSampler``. :func:`suggest_sizes` chooses the sizes of chunks and load requests, which are the same on
        any number of ranks.

        Examples
        --------
        >>> import tempfile
        >>> from pathlib import Path
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch import DatasetCollection
        >>> from annbatch_distributed import Rank, StatefulLoader
        >>> folder = Path(tempfile.mkdtemp())
        >>> ad.AnnData(np.ones((1_000, 5))).write_h5ad(folder / "cells.h5ad")
        >>> _ = DatasetCollection(folder / "cells.zarr").add_adatas(
        ...     [folder / "cells.h5ad"]
        ... )
        >>> loader = StatefulLoader.from_collection(
        ...     folder / "cells.zarr", dist_info=Rank(0, 2), batch_size=128
        ... )
        >>> [len(batch["X"]) for batch in loader]
        [128, 128, 128, 116]

        Parameters
        ----------
        collection
            Collection that annbatch has written: its path or URL, its zarr group, or an annbatch
            ``DatasetCollection``.
        dist_info
            Source of the rank and the world size, as for :class:`DistributedSampler`, such as ``"torch"``.
        batch_size
            Rows of a batch on each rank, or on each virtual rank (default 256).
        mask
            Cells to read, as for :class:`DistributedSampler`, such as a boolean Series of shape ``(n_obs,)``. None
            reads all cells (default).
        seed
            Seed of the order, the same on every rank (default 0).
        shuffle
            True to shuffle the cells in each epoch (default). False reads them in the order of the collection, with
            ``SequentialSampler``.
        sets
            Sets of cells to read instead of single cells; ``batch_size`` is then a number of sets. Unless you pass
            ``sharding`` or ``shuffle=False``, each epoch assigns the sets to the ranks again (``sharding="shuffled"``).
        memory
            Memory limit of the load requests of a rank: a number of bytes, or a string such as ``"4GB"`` (default 1
            GiB). Python and its libraries (about 1 GB), masks, sets, and labels that are in memory come on top. It is
            estimated for ``X`` of the collection; pass less if ``load_adata`` loads larger values.
        prefetch
            Number of load requests to prefetch (default 1).
        names
            True to yield the names of the cells as the index of ``batch["obs"]``. By default, the index has the rows of
            the cells in the collection, since training seldom needs names, and they take longer to read than all other
            labels. A ``load_adata`` always yields names, and so does :meth:`cells_of`.
        load_adata
            Function that loads the ``AnnData`` of each dataset, as for :meth:`use_collection`, with its names.
        cache
            Folder on a local disk in which the processes of a node keep what they have read of a collection in object
            storage, or on a file system that is slow: each part is fetched once, and read from there in later epochs
            and jobs. ``collection`` must be a URL or a path. None keeps nothing (default).
        cache_limit
            Largest size of this folder, at least 512 MiB: a number of bytes, or a string such as ``"500GB"``. A full
            cache deletes what no rank has read since the job began, longest ago first, and keeps the rest. None has no
            limit (default).
        options
            Other arguments of :class:`DistributedSampler`: ``remainder`` (default ``"exact"``, under which some batches
            are smaller; pass ``"drop"`` if each step needs batches of one size, as compiled steps do), ``sharding``,
            ``virtual_ranks``, ``weights``, ``num_samples``, ``rounds`` and ``max_gap``. And of :class:`StatefulLoader`:
            ``to``, ``dtype``, ``return_index``, ``return_file``, and the options of :class:`annbatch.Loader`
            (``preload_to_gpu`` is False by default).

        Returns
        -------
        StatefulLoader
            Loader of this rank.

        Raises
        ------
        TypeError
            If an argument or an option has the wrong type, or doesn't exist.
        ValueError
            If an argument is out of its range, or incompatible with a different one; if a single batch doesn't fit into
            ``memory``; or if the mask selects cells that don't exist.
        OSError
            If there is no collection at a path.
        ImportError
            If ``cache`` is a folder, and obstore is not installed.
        """
        collection = as_collection(collection, cache=cache, cache_limit=cache_limit)
        sampler = sampler_for(
            "from_collection",
            [collection],
            options,
            dist_info=dist_info,
            batch_size=batch_size,
            mask=mask,
            seed=seed,
            shuffle=shuffle,
            sets=sets,
            memory=memory,
            prefetch=prefetch,
        )
        loader = cls(batch_sampler=sampler, prefetch=prefetch, **{"preload_to_gpu": False} | options)
        loader.use_collection(collection, load_adata=load_adata, names=names)
        loader._check_cells()  # for one, the names of a mask may be in a different order
        return loader

    @classmethod
    def from_loader(
        cls,
        loader: Loader[Any, Any],
        *,
        batch_sampler: DistributedSampler | None = None,
        **options: Any,  # noqa: ANN401 annbatch's own, too
    ) -> Self:
        """Make a loader of the datasets of an annbatch ``Loader``.

        No data is opened or copied. Datasets that are added to either loader later are not added to the other one.

        Parameters
        ----------
        loader
            :class:`annbatch.Loader` or :class:`StatefulLoader`.
        batch_sampler
            Sampler of the rows that this rank reads. None takes the sampler of ``loader`` (default).
        options
            Other arguments of :class:`StatefulLoader`, such as ``prefetch``. Options that you omit are taken from
            ``loader``.

        Returns
        -------
        StatefulLoader
            Loader of this rank.

        Raises
        ------
        TypeError
            If ``loader`` is not a loader, or is of a subclass, whose methods would be lost; or as
            :class:`StatefulLoader` raises it.

        Examples
        --------
        >>> from annbatch import Loader
        >>> loader = Loader(
        ...     batch_size=4, chunk_size=4, preload_nchunks=2, preload_to_gpu=False
        ... )
        >>> loader = loader.add_adata(ad.AnnData(np.ones((48, 1)), obs=obs[:48]))
        >>> sampler = DistributedSampler(
        ...     loader.batch_sampler, dist_info=Rank(1, 2), seed=0
        ... )
        >>> rank_1 = StatefulLoader.from_loader(
        ...     loader, batch_sampler=sampler, return_index=True
        ... )
        >>> next(iter(rank_1))["index"].tolist()
        [24, 25, 26, 27]
        """
        if type(loader) not in {Loader, StatefulLoader, cls}:
            raise TypeError(
                f"loader must be an annbatch Loader or a StatefulLoader, got {loader!r} of type "
                f"{type(loader).__name__}. Methods of a subclass would be lost: derive it from StatefulLoader instead."
            )
        sampler = loader.batch_sampler if batch_sampler is None else batch_sampler
        if not isinstance(sampler, DistributedSampler):
            raise TypeError(
                f"batch_sampler must be a DistributedSampler, got {sampler!r}. Wrap the sampler of the loader: "
                "from_loader(loader, batch_sampler=DistributedSampler(loader.batch_sampler, dist_info=...))."
            )
        check_arguments("from_loader", options, signature(Loader).parameters, _OWN_ARGUMENTS)
        options_of_loader = loader._options if isinstance(loader, StatefulLoader) else options_of(loader)
        copy = cls(batch_sampler=sampler, **options_of_loader | options)
        copy._check_layouts(data_in(loader))
        # attributes of this class are about passes, except these, which are about datasets
        of_passes = (
            vars(copy).keys()
            - vars(Loader(preload_to_gpu=False)).keys()
            - {
                "_names",
                "_labels",
                "_genes_measured",
            }
        )
        take_data_of(loader, into=copy, without=of_passes)
        return copy

    # Datasets

    @property
    def n_obs(self) -> int:
        """Number of cells of the collection, over all ranks."""
        return super(EpochLoader, self).n_obs

    @property
    def n_var(self) -> int:
        """Number of genes."""
        return super(EpochLoader, self).n_var

    def use_collection(
        self,
        collection: DatasetCollection,
        *,
        load_adata: Callable[[zarr.Group], ad.AnnData] | None = None,
        names: bool = True,
    ) -> Self:
        """Add a collection, as ``use_collection`` of :class:`annbatch.Loader`.

        Columns of ``obs`` of a collection on a local disk that ``annbatch-distributed collect`` has written are read
        with the rows; of other collections, they are in memory.

        Parameters
        ----------
        collection
            Collection that annbatch or ``annbatch-distributed collect`` has written.
        load_adata
            Function that loads the ``AnnData`` of each dataset, with its ``obs`` and names, which are then in memory.
            None takes ``X`` and ``obs`` (default).
        names
            True to yield the names of the cells as the index of ``batch["obs"]``, as annbatch does (default). False
            yields the rows of the cells in the collection instead, which is faster, or takes less memory; it has no
            effect on a ``load_adata``.

        Returns
        -------
        StatefulLoader
            This loader.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`add_adatas`, or as annbatch raises them.
        RuntimeError
            If a collection was added before; or if zarrs has read in the parent process before this process was forked,
            so that reading would hang; see :doc:`DataLoader workers </performance>`.
        """
        zarrs_checks.check_zarrs_answers(lambda: "zarrs" in zarr.config.get("codec_pipeline.path"))
        if self._collection_added:  # annbatch's own attribute, so that its loaders' collections count, too
            raise RuntimeError(
                "A loader takes one collection, and it has one. Write all files to one collection, which shuffles them "
                "together, or add datasets with add_adatas."
            )
        groups = list(collection)
        # before anything is loaded: loading a CSC matrix by rows may fail with a less helpful error
        if load_adata is None:
            self._check_layouts(group["X"] for group in groups)
        for group in groups:
            _in_place(group)
        _warn_of_zarrs(collection)
        if load_adata is None and groups:
            self._add_stored(groups, names=names)
        else:
            super().use_collection(collection, **{} if load_adata is None else {"load_adata": load_adata})
        self._collection_added = True
        if self._tells_files:
            self._genes_measured = _measured_in(collection)
            if any("src_path" not in self._columns_of(number) for number in range(len(data_in(self)))):
                raise ValueError("return_file=True needs the column src_path of obs. Let load_adata load this column.")
        return self

    def _add_stored(self, groups: Sequence[Any], *, names: bool) -> None:
        """Add the datasets of a collection, with labels in memory only if they can't be read with the rows."""
        first, n_obs = len(shapes_of(self)), self.n_obs
        tables = [group["obs"] for group in groups]
        labels = None if first else Labels.of(tables, names=names)
        loaded = []
        obs = [None] * len(tables) if labels is not None else in_memory(tables, n_obs, names=names)
        for group, own in zip(groups, obs, strict=True):
            cells, var = group["X"], group["var"]
            backed = _in_place(cells if isinstance(cells, Array) else sparse_dataset(cells))
            loaded.append((backed, own, ad.AnnData(var=pd.DataFrame(index=Strings(var[var.attrs["_index"]])[:])).var))
        for number, (table, part) in enumerate(zip(tables, loaded, strict=True), first):
            super().add_dataset(*part)
            if part[1] is None or not names:
                self._names[number] = Names(number, table)
        self._labels = labels

    @property
    def _obs(self) -> list[pd.DataFrame] | None:
        """Labels of each dataset, for annbatch and for others that look for them there; loads them into memory."""
        if self._labels is not None:
            labels, self._labels = self._labels, None
            self._obs = labels.tables()
        return vars(self).get("_obs")

    @_obs.setter
    def _obs(self, tables: list[pd.DataFrame] | None) -> None:
        vars(self)["_obs"] = tables

    def _columns_of(self, number: int) -> list[str]:
        """Return the names of the columns of ``obs`` of a dataset."""
        if self._labels is not None:
            return self._labels.columns
        return list(self._obs[number]) if self._obs is not None else []

    def _maybe_accumulate_obs(self, dataset_index_to_rows: Any) -> pd.DataFrame | None:  # noqa: ANN401 annbatch's own
        """Return labels of the rows of a load request, for annbatch, which makes batches of them on a GPU."""
        if self._labels is not None:
            return self._labels.read(dataset_index_to_rows)
        return super()._maybe_accumulate_obs(dataset_index_to_rows)

    def _obs_at(self, rows_of: Any, places: npt.NDArray[np.intp]) -> pd.DataFrame | None:  # noqa: ANN401 annbatch's own
        """Return labels of rows at some places among the rows of a load request."""
        return obs_at(self, rows_of, places) if self._labels is None else self._labels.read(rows_of, places)

    @property
    def genes_measured(self) -> pd.DataFrame:
        """Table of the genes that each file of the collection has.

        It has boolean values, the shape ``(n_files, n_var)``, and the names of files and genes. A gene that a file
        lacks is 0 in all cells of the file, and a loss should ignore these zeros:
        ``loader.genes_measured.to_numpy()[batch["file"]]`` is a mask for the values of a batch.

        Raises
        ------
        ValueError
            If the loader was made without ``return_file=True``, or has no collection yet.
        """
        if self._genes_measured is None:
            raise ValueError(
                "The loader has no table of measured genes. Pass return_file=True, and call use_collection()."
            )
        return self._genes_measured

    def add_adatas(self, adatas: list[ad.AnnData]) -> Self:
        """Add datasets, as ``add_adatas`` of :class:`annbatch.Loader`.

        Raises
        ------
        TypeError
            If an ``X`` is a CSC matrix, or as annbatch raises it.
        ValueError
            If the chunks of an ``X`` split its columns, which annbatch would read wrongly; or as annbatch raises it.
        """
        first = len(shapes_of(self))
        self._check_layouts(adata.X for adata in adatas)
        for adata in adatas:
            _in_place(adata.X)
        super().add_adatas(adatas)
        self._names |= {number: adata.obs_names for number, adata in enumerate(adatas, first)}
        return self

    def add_adata(self, adata: ad.AnnData) -> Self:
        """Add a dataset, as :meth:`add_adatas`."""
        return self.add_adatas([adata])

    def add_datasets(self, datasets: list[Any], obs: Any = None, var: Any = None) -> Self:  # noqa: ANN401 annbatch's own
        """Add arrays as datasets, as ``add_datasets`` of :class:`annbatch.Loader`.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`add_adatas`.
        """
        self._check_layouts(datasets)
        return super().add_datasets(list(map(_in_place, datasets)), obs, var)

    def add_dataset(self, dataset: Any, obs: Any = None, var: Any = None) -> Self:  # noqa: ANN401 annbatch's own
        """Add an array as a dataset, as :meth:`add_datasets`."""
        self._check_layouts([dataset])
        return super().add_dataset(_in_place(dataset), obs, var)

    def _check_layouts(self, data: Iterable[object]) -> None:
        """Raise if an array can't be read by rows, before any of them is added."""
        for number, cells in enumerate(data, len(shapes_of(self))):
            check_layout(cells, f"X of dataset {number}")

    @property
    def _cells(self) -> tuple[AnyNames, ...] | None:
        """Names of the cells of each dataset; None if a dataset has no names."""
        held: Sequence[pd.DataFrame] = [] if self._labels is not None else self._obs or []
        known: dict[int, AnyNames] = {number: obs.index for number, obs in enumerate(held)} | self._names
        numbers = range(len(data_in(self)))
        return tuple(known[number] for number in numbers) if known.keys() >= {*numbers} else None

    @property
    def _collection(self) -> dict[str, Any]:
        """Identity of the datasets and their cells, as JSON."""
        n_datasets = len(data_in(self))
        if not self._identified[1] or self._identified[0] != n_datasets:
            self._identified = n_datasets, collection_of(self, self._cells)
        return self._identified[1]

    def _annotated(self, cells: pd.DataFrame, columns: str | Sequence[str] | None) -> pd.DataFrame:
        """Return a table of rows with the dataset, name and columns of ``obs`` of each cell."""
        # datasets of 3 and 2 rows have the bounds 0 3 5: row 4 is in dataset 1, at place 1
        bounds = np.cumsum([0, *(n_rows for n_rows, *_ in shapes_of(self))])
        numbers = np.searchsorted(bounds, cells["row"], side="right") - 1
        cells["dataset"], cells["cell"] = numbers, None
        names = self._cells
        wanted = [columns] if isinstance(columns, str) else columns
        parts = []
        for number in np.unique(numbers).tolist():
            # lines of the table whose cells are of this dataset, and the cells' places in it: the bounds 0 3 5 and the
            # rows 4 0 3 give dataset 1 the lines 0 2 and the places 1 0
            here = np.flatnonzero(numbers == number)
            places = cells["row"].to_numpy()[here] - bounds[number]
            if names is not None:
                cells.loc[here, "cell"] = np.asarray(names[number][places], dtype=object)
            known = self._columns_of(number)
            if missing := [name for name in wanted or () if name not in known]:
                raise KeyError(
                    f"Dataset {number} has no columns {', '.join(missing)} in obs. It has "
                    f"{', '.join(map(str, known)) or 'none'}; use_collection(load_adata=...) can load more."
                )
            parts.append(self._labels_at(number, places, known if wanted is None else list(wanted)).set_index(here))
        if not parts:
            return cells
        return cells.join(pd.concat(parts).rename(columns=column_of))

    def _labels_at(self, number: int, rows: npt.NDArray[Any], columns: list[str]) -> pd.DataFrame:
        """Return columns of ``obs`` of some rows of a dataset."""
        if self._labels is not None:
            return self._labels.read({number: rows}, columns=columns)
        return self._obs[number][columns].iloc[rows] if self._obs else pd.DataFrame(index=range(len(rows)))

    def to_dataloader(self, *, num_workers: int = 0, **options: Any) -> WorkerDataLoader:  # noqa: ANN401 torch's own
        """Return a PyTorch ``DataLoader`` whose worker processes read the batches.

        It has the ``set_epoch``, ``state_dict``, ``load_state_dict``, ``len()`` and ``sampler`` of this loader, which a
        plain ``DataLoader`` would hide from Lightning, Accelerate and your own loop. Its state counts the batches that
        the workers have delivered.

        Parameters
        ----------
        num_workers
            Number of worker processes of this rank (default 0, which reads in this process).
        options
            Other options of PyTorch's ``DataLoader``, except those that select or reorder rows. The defaults are
            ``multiprocessing_context="spawn"``, since threads of zarrs don't survive a fork, and
            ``persistent_workers=True``. Spawned workers import the script, so put its code under
            ``if __name__ == "__main__":``.

        Returns
        -------
        ~annbatch_distributed.loader.workers.WorkerDataLoader
            The ``DataLoader``, to iterate over instead of this loader.

        Raises
        ------
        TypeError
            If an option such as ``batch_size``, ``shuffle`` or ``in_order`` would select or reorder rows.
        ValueError
            If ``num_workers`` is above 0 and the loader has ``preload_to_gpu=True``.

        Examples
        --------
        >>> batches = loader.to_dataloader(num_workers=0)
        >>> batches.set_epoch(1)
        >>> batch = next(iter(batches))
        >>> state = batches.state_dict()
        """
        from annbatch_distributed.loader.workers import WorkerDataLoader  # it needs PyTorch

        return WorkerDataLoader(self, num_workers=num_workers, **options)

    # Reading

    def _rows_in(self, batch: object) -> npt.NDArray[Any] | None:
        """Return the rows of a batch; None if it has none."""
        return batch.get("index") if isinstance(batch, dict) else None

    def _iterated(self) -> AbstractContextManager[None]:
        return iterated(self)

    def _preloads_to_gpu(self) -> bool:
        """Return True if annbatch moves batches to a GPU."""
        return preloads_to_gpu(self)

    def _finish(self, batch: Any, marks: Marks) -> Any:  # noqa: ANN401 annbatch's own
        if self._to_be is not None:
            batch["X"] = in_framework(batch["X"], self._to_be)
        if self._genes_measured is not None:
            batch = {**batch, "file": self._genes_measured.index.get_indexer(batch["obs"]["src_path"].astype(object))}
        return {**batch, **marks} if marks else batch

    def _read_request(self, request: Request) -> Generator[Any]:
        """Yield the batches of a load request."""
        try:
            if preloads_to_gpu(self):
                # in an iteration of its own: otherwise annbatch keeps the rows until it has read the next load request
                self._one_request.requests[threading.get_ident()] = request
                yield from batches_on_gpu(self)
            else:
                rows = loaded(self, request.rows(), self._obs_at, self._read_rows)
                is_plain = self._is_as_stored
                yield from batches_of(rows, request.splits, self._dtype_of_x, self._to, is_plain=is_plain)
        except Exception as error:
            if stores := stores_of(self):
                error.add_note(
                    f"Reading a load request from {stores} failed, and none of its batches was yielded. A new "
                    "iteration begins where this one has begun; to continue with these batches, call "
                    "load_state_dict(state_dict()) first."
                )
            raise

    def _index_datasets(self, dataset_index_to_rows: Any) -> Coroutine[Any, Any, Any]:  # noqa: ANN401 annbatch's own
        """Read the rows of a load request for annbatch, which makes batches of them on a GPU."""
        read, dtype = self._read_rows(dataset_index_to_rows), self._dtype_of_x
        return read if dtype is None else _converted(read, dtype)

    def _read_rows(self, rows_of: Any) -> Coroutine[Any, Any, Any]:  # noqa: ANN401 annbatch's own
        """Read the rows of a load request directly, if they are on a local disk, or else through annbatch.

        It reads at once: the returned coroutine runs in zarr's only thread, where reads would wait for each other.
        """
        rows = self._local_reader.read(self, rows_of)
        if rows is not None:
            return _returning(rows)
        zarrs_checks.check_zarrs_answers(lambda: any(map(zarrs_checks.is_by_zarrs, arrays_in(self))))
        return super()._index_datasets(rows_of)

    @property
    def _dtype_of_x(self) -> np.dtype[Any] | None:
        """Dtype of the values of ``X``; None for the dtype in which they are stored."""
        if self._is_as_stored:
            return None
        if self._file_dtype[0] != (n_datasets := len(data_in(self))):
            self._file_dtype = n_datasets, file_dtype_of(self)
        return self._dtype or self._file_dtype[1]

    def _datasets_share_dtype(self, datasets: list[Any]) -> bool:  # type: ignore[override]  # annbatch calls it on itself
        """Return True if all datasets have the same dtypes; the last one is about to be added."""
        # annbatch opens the arrays of all datasets whenever it adds one, but the earlier ones are known
        ends = [datasets[0], datasets[-1]]
        return len(datasets) < 2 or (self._dtypes_homogeneous and super()._datasets_share_dtype(ends))

    def _allocate_out(self, dataset_index_to_rows: Any) -> CSRContainer | npt.NDArray[Any]:  # noqa: ANN401 annbatch's own
        return has_room_for_pointers(super()._allocate_out(dataset_index_to_rows))

    def _allocate_per_dataset_outs(self, dataset_index_to_rows: Any) -> Any:  # noqa: ANN401 annbatch's own
        outs = super()._allocate_per_dataset_outs(dataset_index_to_rows)
        return OrderedDict((number, has_room_for_pointers(out)) for number, out in outs.items())


def sampler_for(
    door: str,
    collections: Sequence[DatasetCollection],
    options: dict[str, Any],
    *,
    dist_info: DistInfo,
    batch_size: int,
    mask: AnyMask | None,
    seed: int,
    shuffle: bool,
    sets: CellSets | None = None,
    memory: int | str,
    prefetch: int,
) -> DistributedSampler:
    """Return a sampler of collections of the same cells, with sizes that fit into memory.

    It removes the sampler's arguments from ``options``, and leaves the loader's arguments. ``door`` is the name of the
    function that was called.
    """
    if chosen := {"chunk_size", "preload_nchunks"} & options.keys():
        raise TypeError(
            f"{door}() chooses {', '.join(sorted(chosen))} by memory. Pass memory=..., or wrap a sampler with these "
            "sizes in a DistributedSampler, and pass it to StatefulLoader."
        )
    named = signature(sampler_for).parameters.keys() - {"door", "collections", "options"}
    check_arguments(door, options, SAMPLER_ARGUMENTS, _LOADER_ARGUMENTS, _OWN_ARGUMENTS, named)
    arguments = {name: options.pop(name) for name in options.keys() & signature(DistributedSampler).parameters}
    if arguments.get("remainder") is None and "enforce_equal_batches" not in arguments:
        arguments["remainder"] = "exact"
    if (virtual_ranks := arguments.get("virtual_ranks")) is not None:
        virtual_ranks = integer("virtual_ranks", virtual_ranks, least=1)
    n_rows, row_bytes, chunks = zip(*map(stored, collections), strict=True)
    memory = as_bytes(memory) // (virtual_ranks or 1)  # a rank may run all virtual ranks
    max_gap = arguments.get("max_gap", MAX_GAP)
    if not isinstance(shuffle, bool | np.bool_):
        raise TypeError(f"shuffle must be True or False, got {shuffle!r} of type {type(shuffle).__name__}.")
    kind = RandomSampler if shuffle else SequentialSampler
    seed = integer("seed", seed, least=0, below=BOUND)
    limits = {"memory": memory, "batch_size": batch_size, "prefetch": prefetch, "max_gap": max_gap}
    if (weights := arguments.get("weights")) is not None and sets is None:
        arguments["weights"] = units = Weights.of(weights, arguments.get("num_samples"), arguments.get("rounds", 1))
        draws = units.in_epoch(n_rows[0], 0, seed, resolve_mask(slice(None) if mask is None else mask))
        sizes = sizes_of_draws(draws, row_bytes=sum(row_bytes), store_chunk=max(chunks), **limits)
    elif sets is None:
        sizes = suggest_sizes(n_rows[0], row_bytes=sum(row_bytes), store_chunk=max(chunks), mask=mask, **limits)
    else:
        arguments = {"sharding": "shuffled" if shuffle else "contiguous", "sets": sets} | arguments
        sizes = sizes_of_sets(CellSets.checked(sets), seed, row_bytes=sum(row_bytes), **limits)
    return DistributedSampler(kind(**sizes), dist_info=dist_info, mask=mask, seed=seed, **arguments)


class _OneRequest(Sampler):
    """Sampler that gives annbatch's Loader one load request per iteration."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        #: By the id of each thread: the load request that it is about to read.
        self.requests: dict[int, Request] = {}

    @property
    def batch_size(self) -> int | None:
        return self._sampler.batch_size

    @property
    def shuffle(self) -> bool:
        return self._sampler.shuffle

    def n_batches(self, n_obs: int) -> int:
        return self._sampler.n_batches(n_obs)

    def validate(self, n_obs: int) -> None:
        self._sampler.validate(n_obs)

    def sample(self, n_obs: int) -> Iterator[LoadRequest]:  # noqa: ARG002 the request is of these rows
        # threads that prefetch read at the same time, each its own request
        request = self.requests.pop(threading.get_ident())
        return iter([{"requests": request.rows(), "splits": list(request.splits)}])

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sample(n_obs)


def _in_place(data: Any) -> Any:  # noqa: ANN401 whatever annbatch takes
    """Return data whose path is absolute, so that it doesn't depend on the working directory."""
    # data is a zarr array or group, or a sparse dataset of anndata, which has a group
    place = getattr(getattr(data, "group", data), "store_path", None)
    if place is None or not isinstance(place.store, LocalStore):
        return data
    place.store.root = place.store.root.absolute()
    if not isinstance(data, Array) or not zarrs_checks.is_by_zarrs(data.async_array):
        return data
    # zarrs keeps the path with which the array was opened
    return Array(AsyncArray(metadata=data.metadata, store_path=place, config=getattr(data.async_array, "config", None)))


def _measured_in(collection: DatasetCollection) -> pd.DataFrame:
    """Return the table of genes that each file of a collection has."""
    tables: dict[tuple[str, ...], pd.DataFrame] = {}
    for group in collection:
        if "varm/measured" not in group:
            raise ValueError(
                "return_file=True needs the table of measured genes that annbatch-distributed collect writes, and this "
                "collection has none. Collect the files again, or omit return_file."
            )
        # (genes, files) on disk, as any array of varm; the same in all datasets that were written together
        table: Any = group["varm/measured"]
        files = tuple(table.attrs["files"])
        if files not in tables:
            var: Any = read_elem(group["var"])
            tables[files] = pd.DataFrame(
                chunk_reader.whole(table).T, index=pd.Index(files, dtype=object), columns=var.index
            )
    return pd.concat(tables.values())


def _warn_of_zarrs(collection: DatasetCollection) -> None:
    """Warn if zarrs would read a collection from object storage."""
    for group in islice(collection, 1):  # all datasets are in one store
        cells: Any = group["X"]
        array = cells if isinstance(cells, Array) else cells["data"]
        if zarrs_checks.is_far_by_zarrs(array.async_array):
            warnings.warn(
                f"zarrs reads {array.store} slowly, with one request per chunk and few in parallel: at 30 ms per "
                "request, zarrs 0.2.3 took 25 times as long as zarr's own codecs. Before you open the collection, call "
                "zarr.config.set({'codec_pipeline.path': 'zarr.core.codec_pipeline.BatchedCodecPipeline'}).",
                UserWarning,
                stacklevel=3,
            )


def _number_dtype(dtype: str) -> np.dtype[Any]:
    """Return a dtype of numbers by its name; a TypeError for others."""
    try:
        result = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be the name of a dtype of NumPy, got {dtype!r}. Pass 'float32'.") from error
    if result.kind not in "iuf":
        raise TypeError(f"dtype must be of integers or floats, got {dtype!r}. Pass 'float32'.")
    return result


async def _converted(
    read: Coroutine[Any, Any, CSRContainer | npt.NDArray[Any]], dtype: np.dtype[Any]
) -> CSRContainer | npt.NDArray[Any]:
    """Return what is read, in a dtype."""
    return with_dtype(await read, dtype)


async def _returning[Value](value: Value) -> Value:
    """Return a value to callers that await it."""
    return value
