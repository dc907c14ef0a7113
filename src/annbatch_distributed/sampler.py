"""The DistributedSampler: shards the rows of any annbatch sampler across the ranks of a job.

A sampler is one rank's side of a job. It holds

1. a :class:`Config`, the validated arguments;
2. a :class:`Planner`, which computes the plan of an epoch and the lanes of its ranks, the same on every rank;
3. a :class:`Position`, where the next pass begins. It moves when an epoch is set, a state is loaded, or a pass begins;
4. the last :class:`Pass`. A state is the position of that pass, after the batches that its consumer has done.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from reprlib import repr as shortened
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import annbatch.samplers
import numpy as np
import numpy.typing as npt
from annbatch.abc import Sampler

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Gather, Read, Reading, Timeout
from annbatch_distributed.config import Config, ShardingName, check_wrapped
from annbatch_distributed.lanes import Lane, Remainder, Worker
from annbatch_distributed.masks import AnyMask, check_names, open_ended
from annbatch_distributed.plan import Classes, EpochPlan
from annbatch_distributed.planner import Planner, StepSelection, check_segments, rows_at
from annbatch_distributed.ranks import DistInfo, Placement, Source
from annbatch_distributed.ranks.rank import MOST_RANKS
from annbatch_distributed.ranks.worker import SharedFlag, base_seed, current_worker, worker_info_hidden
from annbatch_distributed.rows import BOUND, Rows, integer, integers, names_of
from annbatch_distributed.sets import Sets
from annbatch_distributed.sharding import Sharding
from annbatch_distributed.state import Identity, Position, check_identity, from_state, to_state
from annbatch_distributed.stream import LONGEST_GAP, Pass

if TYPE_CHECKING:
    import pandas as pd


class DistributedSampler(Sampler):
    """Shard an annbatch sampler across the ranks of a distributed job.

    The rows that the mask selects are partitioned into one shard per rank. A private copy of the wrapped sampler runs
    on this rank's shard, with its own random generator. Ranks don't communicate: each computes the same plan.

    How 9 rows are divided among 2 ranks with a batch size of 2 (repeated rows in brackets)::

        remainder  rank 0              rank 1              batches
        "drop"     0 1 | 2 3           4 5 | 6 7           2 and 2; row 8 is dropped
        "keep"     0 1 | 2 3           4 5 | 6 7 | 8       2 and 3
        "exact"    0 1 | 2 | 3         4 5 | 6 7 | 8       3 and 3
        "pad"      0 1 | 2 3 | [4 5]   4 5 | 6 7 | 8 [0]   3 and 3, all full

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
        - the result of :func:`mesh_ranks`, for any mesh;
        - Lightning's ``Trainer`` or ``Fabric``, Accelerate's ``Accelerator`` or ``PartialState``, or Ray Train's
          context.

        Wrap any of these in :func:`deferred` to query it only when the rank is first needed.
    enforce_equal_batches
        As in annbatch: True (default) means ``remainder="drop"``, False means ``remainder="keep"``.
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
            splits one of its last batches in two.
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
    align
        Alignment of a shard's chunks, in rows. Whole chunks start at multiples of ``align``, as chunks do on disk;
        unaligned rows at the ends of contiguous ranges come last in the shard. None (default) takes the chunk size of
        the wrapped sampler; 1 keeps the order of rows. The order is also kept for samplers that keep it themselves or
        sample with replacement, and in epoch 0 if annbatch's own ``DistributedSampler`` gives each rank the same rows.
    read_through
        Largest gap, in rows, that is read and discarded instead of starting a new read (default 64). Larger values
        start fewer reads and use more memory; 0 reads only rows of batches.
    sets
        Sets of cells to sample instead of single cells. ``batch_size``, ``chunk_size`` and similar arguments of the
        wrapped sampler then count sets, as does everything on this page that counts rows. To select cells, use the mask
        of :meth:`Sets.from_obs`. None (default) samples cells.

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
    The rows of a rank depend only on the arguments, ``n_obs`` and the epoch, never on earlier calls. Each iteration
    reads them in a new order; ``set_epoch(e)`` always restores the order of epoch ``e``.

    Unless the sharding is ``"independent"``, ``num_samples`` of the wrapped sampler counts per rank, class samplers
    sample from the rank's own shard, and ``drop_last`` drops rows of the rank, as in annbatch. With replacement, each
    rank samples exactly ``num_samples`` rows: if that is not a multiple of the batch size, the last batch is smaller
    under every policy. Without replacement, annbatch fills the last batch.

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
    to drop none: remainder="exact", "keep" or "pad"
    in memory: up to 2,048 rows on each rank
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
        align: int | None = None,
        read_through: int = LONGEST_GAP,
        sets: Sets | None = None,
    ) -> None:
        for warning in check_wrapped(sampler, DistributedSampler):
            warn(warning)
        self._config = Config.of(
            sampler,
            remainder=remainder,
            enforce_equal_batches=enforce_equal_batches,
            sharding=sharding,
            mask=mask,
            seed=seed,
            align=align,
            sets=sets,
        )
        self._read_through = integer("read_through", read_through, least=0, below=BOUND)
        if virtual_ranks is not None:
            virtual_ranks = integer("virtual_ranks", virtual_ranks, least=1, below=MOST_RANKS + 1)
        self._virtual_ranks = virtual_ranks
        self._source = Source.of(dist_info)
        if self._source.is_known:
            _ = self._own_lanes  # raises if this number of ranks can't run them
        self._planner = Planner(self._config, has_virtual_ranks=virtual_ranks is not None)
        # where the next pass begins, and the last pass that began since that was set
        self._position = Position()
        self._pass: Pass | None = None
        # the pass that reshard has cut, as long as its remaining batches come next
        self._cut: Pass | None = None
        # True until a pass begins after a state was loaded; True once an epoch was set, which workers rely on
        self._is_loaded = self._is_set = False
        # set by the workers of a DataLoader, since this process can't see otherwise that they have begun to read
        self._workers_flag = SharedFlag()
        #: Number of changes of the mask, the rng or the rank. Persistent workers don't see such a change.
        self.n_changes = 0
        # the rows and datasets of the loaded state, and the names of the cells that a mask was made for, until a loader
        # has compared them with its own
        self._saved: Identity = {}
        self._mask_names = self._names_of(mask) if sets is None else sets.names
        self._warned: set[str] = set()

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.placement.rank.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.placement.rank.world_size

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a full batch of this rank.

        With virtual ranks, it is the sum over the virtual ranks that this rank runs. It is None if the wrapped sampler
        has no batch size.
        """
        size = self._config.batch_size
        if size is None or self._virtual_ranks is None:  # a deferred rank may not be known yet
            return size
        return size * len(self._own_lanes)

    @property
    def virtual_ranks(self) -> int | None:
        """Number of virtual ranks; None if they are not used."""
        return self._virtual_ranks

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
        takes effect with the next iteration, which reads all of its rows.
        """
        return self._config.mask.to_argument()

    @mask.setter
    def mask(self, value: AnyMask) -> None:
        if sys._getframe(1).f_globals.get("__name__") == annbatch.samplers.DistributedSampler.__module__:
            raise ValueError(
                "An annbatch.samplers.DistributedSampler must not wrap a DistributedSampler of annbatch_distributed: "
                "the rows are sharded already, and most would never be read. Pass the inner sampler to the loader."
            )
        self._reconfigure(self._config.with_mask(value))
        self._mask_names = self._names_of(value)

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
        self._reconfigure(self._config.with_rng(value))

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration; 0 at first."""
        return self._position.epoch

    @property
    def next_epoch(self) -> int:
        """Epoch to start or resume.

        It is the current epoch, or the next one if the current epoch is finished. After loading a state, use it as
        ``for epoch in range(sampler.next_epoch, n_epochs): sampler.set_epoch(epoch)``.
        """
        return self._position.epoch + self._position.finished

    @property
    def batches_done(self) -> int:
        """Number of batches that were done before a resume; else 0."""
        return self._begins_at.done

    @property
    def sampler(self) -> Self:
        """The sampler itself, for frameworks that look here for ``set_epoch``.

        Lightning, for example, calls ``loader.batch_sampler.sampler.set_epoch``.
        """
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Call it on every rank.

        Each epoch has its own order, and under ``remainder="drop"`` it drops different rows than the epoch before. The
        same epoch always has the same order. Setting the epoch of a loaded state resumes it; if the state was saved at
        the end of the epoch, no batches remain. Iterators that are already running are not affected.

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
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> for epoch in range(3):
        ...     sampler.set_epoch(epoch)
        ...     print(sampler.plan(10).dropped)
        8:10
        6:8
        4:6
        """
        epoch, position = integer("epoch", epoch, least=0, below=BOUND), self._position
        if self._is_loaded and epoch < position.epoch:
            raise ValueError(
                f"set_epoch({epoch}) would discard the loaded state of epoch {position.epoch}. Start at "
                "loader.next_epoch. (The loader that Fabric.setup_dataloaders returns counts epochs from 0: iterate "
                "over the original loader instead.)"
            )
        self._is_set = True
        # frameworks set the epoch of a state that they have just loaded
        if epoch != position.epoch or not (self._is_loaded or position.done):
            self.go_to(Position(epoch))

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
            are done, loading it starts the next iteration; setting the same epoch again then yields no batches.

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

        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> _ = next(sampler.sample(24))
        >>> state = sampler.state_dict(batches_done=2)
        >>> state["epoch"], state["finished"]
        (0, False)
        """
        return self.state_at(integer("batches_done", batches_done, least=0, below=BOUND), {})

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
        self.resume(state, strict=strict)

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
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 3))
        >>> sampler.n_batches(24)
        4
        >>> sampler.reshard(Rank(0, 2), batches_done=2)
        >>> sampler.n_batches(24)
        3
        """
        if batches_done is not None:
            batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        elif self._pass is not None:
            raise ValueError(
                "batches_done is required once an iteration has started, since the sampler can't count its batches. "
                "Pass batches_done=..., or call reshard of the loader, which counts them."
            )
        self.reshard_at(self.state_at(batches_done, {}), dist_info)

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
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> plan = sampler.plan(9)
        >>> plan.shard(0).rows, plan.shard(1).rows, plan.dropped
        (Rows(0:4), Rows(4:8), Rows(8:9))
        """
        n_obs, position = integer("n_obs", n_obs, least=0, below=BOUND), self._next()
        with worker_info_hidden(current_worker()):
            plan = self._plan(n_obs, position)
            # under drop, batches that don't divide evenly among the ranks of a resumed epoch are dropped, too
            if position.done:
                remaining = list(map(len, self._remaining(n_obs, position)))
                n_done = sum(segment.n_lanes * segment.done for segment in position.segments)
                n_over = plan.first_number(plan.n_streams) - n_done - sum(remaining)
                n_over = n_over if plan.remainder == "drop" else 0
                plan = replace(plan, remaining=tuple(remaining), n_dropped_batches=n_over)
        return replace(plan, n_processes=None if self._virtual_ranks is None else self.world_size)

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
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> sampler.n_batches(9)
        2
        """
        n_obs, position = integer("n_obs", n_obs, least=0, below=BOUND), self._next()
        with worker_info_hidden(current_worker()):
            remaining = self._remaining(n_obs, position)
        return max(len(remaining[lane]) for lane in self._own_lanes)

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
        return self.rows_in_epoch(integer("n_obs", n_obs, least=0, below=BOUND), self._position_of(epoch), steps, ranks)

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
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> sampler.validate(9)
        >>> sampler.validate(3)
        Traceback (most recent call last):
        ...
        ValueError: The mask selects 3 rows, too few for one full batch on every rank...
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

        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> sampler.check_ranks_agree(24, gather=lambda string: [string, string])
        Traceback (most recent call last):
        ...
        ValueError: The ranks of this job don't agree:
          rank 0 belongs to processes 0 and 1
          rank 1 belongs to no process
        ...
        """
        checks.ranks_agree(self.agreeing, lambda place: self.describe(place, n_obs, {}), timeout=timeout, gather=gather)

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

        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 1))
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
        return checks.epoch_read(
            self.agreeing, lambda place: self.reading(place, n_obs, read), timeout=timeout, gather=gather
        )

    def sample(self, n_obs: int) -> Pass:
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
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(1, 2))
        >>> [request["requests"] for request in sampler.sample(9)]
        [[slice(4, 6, None)], [slice(6, 8, None)]]
        """
        if self._config.sets is not None and _is_annbatchs(sys._getframe(1)):
            raise RuntimeError(
                "Sets of cells can't be read with annbatch's Loader, which doesn't return the set of each cell. Use a "
                "StatefulLoader, which takes the same arguments."
            )
        worker, position = current_worker(), self._next()
        if worker is not None:
            self._workers_flag.set()
            position = self._position_in_worker(position)
        new = self.begin(n_obs, position, worker)
        new.on_next, new.on_end = partial(self.check_rank, new), partial(self.end, new)
        return new

    def _sample(self, n_obs: int) -> Pass:
        return self.sample(n_obs)

    # This rank. Methods without an underscore are for loaders and checks of this package.

    @property
    def placement(self) -> Placement:
        """Place of this process in its job; a deferred source is queried now."""
        return self._source.placement

    @property
    def framework_object(self) -> object:
        """Lightning's trainer or another framework object in ``dist_info``; None if it holds none."""
        return self._source.framework_object

    @property
    def _own_lanes(self) -> range:
        """Lanes that this rank reads."""
        rank, world_size = self.rank, self.world_size
        if self._virtual_ranks is None:
            return range(rank, rank + 1)
        # 4 virtual ranks on 2 ranks: lanes 0:2 and 2:4
        n_own, left = divmod(self._virtual_ranks, world_size)
        if left:
            fitting = [number for number in range(1, self._virtual_ranks + 1) if self._virtual_ranks % number == 0]
            raise ValueError(
                f"virtual_ranks must be a multiple of the world size, {world_size}, got {self._virtual_ranks}. Run the "
                f"job on a number of ranks that divides it: {', '.join(map(str, fitting))}."
            )
        return range(rank * n_own, (rank + 1) * n_own)

    @property
    def _n_lanes(self) -> int:
        """Number of lanes of the job: one for each rank, or each virtual rank."""
        return len(self._own_lanes) * self.world_size

    # The plan

    def _plan(self, n_obs: int, position: Position) -> EpochPlan:
        """Return the plan of the epoch of a position, which has a segment."""
        if position.done and self._saved.get("n_obs") not in (None, n_obs):
            raise ValueError(
                f"The loaded state was saved for a collection of {self._saved['n_obs']} rows, but this collection has "
                f"{n_obs}. Load a state of this collection."
            )
        plan = self._planner.plan(n_obs, position.epoch, position.segments[0].n_lanes)
        if warning := _differing_classes(type(self._config.sampler).__name__, self._planner.classes):
            self._warn_once(warning)
        return plan

    def _remaining(self, n_obs: int, position: Position) -> list[Lane]:
        """Return the remaining batches of each lane of the job at a position."""
        self._plan(n_obs, position)
        *_, (_, n_workers, done) = position.segments
        return [lane.after(n_workers, done) for lane in self._planner.lanes(n_obs, position)]

    def _pass_of(self, plan: EpochPlan, lanes: list[Lane], position: Position, n_batches: int = 0) -> Pass:
        """Return a pass over some lanes."""
        config = self._config
        rank = self.placement.rank
        return Pass(config.sampler, plan, lanes, config.root_seed, position, n_batches, self._read_through, rank)

    def n_left(self, n_obs: int, position: Position) -> int:
        """Return the number of remaining batches, at a position, of the longest lane of the job."""
        with worker_info_hidden(current_worker()):
            return max(map(len, self._remaining(n_obs, position)))

    def plan_at(self, n_obs: int, position: Position) -> EpochPlan:
        """Return the plan of the epoch of a position, which has a segment."""
        with worker_info_hidden(current_worker()):
            return self._plan(n_obs, position)

    def rows_in_epoch(
        self, n_obs: int, position: Position, steps: StepSelection, ranks: int | Sequence[int] | None
    ) -> pd.DataFrame:
        """Return the rows that each rank reads in some steps of the epoch of a position: see :meth:`rows_of`."""
        import pandas as pd

        wanted = None if ranks is None else integers("ranks", np.atleast_1d(ranks), below=MOST_RANKS)
        n_own = len(self._own_lanes)

        def rank_of(lane: int, n_lanes: int) -> int:
            # 4 virtual ranks on 2 ranks: lanes 0 and 1 are of rank 0, lanes 2 and 3 of rank 1. In segments with another
            # number of lanes, each lane was a rank
            return lane // n_own if n_lanes == self._n_lanes else lane

        def is_wanted(lane: int, n_lanes: int) -> bool:
            return wanted is None or rank_of(lane, n_lanes) in wanted

        places, rows = list[tuple[int, int]](), [np.arange(0)]
        with worker_info_hidden(current_worker()):
            plan, segments = self._plan(n_obs, position), self._planner.segments(n_obs, position)
            for read in rows_at(
                steps, segments, lambda lane: self._pass_of(plan, [lane], position).batches(), is_wanted
            ):
                places.append((read.step, rank_of(read.lane, read.n_lanes)))
                rows.append(read.rows)
        of_sets: dict[str, list[npt.NDArray[Any]]] = {}
        if plan.sets is not None:
            cells, n_before = [plan.sets.cells_of(numbers) for numbers in rows[1:]], Counter[tuple[int, int]]()
            of_sets["set"] = [np.arange(0)]
            for place, numbers, (_, which) in zip(places, rows[1:], cells, strict=True):
                # numbered through over the lanes of a rank, as in its joined batch
                of_sets["set"].append(n_before[place] + which)
                n_before[place] += len(numbers)
            rows[1:] = [own.rows for own, _ in cells]
            of_sets["is_control"] = [np.zeros(0, dtype=np.bool_), *(own.are_controls for own, _ in cells)]
        # (batches, 2), repeated to (rows, 2): (step, rank) of each row. Batches of 2 and 1 rows in step 7 of ranks 0
        # and 1 become [[7 0] [7 0] [7 1]]
        of_rows = np.repeat(np.array(places, dtype=np.int64).reshape(-1, 2), list(map(len, rows[1:])) or 0, axis=0)
        columns = {"step": of_rows[:, 0], "rank": of_rows[:, 1], "row": np.concatenate(rows)}
        return pd.DataFrame(columns | {name: np.concatenate(parts) for name, parts in of_sets.items()})

    # The position

    def go_to(self, position: Position, *, is_loaded: bool = False) -> None:
        """Make the next pass begin at a position, and forget earlier passes."""
        self._position, self._pass, self._cut, self._is_loaded = position, None, None, is_loaded
        if not is_loaded:
            self._saved = {}
        if current_worker() is None:
            self._workers_flag.clear()

    def _reconfigure(self, config: Config) -> None:
        """Replace the configuration. The next pass is the first of its epoch."""
        self._config = config
        self._planner = Planner(config, has_virtual_ranks=self._virtual_ranks is not None)
        self.n_changes += 1
        self.go_to(Position(self.epoch))

    @property
    def _begins_at(self) -> Position:
        """Position of the next pass; the end of the epoch, if a finished epoch was loaded and is set again."""
        is_set_again = self._is_loaded and self._is_set
        return self._position.after() if self._position.finished and not is_set_again else self._position

    def _next(self, n_workers: int = 1) -> Position:
        """Return the position of the next pass, in a last segment of this job's lanes."""
        return self.here(self._begins_at, n_workers)

    def here(self, position: Position, n_workers: int = 1) -> Position:
        """Return a position with a last segment of this job's lanes, and of some workers."""
        # samplers that keep an order yield the same batches with any number of workers
        return position.with_lanes(self._n_lanes, n_workers if self.shuffle else 1)

    def _position_of(self, epoch: int | None) -> Position:
        """Return the position of an epoch; by default of the last one that has begun, or else of the next one."""
        if self._pass is None and epoch is None:
            self._check_workers_have_not_read()
        position = self._position if self._pass is None else self._pass.position
        n_workers = position.segments[-1].n_workers if position.segments else 1
        if epoch is not None and epoch != position.epoch:
            position = Position(integer("epoch", epoch, least=0, below=BOUND))
        return position.with_lanes(self._n_lanes, n_workers)

    def _position_in_worker(self, position: Position) -> Position:
        """Return the position of a pass in a worker of a ``DataLoader`` that doesn't pass it on."""
        if position.done or (self._is_set and position.passes):
            raise RuntimeError(
                "The workers of a DataLoader can't know the position in the epoch, since a state was loaded or an "
                "iteration has started since set_epoch. Create the DataLoader with "
                "loader.to_dataloader(num_workers=...) of a StatefulLoader; or call set_epoch(epoch) before each "
                "epoch, and pass persistent_workers=False."
            )
        # if set_epoch isn't used, PyTorch's seed for all workers of an iteration gives each iteration its own order
        return position if self._is_set else replace(position, passes=base_seed() + position.passes)

    def _check_workers_have_not_read(self) -> None:
        if self._workers_flag.is_set:
            raise RuntimeError(
                "The workers of a DataLoader may have started to read, so their position in the epoch is unknown here. "
                "Create the DataLoader with loader.to_dataloader(num_workers=...) of a StatefulLoader, and call "
                "state_dict() on it."
            )

    # The pass

    @property
    def last_pass(self) -> Pass | None:
        """The last pass; None if no pass has begun since an epoch was set or a state loaded."""
        return self._pass

    def check_is_last(self, current: Pass) -> None:
        """Raise a RuntimeError if a later pass than this one has begun, or the rank has changed."""
        if current.rank != self.placement.rank:
            self.check_rank(current)
        if self._pass not in (None, current):  # None after set_epoch, which leaves open passes as they are
            raise RuntimeError(
                "This iterator has ended, because a new iteration over the same loader or its to_dataloader() has "
                "started. To look at batches in the middle of an epoch, create a second loader with its own sampler."
            )

    def check_rank(self, current: Pass) -> None:
        """Raise a RuntimeError if the ranks have changed since a pass began."""
        here, remedy = self.placement.rank, "Iterate over the loader again."
        if current.rank == here and current_worker() is None:
            here = self._source.current_rank()
            remedy = "Call loader.reshard() in every process after the same step."
        if current.rank != here:
            raise RuntimeError(
                f"The ranks have changed since this iteration started: this process was {current.rank}, and is now "
                f"{here}. {remedy}"
            )

    @contextmanager
    def resharded(self, dist_info: DistInfo | None) -> Iterator[None]:
        """Change the rank, and resume in this context; if that raises, restore the rank."""
        before, source = self._source, self._source if dist_info is None else dist_info
        try:
            # a deferred source may have the answer of an earlier job
            self._source = source.again() if isinstance(source, Source) else Source.of(source)
            yield
        except BaseException:
            self._source = before
            raise
        self.n_changes += 1

    def reshard_at(self, state: Mapping[str, Any], dist_info: DistInfo | None) -> None:
        """Change the rank, and resume at a state of this sampler."""
        cut = self._pass or self._cut
        saved = self._saved  # what a loader still has to compare with its collection
        with self.resharded(dist_info):
            self.resume(state, strict=True)
        self._cut = cut
        self._saved |= {name: part for name, part in saved.items() if part is not None}

    def has_cut(self, interrupted: Pass) -> bool:
        """Return True if the ranks have changed within a pass, and no other epoch was set since."""
        return interrupted is self._cut

    def has_left(self, interrupted: Pass) -> bool:
        """Return True if the ranks have changed within a pass, and its remaining batches come next."""
        return self.has_cut(interrupted) and not self._position.finished

    def begin(self, n_obs: int, position: Position | None = None, worker: Worker | None = None) -> Pass:
        """Begin a pass of this rank, or of a worker's part of it, at a position (default: the next one)."""
        position = position or self._next()
        new = self.pass_at(integer("n_obs", n_obs, least=0, below=BOUND), position, worker)
        if worker is None or not worker.number:  # one warning is enough
            self._warn_of_second_pass(new.plan, position)
        self._pass, self._cut, self._is_loaded = new, None, False
        # the remaining batches of a resumed epoch stay next until all are read, so peeking at a batch skips none
        self._position = position if position.done else position.after()
        return new

    def pass_at(self, n_obs: int, position: Position, worker: Worker | None = None) -> Pass:
        """Return the pass of this rank, or of a worker's part of it, that begins at a position."""
        _ = self.placement  # before the worker is hidden, which inherits it from its process
        with worker_info_hidden(current_worker()):
            plan, lanes = self._plan(n_obs, position), self._planner.lanes(n_obs, position)
        *_, (_, n_workers, done) = position.segments
        own = [lanes[lane] for lane in self._own_lanes]
        if worker is None:
            own = [lane.after(n_workers, done) for lane in own]
        else:
            # PyTorch collects from worker 0 first, so worker 0 takes the part whose turn it is: after 5 batches of 3
            # workers, part 5 % 3 = 2. Of the turns 0 1 2 0 1 before, one was of part 2: n_done is 1
            part = Worker((worker.number + done) % worker.n_workers, worker.n_workers)
            n_done = len(range(part.number, done, part.n_workers))
            own = [lane.of_worker(part, keeps_order=not self.shuffle).after(1, n_done) for lane in own]
        n_batches = position.done if position.finished else position.done_before + max(map(len, lanes))
        return self._pass_of(plan, own, position, n_batches)

    def begin_by_workers(self, n_obs: int, n_workers: int) -> Pass:
        """Begin the next pass in this process, for workers that receive its position."""
        new = self.begin(n_obs, self._next(n_workers))
        new.is_by_workers = True
        return new

    def end(self, ended: Pass) -> None:
        """Record that a pass has ended."""
        if ended is self._pass:
            self._position = replace(ended.position, segments=(), finished=True)

    # States

    def state_at(
        self, batches_done: int | None, collection: Mapping[str, Any], n_obs: int | None = None
    ) -> dict[str, Any]:
        """Return the state after some batches of the epoch, with a loader's description of its collection.

        None stands for the batches that are already done, and is allowed before a pass begins.
        """
        if self._pass is None and (batches_done is None or (self._position.finished and not batches_done)):
            return self._state(self._position.with_lanes(self._n_lanes), collection)
        assert batches_done is not None  # a loader that has begun a pass counts its batches
        # before a pass begins, the position may go back to a segment with another number of ranks
        position, least, n_batches = self._next(), 0, BOUND
        n_obs = n_obs or self._n_obs or self._planner.n_obs
        if self._pass is not None:
            position, least, n_batches = self._pass.position, self._pass.position.done_before, self._pass.n_batches
        elif batches_done > position.done:
            self._check_workers_have_not_read()
            if isinstance(n_obs, int):
                n_batches = position.done + self.n_left(n_obs, position)
        if not least <= batches_done <= n_batches:
            before = " (done before the number of ranks or workers changed)" if least else ""
            raise ValueError(
                f"batches_done must be from {least}{before} to {n_batches} (the batches of the epoch), got "
                f"{batches_done}. Count the batches that every rank has trained on."
            )
        return self._state(position.at(batches_done, n_batches), collection)

    def _state(self, position: Position, collection: Mapping[str, Any]) -> dict[str, Any]:
        return self.state_of(position, self._n_obs, collection)

    def state_of(self, position: Position, n_obs: Any, collection: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401 a state may have anything
        """Return a position as a state of this sampler."""
        return to_state(position, self.identity(n_obs, collection))

    def identity(self, n_obs: Any, collection: Mapping[str, Any]) -> Identity:  # noqa: ANN401 a state may have anything
        """Return the settings that determine the rows and their order, and a loader's description of its collection."""
        return self._config.identity(n_obs) | dict(collection)

    @property
    def _n_obs(self) -> Any:  # noqa: ANN401 a state may have anything
        """Number of rows of the collection according to the last pass or the loaded state; None if unknown."""
        return self._saved.get("n_obs") if self._pass is None else self._pass.plan.n_cells

    def resume(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool,
        n_obs: int | None = None,
        collection: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a state. A loader also passes the number of rows, the datasets and the cells of its collection."""
        position, saved = from_state(state)
        position = replace(position, segments=tuple(segment for segment in position.segments if segment.done))
        check_segments(position.with_lanes(self._n_lanes))
        if strict:
            is_within = position.done > 0 and not position.finished
            check_identity(*self.compared(saved, n_obs, collection or {}, is_within=is_within))
            changed = self.changed_versions(saved) if is_within else ""
            position = replace(position, unverified=position.unverified or bool(changed))
            saved = {name: saved.get(name) for name in ("n_obs", "datasets", "cells")}
        else:
            changed, position, saved = "", replace(position, unverified=position.done > 0), {}
        planner = copy.copy(self._planner)  # so that nothing is lost if it raises
        n_planned: Any = saved.get("n_obs") if n_obs is None else n_obs  # a state may have anything
        if position.done and not position.finished and n_planned is not None:
            with worker_info_hidden(current_worker()):
                try:
                    planner.lanes(n_planned, position.with_lanes(self._n_lanes))
                except ValueError as error:
                    raise ValueError(
                        f"Can't resume this state here. {error} To skip the rest of epoch {position.epoch}, call "
                        f"set_epoch({position.epoch + 1}) instead."
                    ) from error
        if changed:
            warn(
                f"The state was saved by different versions: {changed}. The remaining batches of epoch "
                f"{position.epoch} may therefore differ from the batches of the interrupted job. check_epoch_read will "
                "only check the remaining batches."
            )
        self.go_to(position, is_loaded=True)
        self._saved, self._planner, self._is_set = saved, planner, False

    def compared(
        self, saved: Identity, n_obs: int | None, collection: Mapping[str, Any], *, is_within: bool
    ) -> tuple[Identity, Identity]:
        """Return the parts that must be equal of a state's identity, and of the identity here."""
        # the number of rows decides how a mask is written, and may not have been known when the state was saved
        n_saved = saved.get("n_obs")
        n_known = n_saved if isinstance(n_saved, int) else n_obs
        here = self.identity(n_known, {"n_obs": self._n_obs, **collection})
        if isinstance(saved.get("rows"), dict):
            saved = saved | {"rows": open_ended(saved["rows"], n_known)}
        if not is_within:  # there is no order to restore
            here |= {name: saved.get(name) for name in ("datasets", "cells", "root")}
        elif n_obs is not None:
            here["n_obs"] = n_obs
        return saved | {"versions": None}, here | {"versions": None}

    def changed_versions(self, saved: Identity) -> str:
        """Return a string of the package versions in a state that differ from the versions here; empty if none do."""
        theirs, ours = dict(saved.get("versions") or {}), self._config.identity(None)["versions"]
        changed = [name for name, version in sorted(ours.items()) if theirs.get(name, version) != version]
        return ", ".join(f"{name} {theirs[name]} (here: {ours[name]})" for name in changed)

    # Cells and their names

    def _names_of(self, mask: object) -> pd.Index[Any] | None:
        """Return the names of the cells that a mask was made for, if it has a value for each of them."""
        return None if self._config.mask.n_obs is None else names_of("mask", mask)

    def check_cells(self, names: tuple[pd.Index[Any], ...] | None, collection: Mapping[str, Any] | None = None) -> None:
        """Raise if the mask was made for cells in a different order, or a loaded state for different cells.

        ``names`` are the ``obs_names`` of each dataset, None if they aren't known; ``collection`` identifies the
        datasets and cells.
        """
        if collection is not None and self._position.done and not self._position.finished:
            saved = {name: self._saved.get(name) for name in ("datasets", "cells")}
            check_identity(saved, dict(collection))
        if self._mask_names is not None and names is not None:
            check_names("mask" if self._config.sets is None else "obs", self._mask_names, names)
            self._mask_names = None

    # Checks

    def agreeing(self) -> Placement:
        """Return the place of this process, with its source only if that must be the same in all processes."""
        place = self.placement
        return place if place.framework is not None else replace(place, source="")

    def describe(self, place: Placement, n_obs: int, more: Mapping[str, Any]) -> Description:
        """Return this process's description of its next pass; ``more`` must also be the same in all processes."""
        more = {"iterations since set_epoch": self._position.passes, **more}
        return self.describe_at(place, n_obs, self._next(), more)

    def describe_at(self, place: Placement, n_obs: int, at: Position, more: Mapping[str, Any]) -> Description:
        """Return this process's description of a pass that begins at a position."""
        n_obs = integer("n_obs", n_obs, least=0, below=BOUND)
        if self._virtual_ranks is not None:
            more = {"virtual ranks": self._virtual_ranks, **more}
        return Description.of(place, self._config.identity(n_obs), at, self._plan(n_obs, at), more)

    def reading(self, place: Placement, n_obs: int, read: Read | None, last: Pass | None = None) -> Reading:
        """Return this process's report of the rows that it has read in a pass (default: the last one)."""
        n_obs, last = integer("n_obs", n_obs, least=0, below=BOUND), last or self._pass
        if last is None:
            self._check_workers_have_not_read()
            raise ValueError(
                "No iteration has started since set_epoch or load_state_dict. Call check_epoch_read before the next "
                "set_epoch."
            )
        if last.plan.n_cells != n_obs:
            raise ValueError(
                f"n_obs must be the number of rows of the last iteration, {last.plan.n_cells}, got {n_obs}. Pass "
                "loader.n_obs."
            )
        return Reading.of(self.describe_at(place, n_obs, last.position, {}), last, read, self._own_lanes)

    # Warnings

    def _warn_of_second_pass(self, plan: EpochPlan, position: Position) -> None:
        if position.passes and not position.done and not self._planner.is_same_next_epoch(plan):
            self._warn_once(
                "set_epoch() was not called since the last iteration, so every rank reads the same rows again, in a "
                "different order. Call set_epoch(epoch) on every rank before each epoch. (Lightning calls it on a "
                "StatefulLoader or its to_dataloader(num_workers=...), but not on a plain PyTorch DataLoader.)"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            warn(message)
            self._warned.add(message)  # not before: a filter may turn the warning into an error

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cut": None}

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), _workers_flag=SharedFlag(), _planner=copy.copy(self._planner))
        duplicate._warned = set(self._warned)
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = memo[id(self)] = copy.copy(self)
        # a subclass may hold anything; the pass becomes the same object as in the copy of its loader
        for name, value in vars(duplicate).items():
            if name != "_mask_names":  # names may belong to very many cells
                vars(duplicate)[name] = copy.deepcopy(value, memo)
        return duplicate

    def __repr__(self) -> str:
        config = self._config
        sets = "" if config.sets is None else f"sets={config.sets!r}, "
        virtual = "" if self._virtual_ranks is None else f"virtual_ranks={self._virtual_ranks}, "
        who, source = "rank=?, world_size=?", "deferred"
        if self._source.is_known:
            who, source = f"rank={self.rank}, world_size={self.world_size}", self.placement.source
        return (
            f"{type(self).__name__}({type(config.sampler).__name__}, {who}, remainder={config.remainder!r}, "
            f"sharding={getattr(config.sharding, '__name__', config.sharding)}, mask={shortened(self.mask)}, "
            f"seed={config.seed}, {sets}{virtual}epoch={self.epoch}, source={source!r})"
        )


_PACKAGES = str(Path(__file__).parent), str(Path(annbatch.__file__).parent)


def _is_annbatchs(frame: FrameType) -> bool:
    """Return True if a frame runs annbatch's code."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "annbatch"


def warn(message: str) -> None:
    """Warn at the line that called this package, directly or through annbatch's Loader."""
    warnings.warn(message, UserWarning, skip_file_prefixes=_PACKAGES)


def _differing_classes(name: str, classes: tuple[Classes, ...]) -> str | None:
    """Return a warning if ranks sample from different classes; else None."""
    everywhere = frozenset[str]().union(*(own for _, own in classes))
    lacking = [(rank, sorted(everywhere - own)) for rank, own in classes if own != everywhere]
    if not lacking:
        return None
    rank, missing = lacking[0]
    return (
        f"The shard of rank {rank} lacks {len(missing)} of the {len(everywhere)} classes of {name} "
        f"({', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}). Each rank applies the class weights to its "
        "own classes, so the job as a whole doesn't sample by these weights. Pass sharding='independent' to sample "
        "from all rows on every rank."
    )
