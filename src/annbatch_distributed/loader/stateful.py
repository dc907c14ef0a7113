"""The StatefulLoader: annbatch's Loader whose epochs can be saved and resumed.

1. Cells that annbatch would read wrongly are refused when they are added.
2. annbatch's own Loader reads one load request at a time. Collections on a local disk are read through zarrs in the
   thread that asks, see :mod:`zarrs_reader`.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import zarr
from annbatch import DatasetCollection, Loader
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler, SequentialSampler
from annbatch.types import LoadRequest
from annbatch.utils import CSRContainer, convert
from anndata.io import read_elem
from zarr import Array, AsyncArray
from zarr.storage import LocalStore

from annbatch_distributed.loader import zarrs_reader
from annbatch_distributed.loader._annbatch import (
    arrays_in,
    batches_of,
    check_layout,
    collection_of,
    data_in,
    has_room_for_pointers,
    iterated,
    obs_of,
    options_of,
    preloads_to_gpu,
    shapes_of,
    stores_of,
    take_data_of,
)
from annbatch_distributed.loader.epochs import EpochLoader
from annbatch_distributed.loader.sizes import sizes_of_sets, stored, suggest_sizes
from annbatch_distributed.masks import AnyMask
from annbatch_distributed.ranks import Deferred, DistInfo
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.sets import Sets
from annbatch_distributed.stream import LONGEST_GAP, Marks, Request

if TYPE_CHECKING:
    import anndata as ad


class StatefulLoader(EpochLoader, Loader[Any, Any]):
    """An annbatch Loader that can be saved in the middle of an epoch, and resumed there.

    It takes the arguments of :class:`annbatch.Loader`. Its ``batch_sampler`` must be a :class:`DistributedSampler`;
    :meth:`from_collection` makes both.

    Under ``remainder="pad"``, a batch has the key ``"repeated"``: for each of its rows, whether some rank reads it for
    the second time in this epoch, as a boolean array.

    ``len()`` is the number of batches of the whole epoch, also while one is resumed, as Lightning and torch expect it;
    those that are left are ``loader.sampler.n_batches(loader.n_obs)``.

    Parameters
    ----------
    batch_sampler
        Which rows this rank reads.
    read_ahead
        How many load requests are read at once, each in a thread, while the batches of another one are trained on, and
        so are held beside it. 1 hides reading behind a training that takes about as long; more hide the latency of
        object storage. 0 reads where a batch is asked for, as annbatch does. Batches, states and errors are the same.
    measured
        Whether each batch of a collection that ``annbatch-distributed collect`` has written says in ``"file"`` which
        file each of its cells is of, as the number of a line of :attr:`measured`.
    kwargs
        Those of :class:`annbatch.Loader`.

    Raises
    ------
    TypeError
        If ``batch_sampler`` is no :class:`DistributedSampler`, or ``read_ahead`` no integer.
    ValueError
        If ``read_ahead`` is negative, or more than 0 with ``preload_to_gpu=True``, as its threads would use the device.

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
    >>> whole = [batch["index"].tolist() for batch in loader]
    >>> loader.set_epoch(0)
    >>> batches = iter(loader)
    >>> trained_on = [next(batches)["index"].tolist() for _ in range(3)]
    >>> state = loader.state_dict()
    >>> after_a_restart = make_loader()
    >>> after_a_restart.load_state_dict(state)
    >>> trained_on + [batch["index"].tolist() for batch in after_a_restart] == whole
    True
    """

    def __init__(
        self,
        *,
        batch_sampler: DistributedSampler,
        read_ahead: int = 0,
        measured: bool = False,
        **kwargs: Any,  # noqa: ANN401 annbatch's own
    ) -> None:
        if not isinstance(batch_sampler, DistributedSampler):
            raise TypeError(
                f"StatefulLoader needs a DistributedSampler as its batch_sampler, got {batch_sampler!r}. In a single "
                "process, wrap it: DistributedSampler(sampler, dist_info=Rank(0, 1), seed=...)."
            )
        if kwargs.get("to") not in (None, "torch", "jax"):
            raise ValueError(f"to must be 'torch', 'jax', or None for arrays of numpy and scipy, got {kwargs['to']!r}.")
        self._options = {"read_ahead": read_ahead, "measured": measured, **kwargs}
        self._tells_files = measured
        self._measured: pd.DataFrame | None = None
        # frameworks are set up for a single thread, so their arrays are made where batches are taken
        self._to_be = kwargs.pop("to", None) if read_ahead else None
        EpochLoader.__init__(self, batch_sampler, read_ahead)
        self._one_request = _OneRequest(batch_sampler)
        Loader.__init__(self, batch_sampler=self._one_request, **kwargs)
        if read_ahead and preloads_to_gpu(self):
            raise ValueError(
                f"read_ahead={read_ahead} reads in a thread, from which preload_to_gpu=True would use the GPU, "
                "while the training uses it as well. Pass preload_to_gpu=False, and move batches in the training step."
            )
        # names of cells of datasets that have no obs here, of which annbatch keeps nothing
        self._names: dict[int, pd.Index[Any]] = {}

    @classmethod
    def from_collection(
        cls,
        collection: DatasetCollection,
        *,
        dist_info: DistInfo | Deferred,
        batch_size: int = 256,
        mask: AnyMask | None = None,
        seed: int = 0,
        shuffle: bool = True,
        sets: Sets | None = None,
        memory: int = 1 << 30,
        read_ahead: int = 1,
        load_adata: Callable[[zarr.Group], ad.AnnData] | None = None,
        **options: Any,  # noqa: ANN401 those of DistributedSampler and annbatch's own
    ) -> Self:
        """Make one that reads a collection, each cell once in an epoch, with sizes that fit into memory.

        Its sampler is a :class:`DistributedSampler` around annbatch's ``RandomSampler``. :func:`suggest_sizes`
        chooses chunks and load requests, the same on any number of ranks.

        Parameters
        ----------
        collection
            What annbatch has written.
        dist_info
            Where rank and world size come from, as for :class:`DistributedSampler`: ``"torch"``, say.
        batch_size
            Rows of a batch on each rank.
        mask
            Which cells the ranks share out, as for :class:`DistributedSampler`: a boolean Series, say.
        seed
            Of the order; the same on every rank.
        shuffle
            Whether each epoch has an order of its own; False keeps that of the collection, with ``SequentialSampler``.
        sets
            Sets of cells to read in place of cells; ``batch_size`` is then a number of sets. Unless ``sharding`` is
            given, they are dealt to the ranks again in each epoch (``"shuffled"``).
        memory
            How many bytes the loader may take on each rank, where it reads ``X`` of the collection; pass less if
            ``load_adata`` loads larger values.
        read_ahead
            How many load requests are read while others are trained on.
        load_adata
            What is loaded of each data set, as for ``use_collection`` of :class:`annbatch.Loader`.
        options
            Others of :class:`DistributedSampler` and :class:`annbatch.Loader`. If not given, ``remainder`` is
            ``"exact"``, whose batches can be smaller (pass ``"drop"`` where each step needs batches of one size, as
            compiled ones do), and ``preload_to_gpu`` is False.

        Raises
        ------
        TypeError, ValueError
            As for :class:`DistributedSampler`, :func:`suggest_sizes` and ``use_collection``.

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
        >>> collection = DatasetCollection(folder / "cells.zarr")
        >>> collection = collection.add_adatas([folder / "cells.h5ad"])
        >>> loader = StatefulLoader.from_collection(
        ...     collection, dist_info=Rank(0, 2), batch_size=128, seed=0
        ... )
        >>> [len(batch["X"]) for batch in loader]
        [128, 128, 128, 116]
        """
        sampler = sampler_for(
            [collection],
            options,
            dist_info=dist_info,
            batch_size=batch_size,
            mask=mask,
            seed=seed,
            shuffle=shuffle,
            sets=sets,
            memory=memory,
            read_ahead=read_ahead,
        )
        made = cls(batch_sampler=sampler, read_ahead=read_ahead, **{"preload_to_gpu": False} | options)
        made.use_collection(collection, **({} if load_adata is None else {"load_adata": load_adata}))
        made._check_cells()  # a mask whose names are in another order, say
        return made

    @classmethod
    def from_loader(
        cls,
        loader: Loader[Any, Any],
        *,
        batch_sampler: DistributedSampler | None = None,
        **options: Any,  # noqa: ANN401 annbatch's own, too
    ) -> Self:
        """Make one of an annbatch ``Loader`` that has its data sets already.

        Nothing is opened or copied. Data sets that are added to one of them later on are not added to the other.

        Parameters
        ----------
        loader
            Any :class:`annbatch.Loader`, or a :class:`StatefulLoader`.
        batch_sampler
            Which rows this rank reads. None takes the sampler of ``loader``.
        options
            Other arguments of :class:`StatefulLoader`, such as ``read_ahead``. Those that aren't given are as in
            ``loader``.

        Raises
        ------
        TypeError
            If ``loader`` is no loader, or a subclass, whose methods would be lost; or as :class:`StatefulLoader` does.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch import Loader
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> loader = Loader(batch_size=4, chunk_size=4, preload_nchunks=2, preload_to_gpu=False)
        >>> loader = loader.add_adata(ad.AnnData(np.arange(48.0).reshape(48, 1)))
        >>> sampler = DistributedSampler(loader.batch_sampler, dist_info=Rank(1, 2), seed=0)
        >>> rank_1 = StatefulLoader.from_loader(
        ...     loader, batch_sampler=sampler, return_index=True
        ... )
        >>> next(iter(rank_1))["index"].tolist()
        [24, 25, 26, 27]
        """
        if type(loader) not in {Loader, StatefulLoader, cls}:
            raise TypeError(
                f"from_loader takes an annbatch Loader, got {loader!r} of type {type(loader).__name__}, whose methods "
                "would be lost: make that a subclass of StatefulLoader instead."
            )
        sampler = loader.batch_sampler if batch_sampler is None else batch_sampler
        if not isinstance(sampler, DistributedSampler):
            raise TypeError(
                f"from_loader needs a DistributedSampler, got {sampler!r}. Wrap the sampler of the loader: "
                "from_loader(loader, batch_sampler=DistributedSampler(loader.batch_sampler, dist_info=...))."
            )
        options_of_loader = loader._options if isinstance(loader, StatefulLoader) else options_of(loader)
        made = cls(batch_sampler=sampler, **options_of_loader | options)
        made._check_layouts(data_in(loader))
        # attributes that only this class has are those of passes, not of datasets
        of_passes = vars(made).keys() - vars(Loader(preload_to_gpu=False)).keys() - {"_names", "_measured"}
        take_data_of(loader, into=made, without=of_passes)
        return made

    # Datasets

    @property
    def n_obs(self) -> int:
        """Number of cells of the collection, over all ranks."""
        return super(EpochLoader, self).n_obs

    @property
    def n_var(self) -> int:
        """Number of genes."""
        return super(EpochLoader, self).n_var

    def use_collection(self, collection: DatasetCollection, **options: Any) -> Self:  # noqa: ANN401 annbatch's own
        """Read a collection, as ``use_collection`` of :class:`annbatch.Loader` does.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`add_adatas`, or as annbatch raises them.
        RuntimeError
            If the process was forked after zarrs had begun to read, and would wait for ever: see :doc:`/workers`.
        """
        zarrs_reader.check_zarrs_answers(lambda: "zarrs" in zarr.config.get("codec_pipeline.path"))
        # before anything is loaded: to load cells by columns as rows may fail with another error
        if "load_adata" not in options:
            self._check_layouts(group["X"] for group in collection)
        for group in collection:
            _in_place(group)
        _warn_of_zarrs(collection)
        super().use_collection(collection, **options)
        if self._tells_files:
            self._measured = _measured_in(collection)
            if any("src_path" not in obs for obs in obs_of(self)) or not obs_of(self):
                raise ValueError("measured=True needs the column src_path of obs, which load_adata leaves out.")
        return self

    @property
    def measured(self) -> pd.DataFrame:
        """Which genes each file of the collection has: a line for each file, a column for each gene, of booleans.

        ``loader.measured.to_numpy()[batch["file"]]`` is a mask for the values of a batch: a gene that a file doesn't
        have is 0 in all of its cells, which a loss should leave out.

        Raises
        ------
        ValueError
            If the loader wasn't made with ``measured=True``, or has no collection yet.
        """
        if self._measured is None:
            raise ValueError("Make the loader with measured=True, and of a collection, to know which genes files have.")
        return self._measured

    def add_adatas(self, adatas: list[ad.AnnData]) -> Self:
        """Add data sets, as ``add_adatas`` of :class:`annbatch.Loader` does.

        Raises
        ------
        TypeError
            If the cells of one lie column by column, as a CSC matrix does; or as annbatch raises it.
        ValueError
            If the cells of one lie in chunks that don't have all columns of their rows, which annbatch reads wrongly;
            or as annbatch raises it.
        """
        first = len(shapes_of(self))
        self._check_layouts(adata.X for adata in adatas)
        for adata in adatas:
            _in_place(adata.X)
        super().add_adatas(adatas)
        self._names |= {number: adata.obs_names for number, adata in enumerate(adatas, first)}
        return self

    def add_adata(self, adata: ad.AnnData) -> Self:
        """Add a data set: see :meth:`add_adatas`."""
        return self.add_adatas([adata])

    def add_datasets(self, datasets: list[Any], obs: Any = None, var: Any = None) -> Self:  # noqa: ANN401 annbatch's own
        """Add data sets without annotations, or with them, as ``add_datasets`` of :class:`annbatch.Loader` does.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`add_adatas`.
        """
        self._check_layouts(datasets)
        return super().add_datasets(list(map(_in_place, datasets)), obs, var)

    def add_dataset(self, dataset: Any, obs: Any = None, var: Any = None) -> Self:  # noqa: ANN401 annbatch's own
        """Add a data set: see :meth:`add_datasets`."""
        self._check_layouts([dataset])
        return super().add_dataset(_in_place(dataset), obs, var)

    def _check_layouts(self, data: Iterable[object]) -> None:
        """Raise if some data can't be read by rows, before any of it is added."""
        for number, cells in enumerate(data, len(shapes_of(self))):
            check_layout(cells, f"X of data set {number}")

    @property
    def _cells(self) -> tuple[pd.Index[Any], ...] | None:
        """The names of the cells of each dataset; None if they aren't known of all."""
        known = self._names | {number: obs.index for number, obs in enumerate(obs_of(self))}
        numbers = range(len(shapes_of(self)))
        return tuple(known[number] for number in numbers) if known.keys() >= {*numbers} else None

    @property
    def _collection(self) -> dict[str, Any]:
        """What tells the cells of this loader from others."""
        return collection_of(self, self._cells)

    def _annotated(self, cells: pd.DataFrame, columns: str | Sequence[str] | None) -> pd.DataFrame:
        """Return a table of rows with the dataset and the name of each cell, and its columns of ``obs``."""
        # datasets of 3 and 2 rows have the bounds 0 3 5: row 4 is in dataset 1, at place 1
        bounds = np.cumsum([0, *(n_rows for n_rows, *_ in shapes_of(self))])
        numbers = np.searchsorted(bounds, cells["row"], side="right") - 1
        cells["dataset"], cells["cell"] = numbers, None
        obs, names = obs_of(self), self._cells
        wanted = [columns] if isinstance(columns, str) else columns
        parts = []
        for number in np.unique(numbers).tolist():
            # lines of the table whose cells are of this dataset, and the cells' places in it: the bounds 0 3 5 and the
            # rows 4 0 3 give dataset 1 the lines 0 2 and the places 1 0
            here = np.flatnonzero(numbers == number)
            places = cells["row"].to_numpy()[here] - bounds[number]
            if names is not None:
                cells.loc[here, "cell"] = np.asarray(names[number], dtype=object)[places]
            own = obs[number] if obs else pd.DataFrame(index=range(bounds[number + 1] - bounds[number]))
            if missing := [name for name in wanted or () if name not in own]:
                raise KeyError(
                    f"The loader has no columns {', '.join(missing)} of obs in data set {number}, which has "
                    f"{', '.join(map(str, own.columns)) or 'none'}. use_collection(load_adata=...) says what is loaded."
                )
            parts.append((own if wanted is None else own[list(wanted)]).iloc[places].set_index(here))
        if not parts:
            return cells
        return cells.join(pd.concat(parts).rename(columns={name: f"{name}_obs" for name in cells}))

    # Reading

    def rows_in(self, batch: object) -> npt.NDArray[Any] | None:
        """Return the rows of a batch, if it has them."""
        return batch.get("index") if isinstance(batch, dict) else None

    def _iterated(self) -> AbstractContextManager[None]:
        return iterated(self)

    def preloads_to_gpu(self) -> bool:
        """Return True if batches are moved to a GPU where they are read."""
        return preloads_to_gpu(self)

    def _finish(self, batch: Any, marks: Marks) -> Any:  # noqa: ANN401 annbatch's own
        if self._to_be is not None:
            batch["X"] = convert(batch["X"], preload_to_gpu=False, to=self._to_be)
        if self._measured is not None:
            batch = {**batch, "file": self._measured.index.get_indexer(batch["obs"]["src_path"].astype(object))}
        return {**batch, **marks} if marks else batch

    def _read_request(self, request: Request) -> Generator[Any]:
        """Read a load request as annbatch does."""
        # in a pass of its own: annbatch keeps what it has read until it has read the next one
        self._one_request.requests[threading.get_ident()] = request
        try:
            yield from batches_of(self)
        except Exception as error:
            if stores := stores_of(self):
                error.add_note(
                    f"A load request was being read from {stores}, and none of its batches was yielded: the state of "
                    "the loader leads to them."
                )
            raise

    def _index_datasets(self, dataset_index_to_rows: Any) -> Coroutine[Any, Any, Any]:  # noqa: ANN401 annbatch's own
        """Read what a load request asks for: here, if zarrs has it on a local disk, or as annbatch does.

        annbatch gives what this returns to zarr's thread, in which nothing else could be read meanwhile.
        """
        zarrs_reader.check_zarrs_answers(lambda: any(map(zarrs_reader.is_by_zarrs, arrays_in(self))))
        # None if zarrs can't read these datasets: annbatch reads them then
        rows = zarrs_reader.read(self, dataset_index_to_rows)
        return super()._index_datasets(dataset_index_to_rows) if rows is None else _returning(rows)

    def _allocate_out(self, dataset_index_to_rows: Any) -> CSRContainer | npt.NDArray[Any]:  # noqa: ANN401 annbatch's own
        return has_room_for_pointers(super()._allocate_out(dataset_index_to_rows))

    def _allocate_per_dataset_outs(self, dataset_index_to_rows: Any) -> Any:  # noqa: ANN401 annbatch's own
        outs = super()._allocate_per_dataset_outs(dataset_index_to_rows)
        return OrderedDict((number, has_room_for_pointers(out)) for number, out in outs.items())


