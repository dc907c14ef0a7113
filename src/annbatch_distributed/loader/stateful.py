"""The StatefulLoader: annbatch's Loader that knows how far its consumer is.

A sampler can't know which batches were trained on: a loader takes one load request and yields many batches of it, which
are counted here. A batch is done when it is yielded, unless the loop calls ``step_done()`` after each step, or
Lightning's ``Trainer`` counts: a state that is saved within a step, by a signal or an error, then leads to its batch.

1. Cells that annbatch would read wrongly are refused when they are added.
2. One load request is read at a time, here or in a thread that prefetches. Collections on a local disk are read through
   zarrs in the thread that asks, see :mod:`zarrs_reader`.
3. The rows of each batch that was yielded are added up, for the check at the end of an epoch.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import replace
from functools import partial
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

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Gather, Read, Reading, Tally, Timeout
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
from annbatch_distributed.loader.prefetch import prefetch
from annbatch_distributed.loader.sizes import suggest_sizes
from annbatch_distributed.masks import AnyMask
from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.planner import StepSelection
from annbatch_distributed.ranks import Deferred, DistInfo, Placement
from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.rows import BOUND, integer
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.state import Position
from annbatch_distributed.stream import LONGEST_GAP, Pass, Request

if TYPE_CHECKING:
    import anndata as ad

    from annbatch_distributed.integrations.lightning import Training
    from annbatch_distributed.loader.workers import WorkerDataLoader


class StepCounter:
    """Numbers of batches of one pass: those that were yielded, and those that are done."""

    def __init__(self, training: Training | None = None, *, is_told: bool = False) -> None:
        self.n_yielded = 0
        self._training = training
        self._is_told, self._n_told = is_told, 0

    def next(self, training: Training | None) -> StepCounter:
        """Return the counter of the next pass: a loop that has called ``step_done()`` will do so again."""
        return StepCounter(training, is_told=self._is_told)

    def count(self) -> None:
        """Count a batch that is about to be yielded."""
        self.n_yielded += 1
        if self._training is not None:
            self._training.note_step()

    def done(self) -> None:
        """Note that the step of the batch that was yielded last is done."""
        self._is_told, self._n_told = True, self.n_yielded

    @property
    def is_training(self) -> bool:
        """True if Lightning counts the steps."""
        return self._training is not None

    @property
    def n_done(self) -> int:
        """Number of batches that are done."""
        if self._is_told:
            return self._n_told
        return self.n_yielded - (self._training is not None and self._training.is_within_step)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_training": None}  # a trainer stays in its process


class StatefulLoader(Loader[Any, Any]):
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
        self._read_ahead = integer("read_ahead", read_ahead, least=0, below=BOUND)
        # frameworks are set up for a single thread, so their arrays are made where batches are taken
        self._to_be = kwargs.pop("to", None) if read_ahead else None
        self._sampler = batch_sampler
        self._one_request = _OneRequest(batch_sampler)
        super().__init__(batch_sampler=self._one_request, **kwargs)
        if read_ahead and preloads_to_gpu(self):
            raise ValueError(
                f"read_ahead={read_ahead} reads in a thread, from which preload_to_gpu=True would use the GPU, "
                "while the training uses it as well. Pass preload_to_gpu=False, and move batches in the training step."
            )
        # names of cells of datasets that have no obs here, of which annbatch keeps nothing
        self._names: dict[int, pd.Index[Any]] = {}
        # the pass of this loader that was begun last, and the rows of its batches that were yielded
        self._pass: Pass | None = None
        self._read = Tally()
        self._steps = StepCounter()

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
        # options of the sampler are told from those of the loader by the names of its arguments
        of_sampler = {name: options.pop(name) for name in options.keys() & signature(DistributedSampler).parameters}
        kind = RandomSampler if shuffle else SequentialSampler
        if of_sampler.keys().isdisjoint({"remainder", "enforce_equal_batches"}):
            of_sampler["remainder"] = "exact"
        sizes = suggest_sizes(
            collection,
            mask=mask,
            memory=memory // (of_sampler.get("virtual_ranks") or 1),  # a rank may run all of them
            batch_size=batch_size,
            read_ahead=read_ahead,
            read_through=of_sampler.get("read_through", LONGEST_GAP),
        )
        sampler = DistributedSampler(kind(**sizes), dist_info=dist_info, mask=mask, seed=seed, **of_sampler)
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
        of_passes = vars(made).keys() - vars(Loader(preload_to_gpu=False)).keys() - {"_names"}
        take_data_of(loader, into=made, without=of_passes)
        return made

    @property
    def batch_sampler(self) -> DistributedSampler:
        """The sampler."""
        return self._sampler

    @property
    def sampler(self) -> DistributedSampler:
        """The sampler, where frameworks look for an object whose ``set_epoch`` they can call."""
        return self._sampler

    # Datasets

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

    def _check_cells(self) -> None:
        """Raise if a state is of other datasets, or the mask was made for cells in another order."""
        self._sampler.check_cells(self._cells, self._collection)

    # Epochs

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, on every rank: see :meth:`DistributedSampler.set_epoch`.

        Raises
        ------
        RuntimeError
            If accelerate calls it, for a ``DataLoader`` that it has prepared and would shard once more.
        """
        _check_not_dispatched()
        self._sampler.set_epoch(epoch)

    @property
    def next_epoch(self) -> int:
        """The epoch to resume or begin: see :attr:`DistributedSampler.next_epoch`."""
        return self._sampler.next_epoch

    def __len__(self) -> int:
        """Return how many batches the epoch has on this rank, those included that were done before a resume."""
        self._check_cells()
        return self._sampler.batches_done + self._sampler.n_batches(self.n_obs)

    def plan(self) -> EpochPlan:
        """Return every rank's rows and batches of the next pass: see :meth:`DistributedSampler.plan`.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0)
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, read_ahead=1)
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((50, 1))))
        >>> loader.plan()
        <EpochPlan of epoch 0: 2 ranks, 48 rows of 50, up to 6 batches each, 2 dropped>
        """
        self._sampler.check_cells(self._cells)
        plan = self._sampler.plan(self.n_obs)
        held = None if plan.rows_per_request is None else plan.rows_per_request * (1 + self._read_ahead)
        return replace(plan, rows_per_request=held, cells=self._cells)

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return which cells each rank has read in some steps of an epoch, or will read; nothing is read for it.

        Parameters
        ----------
        steps, ranks, epoch
            As for :meth:`DistributedSampler.rows_of`.
        columns
            Which columns of ``obs``; None for all that the loader has.

        Returns
        -------
        A table with the columns ``step``, ``rank``, ``row`` (of the collection), ``data_set`` (its number), ``cell``
        (its name, None where the data set has no names) and those of ``obs``, in the order of the batches. A column of
        ``obs`` that has one of these five names gets the suffix ``_obs``.

        Raises
        ------
        KeyError
            If the loader has no such column of ``obs``.
        IndexError, ValueError
            As for :meth:`DistributedSampler.rows_of`.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> import pandas as pd
        >>> from annbatch.samplers import SequentialSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        >>> obs = pd.DataFrame({"donor": [*"aabb"]}, index=[*"wxyz"])
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((4, 1)), obs=obs))
        >>> loader.cells_of(0, "donor")
           step  rank  row  data_set cell donor
        0     0     0    0         0    w     a
        1     0     0    1         0    x     a
        2     0     1    2         0    y     b
        3     0     1    3         0    z     b
        """
        self._check_cells()
        cells = self._sampler.rows_of(self.n_obs, steps, ranks, epoch)
        # datasets of 3 and 2 rows have the bounds 0 3 5: row 4 is in dataset 1, at place 1
        bounds = np.cumsum([0, *(n_rows for n_rows, *_ in shapes_of(self))])
        numbers = np.searchsorted(bounds, cells["row"], side="right") - 1
        cells["data_set"], cells["cell"] = numbers, None
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

    def __iter__(self) -> Generator[Any]:
        """Return the batches of a pass, which begins with the first: what is left of a resumed epoch, or else all.

        A loader has one pass at a time: to begin another ends the one before.

        Returns
        -------
        An iterator of batches as :class:`annbatch.Loader` yields them, with the key ``"repeated"`` under
        ``remainder="pad"``.

        Raises
        ------
        ValueError
            If the mask has the names of the cells in another order, or a state is of other datasets.
        RuntimeError
            If a worker of a ``DataLoader`` asks that :meth:`to_dataloader` hasn't made; or, while iterating, if another
            pass was begun since.
        """
        return self.iterate()

    def iterate(self, readers: Executor | None = None) -> Generator[Any]:
        """Return the batches of a pass, prefetched by threads that several loaders share, or by threads of its own."""
        if current_worker() is not None:
            raise RuntimeError(
                "A StatefulLoader can't be read by the workers of a DataLoader that it knows nothing of: its epoch and "
                "state would be lost. Make the DataLoader with loader.to_dataloader(num_workers=...)."
            )
        self._check_cells()
        return self._batches(readers)

    def batches_in_worker(self, position: Position) -> Generator[Any]:
        """Return this worker's part of the batches of a pass that the process of the rank has begun."""
        self._sampler.go_to(position)
        return self._batches_of(self._sampler.begin(self.n_obs, position, current_worker()))

    def _batches(self, readers: Executor | None) -> Generator[Any]:
        steps = self._begin_steps()
        # in this thread, which may be the only one that a framework tells its rank
        begun = self._sampler.begin(self.n_obs)
        with closing(self._batches_of(begun, readers)) as batches:
            for batch in batches:
                steps.count()  # before it is yielded: whoever saves a state has this batch
                if steps.n_yielded == begun.n_due:
                    self._sampler.end(begun)  # a consumer who knows the number doesn't ask for more
                yield batch
                del batch  # else it would be held until the next one is read
            self._sampler.end(begun)

    def _begin_steps(self) -> StepCounter:
        """Begin to count the steps of a pass, as a training that reads it has it."""
        # the room above this one, so it is imported here; it imports nothing of Lightning
        from annbatch_distributed.integrations.lightning import training_on

        training = training_on(self, self._sampler.framework_object)
        if training is not None:
            # overfit_batches reads the first batches again in every epoch, which are those of epoch 0
            if training.overfits and not self._sampler.batches_done:
                self._sampler.go_to(Position())
            training.check_all_are_read(len(self), self._sampler.batches_done)
        self._steps = self._steps.next(training)
        return self._steps

    def _batches_of(self, begun: Pass, readers: Executor | None = None) -> Generator[Any]:
        """Read the batches of a pass, in threads that prefetch if there are any."""
        self._pass, self._read = begun, Tally()
        # batches come out in the order of requests and splits, however many requests are prefetched
        due: deque[Callable[[Any], Any]] = deque()

        def requests() -> Iterator[Request]:
            """Yield load requests, and note how to finish each of their batches."""
            while True:
                try:
                    request = begun.take()
                except StopIteration:
                    return
                due.extend(partial(self._finish, request, split) for split in request.splits)
                yield request

        read = prefetch(requests(), self._read_request, self._read_ahead, readers)
        with iterated(self), closing(begun), closing(read) as batches:
            for batch in batches:
                yield due.popleft()(batch)
                del batch
                # the consumer has the other pass's batches by now, and would count these as its own
                self._sampler.check_is_last(begun)

    def _finish(self, request: Request, split: npt.NDArray[Any], batch: Any) -> Any:  # noqa: ANN401 annbatch's own
        """Return a batch that is about to be yielded, and add its rows to those that were read."""
        if self._to_be is not None:
            batch["X"] = convert(batch["X"], preload_to_gpu=False, to=self._to_be)
        self._read.add(request.rows_at(split) if batch["index"] is None else batch["index"])
        if self._measured is not None:
            batch = {**batch, "file": self._measured.index.get_indexer(batch["obs"]["src_path"].astype(object))}
        return batch if request.are_repeats is None else {**batch, "repeated": request.are_repeats[split]}

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

    def to_dataloader(self, *, num_workers: int = 0, **options: Any) -> WorkerDataLoader:  # noqa: ANN401 torch's own
        """Return a ``DataLoader`` of torch whose workers read the batches, with the epoch and the state in front.

        Lightning, accelerate and a plain loop find its ``set_epoch``, ``state_dict``, ``load_state_dict``, ``len()``
        and ``sampler``, which torch's own hides. Its state counts the batches that came out of the workers.

        Parameters
        ----------
        num_workers
            How many processes read for this rank; 0 reads in this one.
        options
            Further ones of torch's ``DataLoader``, but for those that would divide the rows once more. If not given,
            ``multiprocessing_context`` is ``"spawn"``, since threads of zarrs don't survive a fork, and
            ``persistent_workers`` is True. Spawned workers import the script, which therefore begins its work under
            ``if __name__ == "__main__":``.

        Raises
        ------
        TypeError
            If an option would divide the rows once more, or have batches come out of order.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0)
        >>> loader = StatefulLoader(
        ...     batch_sampler=sampler, return_index=True, preload_to_gpu=False
        ... )
        >>> loader = loader.add_adata(ad.AnnData(np.arange(48.0).reshape(48, 1)))
        >>> batches = loader.to_dataloader(num_workers=0)
        >>> batches.set_epoch(1)
        >>> taken = next(iter(batches))
        >>> batches.state_dict()["epoch"], batches.state_dict()["segments"]
        (1, [[2, 1, 1]])
        """
        from annbatch_distributed.loader.workers import WorkerDataLoader

        return WorkerDataLoader(self, num_workers=num_workers, **options)

    # States

    def step_done(self) -> None:
        """Say that the step of the batch that was yielded last is done.

        A batch counts as done when it is yielded, unless this is called after each step. A state that is saved within a
        step, by a signal's handler or after an error, then leads to the batch of that step.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0)
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((48, 1))))
        >>> for step, batch in enumerate(loader):
        ...     if step == 3:
        ...         break
        ...     loader.step_done()
        >>> loader.state_dict()["segments"]
        [[2, 1, 3]]
        """
        self._steps.done()

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return how far the epoch is: see :meth:`DistributedSampler.state_dict`.

        Parameters
        ----------
        batches_done
            Number of batches of this epoch that every rank has done. None takes the number that was yielded, or told by
            :meth:`step_done`.

        Raises
        ------
        RuntimeError
            If the pass that was begun last is not one of this loader, but one of its :meth:`to_dataloader`, whose
            ``state_dict()`` knows; or one of another loader with the same sampler.
        """
        if batches_done is not None:
            batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        elif (last := self._own_pass()) is not None:
            batches_done = last.done_after(self._steps.n_done)
        return self._sampler.state_at(batches_done, self._collection)

    def _own_pass(self) -> Pass | None:
        """Return the pass that was begun last, if this loader knows how far it is; None if none was begun."""
        last = self._sampler.last_pass
        if last is not None and last.is_by_workers:
            raise RuntimeError(
                "The workers of a DataLoader take the batches, so that it isn't known here which were trained on. Ask "
                "what loader.to_dataloader(num_workers=...) has returned: its state_dict() and check_epoch_read() know."
            )
        if last is not None and last is not self._pass:
            raise RuntimeError(
                "The pass that was begun last is not one of this loader, but of another loader with the same sampler, "
                "or of sampler.sample(...). Give each loader a sampler of its own."
            )
        return last

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume where a state was saved, on every rank: see :meth:`DistributedSampler.load_state_dict`.

        Add all datasets before, in the order that they had, so that a state that doesn't fit is refused here, and not
        when the next pass begins.
        """
        from annbatch_distributed.integrations.lightning import errors_explained

        with errors_explained(self._sampler.framework_object):
            self._sampler.resume(state, strict=strict, n_obs=self.n_obs or None, collection=self._collection)

    # Checks

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks of the job have the same configuration, and as many rows of as many data sets in order.

        See :meth:`DistributedSampler.check_ranks_agree`, which knows the number of rows only.
        """
        checks.ranks_agree(self._sampler.agreeing, self._description, timeout=timeout, gather=gather)

    def _description(self, place: Placement) -> Description:
        """Return what this process says of its sampler and its datasets."""
        self._sampler.check_cells(self._cells)
        return self._sampler.describe(place, self.n_obs, self._collection)

    def check_epoch_read(
        self, read: Read | None = None, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read in the last pass what was planned.

        See :meth:`DistributedSampler.check_epoch_read`.

        Parameters
        ----------
        read
            The rows of each batch that this process was given in the pass. None takes the rows of the batches that the
            loader has yielded: their ``"index"``, or without ``return_index=True`` what was asked of annbatch. They are
            known where the loader itself is iterated over. Where the workers of a ``DataLoader`` do so, what
            :meth:`to_dataloader` returns knows them.
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0)
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((48, 1))))
        >>> n_batches = sum(1 for _ in loader)
        >>> loader.check_epoch_read()
        'epoch 0: 1 rank has read 48 rows in 12 batches, as planned. Each of the 48 rows was read once'
        """
        reading = partial(self._reading, read=read)
        return checks.epoch_read(self._sampler.agreeing, reading, timeout=timeout, gather=gather)

    def _reading(self, place: Placement, read: Read | None = None) -> Reading:
        """Return what this process says of its last pass."""
        if read is None:
            read = self._read if self._own_pass() is not None else Tally()
        return self._sampler.reading(place, self.n_obs, read)

    def read_of_last_pass(self) -> tuple[Pass, Read]:
        """Return the pass that was begun last, and the rows of its batches that were yielded."""
        last = self._own_pass()
        assert last is not None
        return last, self._read


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


def _check_not_dispatched() -> None:
    """Raise a RuntimeError if accelerate calls, for a ``DataLoader`` that it has prepared.

    It would read an ``IterableDataset`` on rank 0 alone and cut up the batches, or read on every rank and keep a part
    of them. Rows would silently be missing. accelerate passes nothing that it could be known by, but for who calls.
    """
    # frame 0 is this function, 1 is set_epoch, 2 is who calls that
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != "accelerate.data_loader":
        return
    arrived = type(caller.f_locals.get("self")).__name__
    raise RuntimeError(
        "A StatefulLoader must be iterated over as it is: it reads this rank's shard of the rows. Here accelerate's "
        f"{arrived}, which comes from accelerator.prepare(DataLoader(loader)), is about to shard its batches once "
        "more, and rows would never be read. Leave the DataLoader out, and iterate over the StatefulLoader itself; "
        "prepare(loader) returns it unchanged."
    )
