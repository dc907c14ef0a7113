"""The DistributedSampler: gives every rank its own share of what any annbatch sampler samples.

This is what users see of it. What it does is in :mod:`job`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from annbatch.abc import Sampler

from annbatch_distributed import checks
from annbatch_distributed.callers import check_not_within_annbatchs
from annbatch_distributed.checks import Gather, Tally, Timeout
from annbatch_distributed.config import Arguments, ShardingName, check_wrapped
from annbatch_distributed.job import Job, warn
from annbatch_distributed.lanes import Remainder
from annbatch_distributed.masks import AnyMask
from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.planner import StepSelection
from annbatch_distributed.ranks import Deferred, DistInfo, member
from annbatch_distributed.rows import BOUND, Rows, integer
from annbatch_distributed.sharding import Sharding
from annbatch_distributed.stream import LONGEST_HOLE, Pass

if TYPE_CHECKING:
    import pandas as pd


class DistributedSampler(Sampler):
    """Give every rank of a job its own share of what an annbatch sampler samples.

    The rows that the mask selects are shared out among the ranks, and a private copy of the wrapped sampler runs on
    this rank's share with a generator of its own. Nothing is communicated: every rank works out the same plan.

    How 10 rows go to 2 ranks with a batch size of 2 (repeats in brackets)::

        remainder  rank 0         rank 1         batches
        "drop"     0 1 2 3        4 5 6 7        2 and 2; epoch 0 loses rows 8 and 9, others later
        "keep"     0 1 2 3 4      5 6 7 8 9      3 and 3; can differ by one
        "exact"    0 1 2 3 4      5 6 7 8 9      3 and 3; always the same
        "pad"      0 1 2 3 4 [5]  5 6 7 8 9 [0]  3 and 3, all full

    Parameters
    ----------
    sampler
        Any :class:`annbatch.abc.Sampler` but another ``DistributedSampler``. It is copied, never modified, and changing
        it later changes nothing; but don't write into arrays of 1 MiB and more that it holds, which the copy shares.
    dist_info
        Where rank and world size come from: ``"torch"`` or ``"jax"``, which must have been initialised; ``"env"``, the
        variables that torchrun, Open MPI, MPICH, Intel MPI or Slurm's ``srun`` set; a callable that returns ``(rank,
        world_size)``; a :class:`Rank`; a torch ``ProcessGroup`` or ``DeviceMesh`` of one dimension; what
        :func:`mesh_ranks` returns for any mesh; or what knows the rank under a framework: Lightning's ``Trainer`` or
        ``Fabric``, accelerate's ``Accelerator`` or ``PartialState``, Ray Train's context. :func:`deferred` around any
        of them has it asked when the rank is first needed.
    enforce_equal_batches
        As in annbatch: True means ``remainder="drop"``, False means ``remainder="keep"``.
    remainder
        What becomes of the rows that don't divide evenly among ranks and batches; None leaves it to
        ``enforce_equal_batches``.

        ``"drop"``
            Every rank has the same number of full batches. The rows left over are lost in this epoch; any two
            consecutive epochs together read every row. (Class samplers, which need whole runs of a class, lose the last
            rows in every epoch.)
        ``"keep"``
            No row is lost, and ranks may differ by one batch: for evaluation without a collective in each step.
        ``"exact"``
            Every row once, and the same number of batches on every rank. A rank that would be a batch short halves one
            of its last batches.
        ``"pad"``
            Every rank has the same number of full batches; some rows are read a second time, and a load request has the
            key ``repeated``, which says for each of its rows whether it is a repeat.
    sharding
        Which rank has which rows: ``"contiguous"`` (:class:`Contiguous`), a stretch of rows for each rank, the same in
        every epoch; ``"shuffled"`` (:class:`Shuffled`), blocks of rows, dealt anew in every epoch, which needs a
        ``seed``; ``"independent"`` (:class:`Independent`), every rank draws from all rows, for samplers that draw with
        replacement; or a function ``order(rows, *, epoch, seed)`` of yours that returns the same :class:`Rows` in
        another order, which is cut into a stretch for each rank.
    mask
        The rows to share out: a slice, a list of slices, a boolean array or pandas Series with a value for each row of
        the collection, an integer array of rows in any order, or :class:`Rows`; always by position, though a
        :class:`StatefulLoader` compares the names of a boolean Series with those of its cells. It narrows down the
        wrapped sampler's own mask and can't reach beyond it; None takes all of that.
    seed
        Makes the order reproducible, within ``[0, 2**63)``; None derives it from the wrapped sampler's generator.
        ``"shuffled"`` deals rows by it, so it must be the same on every rank.
    virtual_ranks
        Shares the epoch out among so many virtual ranks, which the world size must divide, so that a step over all
        ranks has the same rows on any number of ranks. A rank joins the batches of several of them: ``batch_size`` and
        ``num_samples`` of the wrapped sampler are a virtual rank's, and what is said of ranks here is true of virtual
        ones.
    align
        Whole chunks of a rank's rows begin at multiples of so many rows, as chunks of the store do, and come before the
        ragged ends of its stretches. None takes the wrapped sampler's own chunk size, 1 leaves rows in their order. So
        do samplers that keep an order or draw with replacement, and every rank in epoch 0 where annbatch's own sampler
        has the same rows.
    read_through
        Holes of at most so many rows between rows that are asked for are read as well and left out of the batches,
        since to read a row takes less time than to begin another read. 0 reads no row that is in no batch.

    Raises
    ------
    TypeError
        If ``sampler`` is no sampler, or an argument has the wrong type.
    ValueError
        If an argument is not what it can be, or they don't go together: if the wrapped sampler has no batch size and
        ``remainder`` promises equal numbers of batches, or can't run on such shards.
    RuntimeError
        If the framework that ``dist_info`` names is not initialised, or no launcher has set its variables.

    Notes
    -----
    Which rows a rank owns depends on the arguments, on ``n_obs`` and on the epoch, never on what a rank did before. The
    order in which it reads them is a fresh one in every pass, and that of epoch ``e`` again after ``set_epoch(e)``.

    Unless the sharding is ``"independent"``, ``num_samples`` of the wrapped sampler counts per rank, class samplers
    draw from the rank's own share, and ``drop_last`` drops rows of the rank, as in annbatch. Each rank draws exactly
    ``num_samples`` rows: if they are no multiple of the batch size, its last batch is smaller under every policy.

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
    lost in this epoch: 128 rows, 0.8 % (15872:16000)
    to lose none: remainder="exact", "keep" or "pad"
    in memory: up to 2,048 rows on each rank
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        dist_info: DistInfo | Deferred,
        enforce_equal_batches: bool = True,
        remainder: Remainder | None = None,
        sharding: ShardingName | Sharding = "contiguous",
        mask: AnyMask | None = None,
        seed: int | None = None,
        virtual_ranks: int | None = None,
        align: int | None = None,
        read_through: int = LONGEST_HOLE,
    ) -> None:
        for warning in check_wrapped(sampler, DistributedSampler):
            warn(warning)
        arguments = Arguments.of(
            sampler,
            remainder=remainder,
            enforce_equal_batches=enforce_equal_batches,
            sharding=sharding,
            mask=mask,
            seed=seed,
            align=align,
        )
        read_through = integer("read_through", read_through, least=0, below=BOUND)
        self._job = Job(arguments, member(dist_info), virtual_ranks=virtual_ranks, read_through=read_through)
        self._job.take_names(mask)

    @property
    def rank(self) -> int:
        """Which process of the job this is."""
        return self._job.membership.rank.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._job.membership.rank.world_size

    @property
    def batch_size(self) -> int | None:
        """Rows of a full batch, as the wrapped sampler has it; of virtual ranks, those of all that this rank runs."""
        size = self._job.arguments.batch_size
        if size is None or self._job.virtual_ranks is None:  # a deferred rank may not be known yet
            return size
        return size * len(self._job.own_lanes)

    @property
    def virtual_ranks(self) -> int | None:
        """How many virtual ranks share out the rows, whatever the world size; None if the ranks themselves do."""
        return self._job.virtual_ranks

    @property
    def shuffle(self) -> bool:
        """Whether the wrapped sampler shuffles."""
        return self._job.arguments.sampler.shuffle

    @property  # type: ignore[override]  # annbatch's samplers know single slices only
    def mask(self) -> slice | list[slice] | Rows:
        """The rows that the ranks share out: a slice, several in ascending order, or rows.

        Assigning it takes effect with the next pass, which reads all of it. What can be assigned is what ``mask=``
        takes; ``slice(0, None)`` stands for all that the wrapped sampler's own mask allows.
        """
        return self._job.arguments.mask.given()

    @mask.setter
    def mask(self, value: AnyMask) -> None:
        check_not_within_annbatchs()
        self._job.begin_anew(self._job.arguments.with_mask(value))
        self._job.take_names(value)

    @property
    def rng(self) -> np.random.Generator:
        """What this job's randomness begins from: the seed's generator, or a copy of the wrapped sampler's.

        Reading or using it changes no pass. Assigning another begins the epoch anew from that one. Which rows a rank
        owns doesn't change with it: ``"shuffled"`` keeps the blocks of the seed.
        """
        arguments = self._job.arguments
        return np.random.default_rng(arguments.root_seed) if arguments.rng is None else copy.deepcopy(arguments.rng)

    @rng.setter
    def rng(self, value: np.random.Generator | None) -> None:
        self._job.begin_anew(self._job.arguments.with_rng(value))

    @property
    def epoch(self) -> int:
        """Which epoch the next pass belongs to: 0 until :meth:`set_epoch` says otherwise."""
        return self._job.progress.position.epoch

    @property
    def next_epoch(self) -> int:
        """Which epoch to begin or resume: this one, or the one after it if a pass through this one has come to its end.

        After a state was loaded: ``for epoch in range(sampler.next_epoch, n_epochs): sampler.set_epoch(epoch)``.
        """
        position = self._job.progress.position
        return position.epoch + bool(position.passes and not position.resumes)

    @property
    def batches_done(self) -> int:
        """How many batches of the epoch every rank had done before the next pass: 0 unless an epoch is resumed."""
        return self._job.progress.position.done

    @property
    def sampler(self) -> Self:
        """This sampler itself, where frameworks look for something whose ``set_epoch`` they can call.

        Lightning calls ``loader.batch_sampler.sampler.set_epoch``.
        """
        return self

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass belongs to, on every rank.

        It gives a new order, and under ``remainder="drop"`` other rows are lost. The same epoch gives the same order,
        but the epoch of a state that was loaded is resumed, of which nothing is left if the state was saved at its end.
        Passes that are open stay as they are.

        Raises
        ------
        ValueError
            If a state of a later epoch was loaded, and nothing of it was read.

        Examples
        --------
        >>> from annbatch.samplers import SequentialSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> for epoch in range(3):
        ...     sampler.set_epoch(epoch)
        ...     print(sampler.plan(10).lost)
        8:10
        6:8
        4:6
        """
        self._job.set_epoch(integer("epoch", epoch, least=0, below=BOUND))

    def state_dict(self, *, batches_done: int) -> dict[str, Any]:
        """Return how far the epoch is, as a few integers and strings that JSON can hold, the same on every rank.

        Parameters
        ----------
        batches_done
            How many batches of this epoch every rank has done, those before an earlier resume included. The sampler
            can't know: a loader takes a load request and yields many batches of it, and prefetching runs ahead. If all
            are done, the state leads to the next pass, or to no batches if the same epoch is set once more.
        """
        batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        return self._job.state(self._job.progress.position_at(batches_done, self._job.n_lanes))

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume where a state was saved, on every rank.

        The next pass yields the remaining batches of its epoch, bit for bit as the pass that was interrupted would
        have. Until then :meth:`n_batches` is the number of those. Setting the same epoch once more changes nothing.

        With another number of ranks, the remaining batches are cut into as many even stretches, in the order of the
        epoch: each is still read once, row for row. ``remainder`` says what becomes of those that don't divide evenly:
        under ``"drop"`` fewer batches than there are ranks are lost.

        Parameters
        ----------
        state
            What :meth:`state_dict` has returned, on any rank.
        strict
            Whether the state must be of a sampler with the same settings. False doesn't compare them; rows may then be
            read again, or not at all.

        Raises
        ------
        TypeError, ValueError
            If the state is damaged, of a newer format, or of a sampler with other settings: the message names each. Or
            if the epoch can't be resumed, because more batches are done than it has, or too few remain for the ranks.
            The sampler is then as it was.
        """
        self._job.load(state, strict=strict)

    def plan(self, n_obs: int) -> EpochPlan:
        """Return every rank's rows and batches in this epoch, the same on every rank; of virtual ranks, theirs.

        Parameters
        ----------
        n_obs
            The number of rows of the collection, over all ranks: ``loader.n_obs``.

        Raises
        ------
        ValueError
            If the window is too small, or the wrapped sampler can't run on some rank's rows: the same error on every
            rank.
        """
        return self._job.plan(n_obs)

    def n_batches(self, n_obs: int) -> int:
        """Return how many batches this rank yields in the next pass; it takes and raises what :meth:`plan` does."""
        return self._job.n_batches(n_obs)

    n_iters = n_batches  # as scripts for annbatch before 0.3 call it

    def rows_of(
        self, n_obs: int, steps: StepSelection, ranks: int | Sequence[int] | None = None, epoch: int | None = None
    ) -> pd.DataFrame:
        """Return which rows each rank has read in some steps of an epoch, or will read; nothing is read for it.

        Parameters
        ----------
        n_obs
            As for :meth:`plan`.
        steps
            Steps of the epoch, counted from 0, resumes included: one, a slice, or several. A step that is done is that
            of the ranks that ran it then; the others are those of this job.
        ranks, epoch
            Of which ranks; None for all. Of which epoch; None for the one that was set, loaded or begun last.

        Returns
        -------
        A table with the columns ``step``, ``rank`` and ``row``, in the order of steps, ranks, and rows of each batch.

        Raises
        ------
        IndexError, ValueError
            If the epoch has no such step; as for :meth:`plan`.

        Examples
        --------
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
        >>> sampler = DistributedSampler(RandomSampler(2, 1, 2), dist_info=Rank(0, 2), seed=0)
        >>> sampler.rows_of(12, steps=2, ranks=1)["row"].tolist()
        [11, 10]
        """
        return self._job.rows_of(n_obs, steps, ranks, epoch)

    def validate(self, n_obs: int) -> None:
        """Check that every rank can run on a collection of ``n_obs`` rows in this epoch.

        It raises what :meth:`plan` does, and holds for other epochs, unless a sampler or sharding of yours has others.
        """
        self.plan(n_obs)

    def check_ranks_agree(self, n_obs: int, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks of the job have the same configuration, and that each is another rank.

        Every process of the job calls it, best of all once before training. It compares the world size, ``n_obs``, the
        arguments of this sampler, the settings of the wrapped one, the epoch and how far it is, the plan, and the
        versions of the libraries; of processes that share a rank, such as tensor-parallel peers, the randomness too.

        Parameters
        ----------
        n_obs
            The number of rows of the collection, over all ranks: ``loader.n_obs``.
        timeout
            For how many seconds to wait for the other processes; or a :class:`datetime.timedelta`.
        gather
            How the processes reach each other where neither torch.distributed nor JAX knows them: a function that takes
            a text and returns those of all processes in the same order everywhere, such as mpi4py's ``comm.allgather``.

        Raises
        ------
        ValueError
            In every process, with the same message, if something differs, or is wrong in one of them: it names each
            difference, the values, and the ranks that have them.
        TimeoutError
            In every process, if one of them doesn't come, or fails while it waits for the others.
        RuntimeError
            If processes can't reach each other.
        """
        checks.ranks_agree(
            self._job.agreeing, lambda place: self._job.description(place, n_obs, {}), timeout=timeout, gather=gather
        )

    def check_epoch_read(
        self, n_obs: int, read: Tally, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read in the last pass what was planned.

        Every process of the job calls it, at the end of an epoch and before ``set_epoch``.

        Parameters
        ----------
        n_obs
            The number of rows of the collection, over all ranks.
        read
            The rows of each batch of this process in the pass, which :meth:`StatefulLoader.check_epoch_read` counts.
        timeout, gather
            As for :meth:`check_ranks_agree`.

        Returns
        -------
        A line that says what was read.

        Raises
        ------
        ValueError
            In every process, with the same message, if a rank has read other rows than planned, or more or less of
            them or in other numbers of batches; or if the ranks don't agree.
        TimeoutError, RuntimeError
            As for :meth:`check_ranks_agree`.
        """
        return checks.epoch_read(
            self._job.agreeing, lambda place: self._job.reading(place, n_obs, read), timeout=timeout, gather=gather
        )

    def sample(self, n_obs: int) -> Pass:
        """Begin a pass of this rank over its shard.

        Parameters
        ----------
        n_obs
            The number of rows of the collection, over all ranks.

        Returns
        -------
        An iterator of load requests for rows of the collection, which can be copied and pickled at any time.

        Raises
        ------
        ValueError, RuntimeError
            As for :meth:`plan`; or, while iterating, if the wrapped sampler doesn't keep its ``n_batches`` or its rows.
        """
        check_not_within_annbatchs()
        return self._job.begin(n_obs)

    def _sample(self, n_obs: int) -> Pass:
        return self.sample(n_obs)

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), _job=copy.copy(self._job))
        return duplicate

    def __repr__(self) -> str:
        job, arguments = self._job, self._job.arguments
        virtual = "" if job.virtual_ranks is None else f"virtual_ranks={job.virtual_ranks}, "
        who, source = "rank=?, world_size=?", "deferred"
        if job.is_known:
            who, source = f"rank={self.rank}, world_size={self.world_size}", job.membership.source
        return (
            f"{type(self).__name__}({type(arguments.sampler).__name__}, {who}, remainder={arguments.remainder!r}, "
            f"sharding={getattr(arguments.sharding, '__name__', arguments.sharding)}, mask={shortened(self.mask)}, "
            f"seed={arguments.seed}, {virtual}epoch={self.epoch}, source={source!r})"
        )