def sampler_for(
    collections: Sequence[DatasetCollection],
    options: dict[str, Any],
    *,
    dist_info: DistInfo | Deferred,
    batch_size: int,
    mask: AnyMask | None,
    seed: int,
    shuffle: bool,
    sets: Sets | None = None,
    memory: int,
    read_ahead: int,
) -> DistributedSampler:
    """Return a sampler of collections of the same cells, with sizes that fit into memory.

    It removes the sampler's arguments from ``options``, by their names, and leaves the loader's.
    """
    own = {name: options.pop(name) for name in options.keys() & signature(DistributedSampler).parameters}
    if own.keys().isdisjoint({"remainder", "enforce_equal_batches"}):
        own["remainder"] = "exact"
    n_rows, row_bytes, chunks = zip(*map(stored, collections), strict=True)
    memory //= own.get("virtual_ranks") or 1  # a rank may run all of them
    read_through = own.get("read_through", LONGEST_GAP)
    kind = RandomSampler if shuffle else SequentialSampler
    limits = {"memory": memory, "batch_size": batch_size, "read_ahead": read_ahead, "read_through": read_through}
    if sets is None:
        sizes = suggest_sizes(n_rows[0], row_bytes=sum(row_bytes), store_chunk=max(chunks), mask=mask, **limits)
    else:
        own = {"sharding": "shuffled" if shuffle else "contiguous", "sets": sets} | own
        sizes = sizes_of_sets(Sets.checked(sets), seed, row_bytes=sum(row_bytes), **limits)
    return DistributedSampler(kind(**sizes), dist_info=dist_info, mask=mask, seed=seed, **own)


