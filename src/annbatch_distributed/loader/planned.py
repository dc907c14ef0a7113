"""annbatch's Loader that knows which rank reads which of its cells, has read them, or will."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import checks
from annbatch_distributed.loader.checked import CheckedLoader
from annbatch_distributed.loader.inside import data_sets_of, described, obs_of, shapes_of
from annbatch_distributed.loader.sizing import sizes_for_batches
from annbatch_distributed.requests import LONGEST_HOLE
from annbatch_distributed.sampler import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    import anndata as ad
    import zarr
    from annbatch import DatasetCollection

    from annbatch_distributed.checks import Description, Gather, Timeout
    from annbatch_distributed.masks import AnyMask
    from annbatch_distributed.plan import EpochPlan
    from annbatch_distributed.ranks import Deferred, DistInfo, Membership
    from annbatch_distributed.replay import Steps

__all__ = ["PlannedLoader"]


class PlannedLoader(CheckedLoader):
    """annbatch's Loader, with checks, whose sampler is a DistributedSampler."""

    def __init__(self, *, batch_sampler: DistributedSampler, read_ahead: int, **kwargs: Any) -> None:  # noqa: ANN401 annbatch's own
        super().__init__(batch_sampler=batch_sampler, **kwargs)
        self._sampler = batch_sampler
        self._read_ahead = read_ahead

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

        Its sampler is a :class:`DistributedSampler` around annbatch's ``RandomSampler``. :func:`sizes` says how chunks
        and load requests are chosen; they are the same on any number of ranks.

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
            As for :class:`DistributedSampler`, :func:`sizes` and ``use_collection``.

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
        of_sampler = {name: options.pop(name) for name in {*signature(DistributedSampler).parameters} & {*options}}
        kind = RandomSampler if shuffle else SequentialSampler
        if not {"remainder", "enforce_equal_batches"} & {*of_sampler}:
            of_sampler["remainder"] = "exact"
        sizes = sizes_for_batches(
            collection,
            batch_size,
            mask=mask,
            memory=memory // (of_sampler.get("virtual_ranks") or 1),  # a rank may run all of them
            read_ahead=read_ahead,
            read_through=of_sampler.get("read_through", LONGEST_HOLE),
        )
        sampler = DistributedSampler(kind(*sizes), dist_info=dist_info, mask=mask, seed=seed, **of_sampler)
        options = {"preload_to_gpu": False} | options
        made = cls(batch_sampler=sampler, read_ahead=read_ahead, **options)
        return made.use_collection(collection, **({} if load_adata is None else {"load_adata": load_adata}))

    @property
    def batch_sampler(self) -> DistributedSampler:
        """The sampler."""
        return self._sampler

    @property
    def sampler(self) -> DistributedSampler:
        """The sampler, where frameworks look for something whose ``set_epoch`` they can call."""
        return self._sampler

    def _check_cells(self) -> None:
        """Raise if a state is of other data sets, or the mask was given for cells in another order."""
        self._sampler._job.check_data_sets(data_sets_of(self))
        self._sampler._job.check_names(self._cells)

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
        <EpochPlan of epoch 0: 2 ranks, 48 rows of 50, up to 6 batches each, 2 lost>
        """
        self._sampler._job.check_names(self._cells)
        plan = self._sampler.plan(self.n_obs)
        held = None if plan.rows_per_request is None else plan.rows_per_request * (1 + self._read_ahead)
        return replace(plan, rows_per_request=held, cells=self._cells)

    def cells_of(
        self,
        steps: Steps,
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
        (its name, None where the data set has no names) and those of ``obs``, in the order of the batches.

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
        bounds = np.cumsum([0, *(n_rows for n_rows, *_ in shapes_of(self))])
        numbers = np.searchsorted(bounds, cells["row"], side="right") - 1
        cells["data_set"], cells["cell"] = numbers, None
        obs, names = obs_of(self), self._cells
        wanted = [columns] if isinstance(columns, str) else columns
        parts = []
        for number in np.unique(numbers).tolist():
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
        return cells if not parts else cells.join(pd.concat(parts))

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks of the job have the same configuration, and as many rows of as many data sets in order.

        See :meth:`DistributedSampler.check_ranks_agree`, which knows the number of rows only.
        """
        checks.ranks_agree(self._sampler._job.agreeing, self._description, timeout=timeout, gather=gather)

    def _description(self, place: Membership) -> Description:
        """Return what this process says of its sampler and its data sets."""
        self._sampler._job.check_names(self._cells)
        return self._sampler._job.description(place, self.n_obs, described(self))
