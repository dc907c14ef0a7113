"""The DistributedSampler: shards the rows of any annbatch sampler across the ranks of a job.

A sampler is one rank's side of a job: its arguments, and a :class:`Cursor`, which knows where the rank is. Loaders and
checks of this package use the cursor, see :func:`cursor_of`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Self

import annbatch.samplers
import numpy as np
from annbatch.abc import Sampler
from annbatch.types import LoadRequest

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Gather, Read, Reading, Timeout
from annbatch_distributed.core.config import Config, ShardingName, check_wrapped
from annbatch_distributed.core.epochs import Epochs, StepSelection
from annbatch_distributed.core.lanes import Remainder
from annbatch_distributed.core.masks import ALL, AnyMask
from annbatch_distributed.core.rank import MOST_RANKS
from annbatch_distributed.core.request import MAX_GAP
from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.sharding import Sharding
from annbatch_distributed.core.units import EachRow, Units
from annbatch_distributed.core.values import BOUND, integer, names_of
from annbatch_distributed.core.warning import warn
from annbatch_distributed.cursor import Cursor
from annbatch_distributed.ranks import DistInfo, RankSource
from annbatch_distributed.reports import EpochPlan
from annbatch_distributed.sets import CellSets
from annbatch_distributed.weights import Weights, check_sampler

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd


class DistributedSampler(Sampler):
    """Shard an annbatch sampler across the ranks of a distributed job.

    The rows that the mask selects are partitioned into one shard per rank. A private copy of the wrapped sampler runs
    on this rank's shard, with its own random generator. Ranks don't communicate: each computes the same plan.

    Examples
    --------
    >>> import numpy as np
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler
    >>> sampler = RandomSampler(
    ...     chunk_size=64, preload_nchunks=32, batch_size=256, mask=slice(0, 16_000)
    ... )
    >>> ranks = [
    ...     DistributedSampler(sampler, dist_info=lambda rank=rank: (rank, 2))
    ...     for rank in range(2)
    ... ]
    >>> [rank.n_batches(20_000) for rank in ranks]
    [31, 31]
    >>> print(ranks[0].plan(20_000))
    epoch 0: 2 ranks share 16,000 of 20,000 rows (remainder="drop", batch size 256)
    rank  batches  rows  repeated  global rows
       0       31  7936         0  0:7936
       1       31  7936         0  7936:15872
    dropped in this epoch: 128 rows, 0.8% (15872:16000)
    to drop none: remainder="exact"
    in memory: up to 2,048 rows on each rank

    Parameters
    ----------
    sampler
        Any :class:`annbatch.abc.Sampler` except another ``DistributedSampler``. It is copied and never modified, so
        later changes to it have no effect. Arrays of 1 MiB or more that it holds are shared with the copy: don't write
        into them.
    dist_info
        Source of the rank and the world size:

        - ``"torch"`` or ``"jax"``: the framework, which must be initialized;
        - ``"env"``: the variables set by torchrun, Open MPI, MPICH, Intel MPI or Slurm's ``srun``;
        - a :class:`Rank`, or a callable that returns ``(rank, world_size)``;
        - a PyTorch ``ProcessGroup``, or a ``DeviceMesh`` of one dimension;
        - the result of :meth:`Rank.from_mesh`, for any mesh;
        - Lightning's ``Trainer`` or ``Fabric``, Accelerate's ``Accelerator`` or ``PartialState``, or Ray Train's
          context.

        Wrap a name or a callable in :func:`deferred` to query it only when the rank is first needed, as the objects of
        frameworks are.
    enforce_equal_batches
        True (default) means ``remainder="drop"``, False means ``remainder="keep"``, which drops no row. (annbatch's
        False drops up to ``world_size - 1`` rows.)
    remainder
        Policy for the rows that don't divide evenly among ranks and batches. None (default) follows
        ``enforce_equal_batches``.

        ``"drop"``
            Every rank has the same number of full batches. Remaining rows are dropped in this epoch. Different rows are
            dropped in the next one, so any two consecutive epochs together read every row. (Under class samplers, which
            need whole runs of a class, the last rows are dropped in every epoch.)
        ``"keep"``
            Every row is read once, and the numbers of batches may differ by one between ranks. Use it for evaluation
            without a collective in each step.
        ``"exact"``
            Every row is read once, and every rank has the same number of batches. A rank that would be one batch short
            splits one of its last batches in two; if they have one row, every rank raises.
        ``"pad"``
            Every rank has the same number of full batches. Some rows are repeated; the key ``repeated`` of a load
            request marks them.
    sharding
        Assignment of rows to ranks:

        - ``"contiguous"`` (default): a contiguous range of rows per rank, the same in every epoch;
        - ``"shuffled"`` or :class:`Shuffled`: blocks of rows, which are reassigned to ranks in every epoch. It needs a
          ``seed``;
        - ``"independent"``: every rank samples from all rows. It is for samplers with replacement;
        - a function ``order(rows, *, epoch, seed)`` that returns the same :class:`Rows` in a different order, which is
          then cut into a contiguous range per rank.
    mask
        Rows to read, by position: a slice, a list of slices, a boolean array or pandas Series of shape ``(n_obs,)``, an
        integer array of row indices in any order, or :class:`Rows`. It must lie within the wrapped sampler's own mask;
        None (default) uses all of that mask. :class:`StatefulLoader` compares the index of a boolean Series with its
        ``obs_names``.
    seed
        Seed of the order, within ``[0, 2**63)``. None (default) derives it from the wrapped sampler's generator. It
        must be the same on every rank under ``"shuffled"``.
    virtual_ranks
        Number of virtual ranks, a multiple of the world size. The rows are sharded across virtual ranks, and each rank
        runs an equal number of them and joins their batches. A step over all ranks therefore has the same rows on any
        number of ranks. ``batch_size`` and ``num_samples`` of the wrapped sampler count per virtual rank, as does
        everything on this page that counts per rank. None (default) shards across the ranks themselves.
    max_gap
        Largest gap, in rows, that is read and discarded instead of starting a new read (default 64). Larger values
        start fewer reads and use more memory; 0 reads only rows of batches.
    sets
        Sets of cells to sample instead of single cells. ``batch_size``, ``chunk_size`` and similar arguments of the
        wrapped sampler then count sets, as does everything on this page that counts rows. To select cells, use the mask
        of :meth:`CellSets.from_obs`. None (default) samples cells.
    weights
        Weight of each cell: numbers of at least 0, of shape ``(n_obs,)``. Each epoch draws ``num_samples`` cells in
        proportion to their weights, by systematic sampling: a cell of weight ``w`` comes ``num_samples * w / total``
        times, rounded up or down, and on average exactly as often. The wrapped sampler then samples draws, and
        everything on this page that counts rows counts draws, except ``mask``. The index of a Series is compared with
        ``obs_names``, as for a mask. Don't write into the array afterwards. It needs a ``seed``. None (default)
        reads each cell once.
    num_samples
        Number of draws of an epoch, over all ranks. None (default) takes the number of selected cells with a weight
        above 0.
    rounds
        Number of rounds over all cells in an epoch, for weights (default 1). Copies of a cell are consecutive draws of
        a round; with more rounds, they are farther apart in the epoch, and cells are rounded in each round.

    Raises
    ------
    TypeError
        If ``sampler`` is not an annbatch sampler, or an argument has the wrong type.
    ValueError
        If an argument has an invalid value, or arguments are incompatible: for example, the wrapped sampler has no
        batch size but ``remainder`` requires equal numbers of batches, or it can't run under this sharding.
    RuntimeError
        If the framework that ``dist_info`` names is not initialized, or no launcher has set its variables.

    Notes
    -----
    The rows of a rank depend only on the arguments, ``n_obs`` and the epoch, never on earlier calls. Each epoch reads
    them in a new order if the sampler shuffles; ``set_epoch(e)`` always restores the order of epoch ``e``.

    Unless the sharding is ``"independent"``, ``num_samples`` of the wrapped sampler counts per rank, class samplers
    sample from the rank's own shard, and ``drop_last`` drops rows of the rank, as in annbatch. With replacement, each
    rank samples exactly ``num_samples`` rows: if that is not a multiple of the batch size, the last batch is smaller
    under every policy. Without replacement, annbatch fills the last batch.

    How 9 rows are divided among 2 ranks with a batch size of 2 (repeated rows in brackets)::

        remainder  rank 0              rank 1              batches
        "drop"     0 1 | 2 3           4 5 | 6 7           2 and 2; row 8 is dropped
        "keep"     0 1 | 2 3           4 5 | 6 7 | 8       2 and 3
        "exact"    0 1 | 2 | 3         4 5 | 6 7 | 8       3 and 3
        "pad"      0 1 | 2 3 | [4 5]   4 5 | 6 7 | 8 [0]   3 and 3, all full
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        dist_info: DistInfo,
        enforce_equal_batches: bool = True,
        remainder: Remainder | None = None,
        sharding: ShardingName | Sharding = "contiguous",
        mask: AnyMask | None = None,
        seed: int | None = None,
        virtual_ranks: int | None = None,
        max_gap: int = MAX_GAP,
        sets: CellSets | None = None,
        weights: npt.ArrayLike | pd.Series[Any] | None = None,
        num_samples: int | None = None,
        rounds: int = 1,
    ) -> None:
        for warning in check_wrapped(sampler, DistributedSampler):
            warn(warning)
        units: Units = EachRow() if sets is None else CellSets.checked(sets)
        if weights is not None:
            if sets is not None:
                raise ValueError("weights can't be combined with sets. Leave out one of them.")
            check_sampler(sampler)
            units = Weights.of(weights, num_samples, rounds)
        elif num_samples is not None or rounds != 1:
            raise ValueError(
                f"num_samples and rounds are for weights, got num_samples={num_samples!r} and rounds={rounds!r} "
                "without weights. Pass weights=..., or leave them out."
            )
        config = Config.of(
            sampler,
            remainder=remainder,
            enforce_equal_batches=enforce_equal_batches,
            sharding=sharding,
            mask=mask,
            seed=seed,
            units=units.without_names(),
        )
        max_gap = integer("max_gap", max_gap, least=0, below=BOUND)
        if virtual_ranks is not None:
            virtual_ranks = integer("virtual_ranks", virtual_ranks, least=1, below=MOST_RANKS + 1)
        source = RankSource.of(dist_info)
        epochs = Epochs(config, source, virtual_ranks=virtual_ranks, max_gap=max_gap)
        if source.is_known:
            _ = epochs.own_lanes  # raises if this number of ranks can't run them
        self._cursor = Cursor(epochs, source)
        self._cursor.note_names("weights" if sets is None else "obs", units.names)
        self._cursor.note_names("mask", _names_of_mask(config, mask))

    @property
    def _epochs(self) -> Epochs:
        return self._cursor.epochs

    @property
    def _config(self) -> Config:
        return self._cursor.epochs.config

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._epochs.placement.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self._epochs.placement.world_size

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a full batch of this rank.

        With virtual ranks, it is the sum over the virtual ranks that this rank runs. It is None if the wrapped sampler
        has no batch size.
        """
        size = self._config.batch_size
        if size is None or self.virtual_ranks is None:  # a deferred rank may not be known yet
            return size
        return size * len(self._epochs.own_lanes)

    @property
    def virtual_ranks(self) -> int | None:
        """Number of virtual ranks; None if they are not used."""
        return self._epochs.virtual_ranks

    @property
    def remainder(self) -> Remainder:
        """Policy for the rows that don't divide evenly."""
        return self._config.remainder

    @property
    def shuffle(self) -> bool:
        """True if the wrapped sampler shuffles."""
        return self._config.sampler.shuffle

    @property  # type: ignore[override]  # annbatch's samplers know single slices only
    def mask(self) -> slice | list[slice] | Rows:
        """Rows that are sharded.

        The value is a slice, a list of slices in ascending order, or :class:`Rows`. A new mask can have any form that
        the argument ``mask`` accepts; ``slice(0, None)`` stands for all rows of the wrapped sampler's own mask. It
        takes effect with the next iteration, which reads all of its rows. An equal mask changes nothing.
        """
        return self._config.mask.to_argument()

    @mask.setter
    def mask(self, value: AnyMask | None) -> None:
        if sys._getframe(1).f_globals.get("__name__") == annbatch.samplers.DistributedSampler.__module__:
            raise ValueError(
                "An annbatch.samplers.DistributedSampler must not wrap a DistributedSampler of annbatch_distributed: "
                "the rows are sharded already, and most would never be read. Pass the inner sampler to the loader."
            )
        self._cursor.reconfigure(self._config.with_mask(slice(None) if value is None else value))
        self._cursor.note_names("mask", _names_of_mask(self._config, value))

    @property
    def weights(self) -> npt.NDArray[np.floating[Any]] | None:
        """Weight of each cell, read-only, of shape ``(n_obs,)``; None if cells aren't drawn by weights.

        New weights can have any form that the argument ``weights`` accepts. They take effect with the next iteration,
        which reads its epoch from the start. Equal weights change nothing.
        """
        units = self._config.units
        return units.values if isinstance(units, Weights) else None

    @weights.setter
    def weights(self, value: npt.ArrayLike | pd.Series[Any]) -> None:
        units = self._config.units
        if not isinstance(units, Weights):
            raise ValueError("This sampler has no weights. Pass weights=... when you make it.")
        new = Weights.of(value, units.num_samples, units.rounds)
        self._cursor.reconfigure(self._config.with_units(new.without_names()))
        self._cursor.note_names("weights", new.names)

    @property
    def rng(self) -> np.random.Generator:
        """Generator of the order, from the seed or from the wrapped sampler.

        Using it does not change any iteration. Assigning a different generator restarts the epoch with a new order.
        The rows of a rank stay the same: under ``"shuffled"``, blocks are assigned by the seed.
        """
        config = self._config
        return np.random.default_rng(config.root_seed) if config.rng is None else copy.deepcopy(config.rng)

    @rng.setter
    def rng(self, value: np.random.Generator | None) -> None:
        self._cursor.reconfigure(self._config.with_rng(value))

    @property
    def epoch(self) -> int:
        """Epoch that was set, loaded or read last; 0 at first."""
        return self._cursor.clock.place.epoch

    @property
    def next_epoch(self) -> int:
        """Epoch to start or resume.

        It is the current epoch, or the next one if the current epoch is finished. After loading a state, use it as
        ``for epoch in range(sampler.next_epoch, n_epochs): sampler.set_epoch(epoch)``.
        """
        return self._cursor.clock.next_epoch

    @property
    def batches_done(self) -> int:
        """Number of batches of the epoch that were done before the last resume; 0 without one."""
        return self._cursor.clock.next.done

    @property
    def sampler(self) -> Self:
        """The sampler itself, for frameworks that look here for ``set_epoch``.

        Lightning, for example, calls ``loader.batch_sampler.sampler.set_epoch``.
        """
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Call it on every rank.

        If the sampler shuffles, each epoch has its own order. Under ``remainder="drop"``, it drops different rows than
        the epoch before. The same epoch always has the same order.

        Only three things move the epoch: taking its last batch, this method, and loading a state. Setting the epoch in
        which the next iteration begins anyway changes nothing, so a loaded state is resumed; if the state was saved
        at the end of the epoch, no batches remain. Iterators that are already running are not affected.

        Parameters
        ----------
        epoch
            Number of the epoch, at least 0.

        Raises
        ------
        ValueError
            If a state of a later epoch was loaded and no iteration has started since. Start at :attr:`next_epoch`.

        Examples
        --------
        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(0, 2)
        ... )
        >>> for epoch in range(3):
        ...     sampler.set_epoch(epoch)
        ...     print(sampler.plan(10).dropped)
        8:10
        6:8
        4:6
        """
        self._cursor.set_epoch(integer("epoch", epoch, least=0, below=BOUND))

    def state_dict(self, *, batches_done: int) -> dict[str, Any]:
        """Return the position in the epoch, the same on every rank.

        Parameters
        ----------
        batches_done
            Number of batches of this epoch that every rank has done, including those before an earlier resume. The
            sampler can't count them: a loader yields many batches of one load request, and prefetches others.
            :meth:`StatefulLoader.state_dict` counts them for you.

        Returns
        -------
        dict
            The position and the settings of the sampler, as a small dict that can be written as JSON. If all batches
            are done, loading it starts the next iteration; setting the same epoch again then yields no batches. Before
            an iteration, a sampler without a loaded state doesn't know the number of batches, so it can't note that all
            are done. A :class:`StatefulLoader` knows it.

        Raises
        ------
        ValueError
            If ``batches_done`` is larger than the number of batches of the epoch, which the sampler knows once
            ``n_obs`` was passed to one of its methods; or if an iteration has started, and it is smaller than the
            number done before the number of ranks or workers changed in this epoch.

        See Also
        --------
        load_state_dict : Resume from the returned state.

        Examples
        --------
        Two ranks save a state after 2 of their 6 batches:

        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(0, 2)
        ... )
        >>> _ = next(sampler.sample(24))
        >>> state = sampler.state_dict(batches_done=2)
        >>> state["epoch"], state["finished"]
        (0, False)
        """
        batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        return self._cursor.state(self._cursor.position_after(batches_done), {})

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume from a saved state. Call it on every rank.

        The next iteration yields the remaining batches of the epoch, exactly as the interrupted one would have.
        Until then, :meth:`n_batches` returns the number of remaining batches. Setting the same epoch again has no
        effect.

        On a different number of ranks, the remaining batches are repartitioned into a contiguous range per rank. Their
        rows don't change. ``remainder`` applies to batches that don't divide evenly: under ``"drop"``, up to
        ``world_size - 1`` batches are dropped.

        Parameters
        ----------
        state
            Return value of :meth:`state_dict`, from any rank.
        strict
            True (default) raises if the state was saved with different settings. False does not compare settings; rows
            may then be repeated or never read.

        Raises
        ------
        TypeError
            If the state is not a dict.
        ValueError
            If the state is damaged or has a newer format; if it was saved with different settings, each of which the
            message names; or if the epoch can't be resumed on this number of ranks. The sampler is left unchanged.

        Examples
        --------
        Two ranks save a state after 2 of their 6 batches. Of the 8 remaining batches, each of three ranks reads 2, and
        2 are dropped:

        >>> wrapped = SequentialSampler(2, 1, 2)
        >>> before = DistributedSampler(wrapped, dist_info=Rank(0, 2))
        >>> after = DistributedSampler(wrapped, dist_info=Rank(0, 3))
        >>> after.load_state_dict(before.state_dict(batches_done=2))
        >>> after.batches_done, after.n_batches(24)
        (2, 2)
        """
        self._cursor.resume(state, strict=strict)

    def reshard(self, dist_info: DistInfo | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch, without a restart.

        Call it in every process of the new job after the same step, before the next batch. It has the effect of
        :meth:`load_state_dict` after a restart: the remaining batches of the epoch are repartitioned among the new
        ranks. A process that joins the job loads the state of any other process.

        Parameters
        ----------
        dist_info
            Source of the new rank and world size, as for :class:`DistributedSampler`. None (default) queries the same
            source again.
        batches_done
            Number of batches of this epoch that every rank has done, as for :meth:`state_dict`. Required if an
            iteration has started; :meth:`StatefulLoader.reshard` counts them for you.

        Raises
        ------
        TypeError
            If ``dist_info`` is not a valid source.
        ValueError
            If the epoch can't be resumed on this number of ranks, or ``batches_done`` is missing. The sampler is left
            unchanged.

        Examples
        --------
        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(0, 3)
        ... )
        >>> sampler.n_batches(24)
        4
        >>> sampler.reshard(Rank(0, 2), batches_done=2)
        >>> sampler.n_batches(24)
        3
        """
        if batches_done is not None:
            batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        elif self._cursor.last is not None:
            raise ValueError(
                "batches_done is required once an iteration has started, since the sampler can't count its batches. "
                "Pass batches_done=..., or call reshard of the loader, which counts them."
            )
        self._cursor.reshard(self._cursor.position_after(batches_done), dist_info)

    def plan(self, n_obs: int) -> EpochPlan:
        """Return the rows and batches of every rank, without reading data.

        Parameters
        ----------
        n_obs
            Number of rows of the whole collection: ``loader.n_obs``.

        Returns
        -------
        EpochPlan
            The plan, the same on every rank. With virtual ranks, it is a plan of the virtual ranks.

        Raises
        ------
        ValueError
            If the mask selects too few rows, or the wrapped sampler can't run on some rank's shard. Every rank raises
            the same error.
        RuntimeError
            If the wrapped sampler yields batches for a shard for which its ``n_batches`` returns 0.

        Examples
        --------
        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(0, 2)
        ... )
        >>> plan = sampler.plan(9)
        >>> plan.shard(0).rows, plan.shard(1).rows, plan.dropped
        (Rows(0:4), Rows(4:8), Rows(8:9))
        """
        n_obs, position = integer("n_obs", n_obs, least=0, below=BOUND), self._cursor.next()
        plan = self._cursor.planned(n_obs, position)
        n_processes = None if self.virtual_ranks is None else self.world_size
        return EpochPlan._of(plan, position, self._epochs.left(n_obs, position), n_processes)

    def n_batches(self, n_obs: int) -> int:
        """Return the number of batches that this rank yields in the next iteration.

        Parameters
        ----------
        n_obs
            Number of rows of the whole collection: ``loader.n_obs``.

        Returns
        -------
        int
            Number of batches; of the remaining batches, if an epoch is resumed.

        Raises
        ------
        ValueError, RuntimeError
            As for :meth:`plan`.

        Examples
        --------
        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(0, 2)
        ... )
        >>> sampler.n_batches(9)
        2
        """
        n_obs, position = integer("n_obs", n_obs, least=0, below=BOUND), self._cursor.next()
        self._cursor.planned(n_obs, position)
        left = self._epochs.left(n_obs, position)
        return max(len(left[lane]) for lane in self._epochs.own_lanes)

    n_iters = n_batches  # the name in annbatch before 0.3

    def rows_of(
        self, n_obs: int, steps: StepSelection, ranks: int | Sequence[int] | None = None, epoch: int | None = None
    ) -> pd.DataFrame:
        """Return the rows that each rank reads in some steps, without reading data.

        Parameters
        ----------
        n_obs
            Number of rows of the whole collection: ``loader.n_obs``.
        steps
            Steps of the epoch: an integer, a slice or a sequence of integers. They are counted from 0 at the start of
            the epoch, also after a resume. Steps that are done are assigned to the ranks that ran them; remaining steps
            are assigned to the ranks of this job.
        ranks
            Rank or ranks to return; None (default) returns all.
        epoch
            Number of the epoch; None (default) takes the epoch that was set, loaded or started last.

        Returns
        -------
        pandas.DataFrame
            One line per row that is read, with the integer columns ``step``, ``rank`` and ``row``, in the order of
            steps, ranks and rows of each batch. If the sampler samples sets, each line is a cell, and there are also
            the columns ``set`` (index of the cell's set within the batch) and ``is_control``.

        Raises
        ------
        IndexError
            If the epoch has no such step.
        ValueError
            As for :meth:`plan`.

        Examples
        --------
        >>> sampler.rows_of(50, steps=2, ranks=1)
           step  rank  row
        0     2     1   34
        1     2     1   35
        2     2     1   31
        3     2     1   33
        """
        n_obs = integer("n_obs", n_obs, least=0, below=BOUND)
        epoch = None if epoch is None else integer("epoch", epoch, least=0, below=BOUND)
        position = self._cursor.of_epoch(epoch)
        self._cursor.planned(n_obs, position)
        return self._epochs.rows(n_obs, position, steps, ranks)

    def validate(self, n_obs: int) -> None:
        """Check that every rank can run on a collection of ``n_obs`` rows.

        It checks the current epoch. The result is valid for all epochs, unless a custom sampler or sharding depends on
        the epoch.

        Parameters
        ----------
        n_obs
            Number of rows of the whole collection: ``loader.n_obs``.

        Raises
        ------
        ValueError, RuntimeError
            As for :meth:`plan`.

        Examples
        --------
        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(0, 2)
        ... )
        >>> sampler.validate(9)
        >>> sampler.validate(3)
        Traceback (most recent call last):
        ...
        ValueError: There are 3 rows, too few for one full batch on every rank...
        """
        self.plan(n_obs)

    def check_ranks_agree(self, n_obs: int, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks are configured consistently and have distinct ranks.

        Call it in every process of the job, ideally once before training. It compares the world size, ``n_obs``, the
        arguments of this sampler, the settings of the wrapped sampler, the epoch and the position in it, the plan, and
        the versions of libraries. Processes that share a rank, such as tensor-parallel peers, must also have the same
        randomness.

        Parameters
        ----------
        n_obs
            Number of rows of the whole collection: ``loader.n_obs``.
        timeout
            Time to wait for the other processes, in seconds or as a :class:`datetime.timedelta` (default 300 s).
        gather
            Function that takes a string and returns the list of the strings of all processes, in the same order in
            every process, such as mpi4py's ``comm.allgather``. Needed only if neither torch.distributed nor JAX is
            initialized.

        Raises
        ------
        ValueError
            If ranks differ, or one of them is invalid. Every process raises the same error, which names each
            difference, its values, and their ranks.
        TimeoutError
            If a process does not make this call within ``timeout``, or fails while it waits. Every process raises it.
        RuntimeError
            If the processes can't communicate.

        Examples
        --------
        Two processes that both use rank 0; ``gather`` stands for their communication:

        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(0, 2)
        ... )
        >>> sampler.check_ranks_agree(24, gather=lambda string: [string, string])
        Traceback (most recent call last):
        ...
        ValueError: The ranks of this job don't agree:
          rank 0 belongs to processes 0 and 1
          rank 1 belongs to no process
        ...
        """
        cursor = self._cursor
        checks.ranks_agree(
            cursor, lambda job: Description.of_next(job, cursor, n_obs, {}), timeout=timeout, gather=gather
        )

    def check_epoch_read(
        self, n_obs: int, read: Read, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks have read the planned rows in the last iteration.

        Call it in every process of the job, at the end of an epoch and before ``set_epoch``.

        Parameters
        ----------
        n_obs
            Number of rows of the whole collection: ``loader.n_obs``.
        read
            Row indices of each batch that this process has read in the iteration: an iterable of integer arrays of
            shape ``(batch_size,)``, such as ``batch["index"]``.
        timeout
            As for :meth:`check_ranks_agree`.
        gather
            As for :meth:`check_ranks_agree`.

        Returns
        -------
        str
            A one-line summary of the rows that were read.

        Raises
        ------
        ValueError
            If a rank has read different rows or a different number of batches than planned, or if the ranks are
            inconsistent. Every process raises the same error.
        TimeoutError, RuntimeError
            As for :meth:`check_ranks_agree`.

        Examples
        --------
        A job of one rank reads 8 rows in batches of 2, and then claims to have read row 6 instead of row 7:

        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(0, 1)
        ... )
        >>> read = [
        ...     np.arange(8)[part]
        ...     for request in sampler.sample(8)
        ...     for part in request["requests"]
        ... ]
        >>> sampler.check_epoch_read(8, read)
        'epoch 0: 1 rank has read 8 rows in 4 batches, as planned. Each of the 8 rows was read once'
        >>> sampler.check_epoch_read(8, [*read[:3], np.array([6, 6])])
        Traceback (most recent call last):
        ...
        ValueError: The ranks have not read the planned rows in epoch 0:
          rank 0 has read 8 rows in 4 batches as planned, but different rows
        """
        cursor = self._cursor
        return checks.epoch_read(
            cursor, lambda job: Reading.of(job, cursor, n_obs, read), timeout=timeout, gather=gather
        )

    def sample(self, n_obs: int) -> Iterator[LoadRequest]:
        """Start an iteration of this rank over its shard.

        Parameters
        ----------
        n_obs
            Number of rows of the whole collection: ``loader.n_obs``.

        Returns
        -------
        Iterator[LoadRequest]
            Load requests for rows of the collection. The iterator can be copied and pickled at any time.

        Raises
        ------
        ValueError, RuntimeError
            As for :meth:`plan`; or, while iterating, if the wrapped sampler yields a different number of batches than
            its ``n_batches`` returns, or rows outside of its shard.

        Examples
        --------
        >>> sampler = DistributedSampler(
        ...     SequentialSampler(2, 1, 2), dist_info=Rank(1, 2)
        ... )
        >>> [request["requests"] for request in sampler.sample(9)]
        [[slice(4, 6, None)], [slice(6, 8, None)]]
        """
        return self._cursor.begin_sampling(integer("n_obs", n_obs, least=0, below=BOUND))

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sample(n_obs)

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), _cursor=copy.copy(self._cursor))
        return duplicate

    def __repr__(self) -> str:
        config, source = self._config, self._cursor.rank_source
        units = "".join(f"{name}={config.units!r}, " for name in config.units.identity)
        mask = "" if config.mask is ALL else f"mask={shortened(self.mask)}, "
        virtual = "" if self.virtual_ranks is None else f"virtual_ranks={self.virtual_ranks}, "
        who, asked = "rank=?, world_size=?", "deferred"
        if source.is_known:
            who, asked = f"rank={self.rank}, world_size={self.world_size}", source.placement.source
        return (
            f'{type(self).__name__}({type(config.sampler).__name__}, {who}, remainder="{config.remainder}", '
            f"sharding={getattr(config.sharding, '__name__', config.sharding)}, {mask}"
            f'seed={config.seed}, {units}{virtual}epoch={self.epoch}, source="{asked}")'
        )


def cursor_of(sampler: DistributedSampler) -> Cursor:
    """Return the cursor of a sampler, for loaders and checks of this package."""
    return sampler._cursor


def _names_of_mask(config: Config, mask: object) -> pd.Index[Any] | None:
    """Return the names of the cells that a mask was made for, if it has a value for each of them."""
    return None if config.mask.n_obs is None else names_of("mask", mask)