class _OneRequest(Sampler):
    """A sampler for annbatch, whose passes have one load request each: the door to annbatch's own Loader."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        #: For each thread, by its id, the load request of the pass that it is about to begin.
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

    def sample(self, n_obs: int) -> Iterator[LoadRequest]:  # noqa: ARG002 the request was made for them
        # threads that prefetch read at the same time, each a request of its own
        request = self.requests.pop(threading.get_ident())
        return iter([{"requests": request.rows(), "splits": list(request.splits)}])

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sample(n_obs)


def _in_place(data: Any) -> Any:  # noqa: ANN401 whatever annbatch takes
    """Return data whose relative path leads to where it leads now, also once the process goes to another folder."""
    # of zarr's arrays and groups, and of anndata's sparse datasets, which hold a group
    place = getattr(getattr(data, "group", data), "store_path", None)
    if place is None or not isinstance(place.store, LocalStore):
        return data
    place.store.root = place.store.root.absolute()
    if not isinstance(data, Array) or not zarrs_reader.is_by_zarrs(data.async_array):
        return data
    # zarrs has the path of when the array was opened
    return Array(AsyncArray(metadata=data.metadata, store_path=place, config=data.async_array.config))


def _measured_in(collection: DatasetCollection) -> pd.DataFrame:
    """Return which genes each file of a collection has."""
    group: Any = next(iter(collection))
    if "varm/measured" not in group:
        raise ValueError(
            "measured=True needs a collection with a table of which genes each file has, which annbatch-distributed "
            "collect writes. Run collect on the files again, or leave measured out."
        )
    var: Any = read_elem(group["var"])
    # (genes, files) on disk, as all that is in varm
    table = group["varm/measured"]
    return pd.DataFrame(table[:].T, index=pd.Index(table.attrs["files"], dtype=object), columns=var.index)


def _warn_of_zarrs(collection: DatasetCollection) -> None:
    """Warn of a collection that zarrs would read from object storage."""
    for group in collection:
        cells: Any = group["X"]
        array = cells if isinstance(cells, Array) else cells["data"]
        if zarrs_reader.is_far_by_zarrs(array.async_array):
            warnings.warn(
                f"zarrs reads {array.store} one chunk a request, few at once: zarrs 0.2.3 took 25 times as long as "
                "zarr's own codecs where a request took 30 ms. Have these read, before the collection is opened: "
                "zarr.config.set({'codec_pipeline.path': 'zarr.core.codec_pipeline.BatchedCodecPipeline'}).",
                UserWarning,
                stacklevel=3,
            )
            return


async def _returning[Value](value: Value) -> Value:
    """Return a value that is there, to callers that await it."""
    return value
