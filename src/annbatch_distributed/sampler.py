"""The DistributedSampler: shards what any annbatch sampler samples across the ranks of a job.

It is one rank's side of a job, and holds

1. a :class:`Config`, the validated arguments;
2. a :class:`Planner`, which computes the plan of an epoch and the lanes of its ranks, the same on every rank;
3. a :class:`Position`, where the next pass begins. It moves when an epoch is set, a state is loaded, or a pass begins;
4. the :class:`Pass` begun last. A state is the position of that pass, after the batches that its consumer has done.
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
from annbatch_distributed.ranks import Deferred, DistInfo, Placement, placement_again, placement_of, rank_now
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
            Every rank has the same number of full batches. The rows left over are dropped in this epoch; any two
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
        Which rank has which rows: ``"contiguous"``, a contiguous range of rows for each rank, the same in every epoch;
        ``"shuffled"`` (:class:`Shuffled`), blocks of rows that are assigned to ranks again in every epoch, which needs
        a ``seed``; ``"independent"``, every rank draws from all rows, for samplers that draw with replacement; or a
        function ``order(rows, *, epoch, seed)`` that returns the same :class:`Rows` in another order, which is cut into
        a contiguous range for each rank.
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
    sets
        Sets of cells, which the wrapped sampler samples in place of cells: ``batch_size``, ``chunk_size`` and the like
        are then numbers of sets, and what is said of rows here is true of sets. Cells are selected by the mask of
        :meth:`Sets.from_obs`.

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
    ``num_samples`` rows if it draws with replacement: if they are no multiple of the batch size, its last batch is
    smaller under every policy. Without replacement, annbatch fills the last batch.

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
    dropped in this epoch: 128 rows, 0.8 % (15872:16000)
    to drop none: remainder="exact", "keep" or "pad"
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
        # asked again by reshard; it stays in this process
        self._dist_info: DistInfo | Deferred | None = dist_info
        self._placement = placement_of(dist_info)
        if not isinstance(self._placement, Deferred):
            _ = self._own_lanes  # raises if this number of ranks can't run them
        self._planner = Planner(self._config, has_virtual_ranks=virtual_ranks is not None)
        # where the next pass begins, and the pass begun last since that was set
        self._position = Position()
        self._pass: Pass | None = None
        # the pass that reshard has cut, as long as the rest of it comes next
        self._cut: Pass | None = None
        # True until a pass begins after a state was loaded; True once an epoch was set, which workers rely on
        self._is_loaded = self._is_set = False
        # set by the workers of a DataLoader, which this process doesn't hear of otherwise
        self._workers_flag = SharedFlag()
        #: Number of times that the mask, the rng or the rank was changed, which persistent workers can't learn of.
        self.n_changes = 0
        # the rows and datasets of the state that was loaded, and the names of the cells that a mask was made for, until
        # a loader has compared them with its own
        self._saved: Identity = {}
        self._mask_names = self._names_of(mask) if sets is None else sets.names
        self._warned: set[str] = set()

    @property
    def rank(self) -> int:
        """Which process of the job this is."""
        return self.placement.rank.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.placement.rank.world_size

    @property
    def batch_size(self) -> int | None:
        """Rows of a full batch, as the wrapped sampler has it; of virtual ranks, those of all that this rank runs."""
        size = self._config.batch_size
        if size is None or self._virtual_ranks is None:  # a deferred rank may not be known yet
            return size
        return size * len(self._own_lanes)

    @property
    def virtual_ranks(self) -> int | None:
        """How many virtual ranks share out the rows, whatever the world size; None if the ranks themselves do."""
        return self._virtual_ranks

    @property
    def remainder(self) -> Remainder:
        """The policy for rows that don't divide evenly."""
        return self._config.remainder

    @property
    def shuffle(self) -> bool:
        """Whether the wrapped sampler shuffles."""
        return self._config.sampler.shuffle

    @property  # type: ignore[override]  # annbatch's samplers know single slices only
    def mask(self) -> slice | list[slice] | Rows:
        """The rows that the ranks share out: a slice, several in ascending order, or rows.

        Assigning it takes effect with the next pass, which reads all of it. What can be assigned is what ``mask=``
        takes; ``slice(0, None)`` stands for all that the wrapped sampler's own mask allows.
        """
        return self._config.mask.given()

    @mask.setter
    def mask(self, value: AnyMask) -> None:
        if sys._getframe(1).f_globals.get("__name__") == annbatch.samplers.DistributedSampler.__module__:
            raise ValueError(
                "An annbatch.samplers.DistributedSampler around one of annbatch_distributed shards rows that are "
                "sharded already, and rows would never be read. Leave it out."
            )
        self._reconfigure(self._config.with_mask(value))
        self._mask_names = self._names_of(value)

    @property
    def rng(self) -> np.random.Generator:
        """What this job's randomness begins from: the seed's generator, or a copy of the wrapped sampler's.

        Reading or using it changes no pass. Assigning another begins the epoch anew from that one. Which rows a rank
        owns doesn't change with it: ``"shuffled"`` keeps the blocks of the seed.
        """
        config = self._config
        return np.random.default_rng(config.root_seed) if config.rng is None else copy.deepcopy(config.rng)

    @rng.setter
    def rng(self, value: np.random.Generator | None) -> None:
        self._reconfigure(self._config.with_rng(value))

    @property
    def epoch(self) -> int:
        """Which epoch the next pass belongs to: 0 until :meth:`set_epoch` says otherwise."""
        return self._position.epoch

    @property
    def next_epoch(self) -> int:
        """Which epoch to begin or resume: this one, or the one after it if a pass through this one has come to its end.

        After a state was loaded: ``for epoch in range(sampler.next_epoch, n_epochs): sampler.set_epoch(epoch)``.
        """
        return self._position.epoch + self._position.finished

    @property
    def batches_done(self) -> int:
        """How many batches of the epoch every rank had done before the next pass: 0 unless an epoch is resumed."""
        return self._begins_at.done

    @property
    def sampler(self) -> Self:
        """This sampler itself, where frameworks look for something whose ``set_epoch`` they can call.

        Lightning calls ``loader.batch_sampler.sampler.set_epoch``.
        """
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, on every rank.

        Each epoch has its own order, and under ``remainder="drop"`` drops other rows than the one before. Setting an
        epoch again gives the same order again. The epoch of a state that was loaded is resumed: if the state is of its
        end, nothing is left of it. Passes that are open stay as they are.

        Raises
        ------
        ValueError
            If a state of a later epoch was loaded, and no pass was begun since.

        Examples
        --------
        >>> from annbatch.samplers import SequentialSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
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
                f"A state of epoch {position.epoch} was loaded, and set_epoch({epoch}) would give it up before any of "
                "it is read. Begin with loader.next_epoch. (Fabric's setup_dataloaders counts epochs from 0: iterate "
                "over the loader itself.)"
            )
        self._is_set = True
        # frameworks set the epoch of a state that they have just loaded
        if epoch != position.epoch or not (self._is_loaded or position.done):
            self.go_to(Position(epoch))

    def state_dict(self, *, batches_done: int) -> dict[str, Any]:
        """Return how far the epoch is, as a few integers and strings that JSON can hold, the same on every rank.

        Parameters
        ----------
        batches_done
            How many batches of this epoch every rank has done, those before an earlier resume included. The sampler
            can't know: a loader takes a load request and yields many batches of it, and prefetching runs ahead. If all
            are done, the state leads to the next pass, or to no batches if the same epoch is set once more.
        """
        return self.state_at(integer("batches_done", batches_done, least=0, below=BOUND), {})

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume where a state was saved, on every rank.

        The next pass yields the remaining batches of its epoch, bit for bit as the pass that was interrupted would
        have. Until then :meth:`n_batches` is the number of those. Setting the same epoch once more changes nothing.

        With another number of ranks, the remaining batches are cut into as many even stretches, in the order of the
        epoch: each is still read once, row for row. ``remainder`` says what becomes of those that don't divide evenly:
        under ``"drop"`` fewer batches than there are ranks are dropped.

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
        self.resume(state, strict=strict)

    def reshard(self, dist_info: DistInfo | Deferred | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch, without a restart.

        Every process of the new job calls it after the same step, before the next batch. It does what
        :meth:`load_state_dict` would do after a restart: the batches that are left of the epoch are divided among the
        new ranks. A process that joins the job loads the state of any other.

        Parameters
        ----------
        dist_info
            Source of the new rank and world size, as for :class:`DistributedSampler`. None asks the same source again.
        batches_done
            Number of batches of this epoch that every rank has done, as for :meth:`state_dict`. Required if a pass was
            begun; loaders count them.

        Raises
        ------
        TypeError, ValueError
            If the epoch can't be resumed on this number of ranks, or ``dist_info`` is none. The sampler is then as it
            was.

        Examples
        --------
        >>> from annbatch.samplers import SequentialSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
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
                "A pass was begun, and the sampler can't know how many of its batches are done. Pass batches_done, or "
                "call reshard of the loader, which counts them."
            )
        self.reshard_at(self.state_at(batches_done, {}), dist_info)

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
        RuntimeError
            If the wrapped sampler yields batches for a rank for which its ``n_batches`` says 0.
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
        """Return how many batches this rank yields in the next pass; it takes and raises what :meth:`plan` does."""
        n_obs, position = integer("n_obs", n_obs, least=0, below=BOUND), self._next()
        with worker_info_hidden(current_worker()):
            remaining = self._remaining(n_obs, position)
        return max(len(remaining[lane]) for lane in self._own_lanes)

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
        return self.rows_in_epoch(integer("n_obs", n_obs, least=0, below=BOUND), self._position_of(epoch), steps, ranks)

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
        checks.ranks_agree(self.agreeing, lambda place: self.describe(place, n_obs, {}), timeout=timeout, gather=gather)

    def check_epoch_read(
        self, n_obs: int, read: Read, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read in the last pass what was planned.

        Every process of the job calls it, at the end of an epoch and before ``set_epoch``.

        Parameters
        ----------
        n_obs
            The number of rows of the collection, over all ranks.
        read
            Rows of each batch that this process has read in the pass: arrays such as ``batch["index"]``.
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
            self.agreeing, lambda place: self.reading(place, n_obs, read), timeout=timeout, gather=gather
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
        if self._config.sets is not None and _is_annbatchs(sys._getframe(1)):
            raise RuntimeError(
                "annbatch's Loader doesn't say which cells are of which set, or controls. Read sets with a "
                "StatefulLoader, which takes the same arguments."
            )
        worker, position = current_worker(), self._next()
        if worker is not None:
            self._workers_flag.set()
            position = self._position_in_worker(position)
        begun = self.begin(n_obs, position, worker)
        begun.on_next, begun.on_end = partial(self.check_rank, begun), partial(self.end, begun)
        return begun

    def _sample(self, n_obs: int) -> Pass:
        return self.sample(n_obs)

    # Of this rank. Methods without an underscore are for loaders and checks of this package.

    @property
    def placement(self) -> Placement:
        """This process in its job; a deferred one is asked now."""
        return self._placement.placement() if isinstance(self._placement, Deferred) else self._placement

    @property
    def framework_object(self) -> object:
        """Lightning's trainer or another object that ``dist_info`` names; None if it names another thing."""
        return self._placement.framework_object if isinstance(self._placement, Deferred) else None

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
                f"virtual_ranks={self._virtual_ranks} must be a multiple of the world size, which is {world_size}. Run "
                f"it on {', '.join(map(str, fitting[:-1]))} or {fitting[-1]} ranks."
            )
        return range(rank * n_own, (rank + 1) * n_own)

    @property
    def _n_lanes(self) -> int:
        """Number of lanes of the job: one for each rank, or each virtual rank."""
        return len(self._own_lanes) * self.world_size

    # Of the plan

    def _plan(self, n_obs: int, position: Position) -> EpochPlan:
        """Return the plan of the epoch of a position, which has a segment."""
        if position.done and self._saved.get("n_obs") not in (None, n_obs):
            raise ValueError(
                f"The state is of a collection of {self._saved['n_obs']} rows, and this one has {n_obs}. Load a state "
                "of this collection."
            )
        plan = self._planner.plan(n_obs, position.epoch, position.segments[0].n_lanes)
        if warning := _differing_classes(type(self._config.sampler).__name__, self._planner.classes):
            self._warn_once(warning)
        return plan

    def _remaining(self, n_obs: int, position: Position) -> list[Lane]:
        """Return what each lane of the job has to read from a position on."""
        self._plan(n_obs, position)
        *_, (_, n_workers, done) = position.segments
        return [lane.after(n_workers, done) for lane in self._planner.lanes(n_obs, position)]

    def _pass_of(self, plan: EpochPlan, lanes: list[Lane], position: Position, n_batches: int = 0) -> Pass:
        """Return a pass over some lanes."""
        config = self._config
        rank = self.placement.rank
        return Pass(config.sampler, plan, lanes, config.root_seed, position, n_batches, self._read_through, rank)

    def n_left(self, n_obs: int, position: Position) -> int:
        """Return the number of batches that the longest lane of the job has left of the epoch of a position."""
        with worker_info_hidden(current_worker()):
            return max(map(len, self._remaining(n_obs, position)))

    def plan_at(self, n_obs: int, position: Position) -> EpochPlan:
        """Return the plan of the epoch of a position, which has a segment."""
        with worker_info_hidden(current_worker()):
            return self._plan(n_obs, position)

    def rows_in_epoch(
        self, n_obs: int, position: Position, steps: StepSelection, ranks: int | Sequence[int] | None
    ) -> pd.DataFrame:
        """Return which rows each rank has in some steps of the epoch of a position, as :meth:`rows_of` does."""
        import pandas as pd

        wanted = None if ranks is None else integers("ranks", np.atleast_1d(ranks), below=MOST_RANKS)
        n_own = len(self._own_lanes)

        def rank_of(lane: int, n_lanes: int) -> int:
            # lanes of ranks that joined several are numbered through; of other numbers of lanes, a rank is a lane
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
                # behind the sets of the rank's other lanes, as in its batch
                of_sets["set"].append(n_before[place] + which)
                n_before[place] += len(numbers)
            rows[1:] = [own.rows for own, _ in cells]
            of_sets["is_control"] = [np.zeros(0, dtype=np.bool_), *(own.are_controls for own, _ in cells)]
        # (batches, 2), repeated to (rows, 2): the step and the rank of each row
        of_rows = np.repeat(np.array(places, dtype=np.int64).reshape(-1, 2), list(map(len, rows[1:])) or 0, axis=0)
        columns = {"step": of_rows[:, 0], "rank": of_rows[:, 1], "row": np.concatenate(rows)}
        return pd.DataFrame(columns | {name: np.concatenate(parts) for name, parts in of_sets.items()})

    # Of the position

    def go_to(self, position: Position, *, is_loaded: bool = False) -> None:
        """Let the next pass begin at a position, whatever came before it."""
        self._position, self._pass, self._cut, self._is_loaded = position, None, None, is_loaded
        if not is_loaded:
            self._saved = {}
        if current_worker() is None:
            self._workers_flag.clear()

    def _reconfigure(self, config: Config) -> None:
        """Read other rows, or in another order, from the next pass on, which is the first of its epoch."""
        self._config = config
        self._planner = Planner(config, has_virtual_ranks=self._virtual_ranks is not None)
        self.n_changes += 1
        self.go_to(Position(self.epoch))

    @property
    def _begins_at(self) -> Position:
        """Where the next pass begins; of an epoch that a state has finished, and that is set once more, at its end."""
        is_set_again = self._is_loaded and self._is_set
        return self._position.after() if self._position.finished and not is_set_again else self._position

    def _next(self, n_workers: int = 1) -> Position:
        """Return where the next pass begins; it is in the last segment."""
        return self.here(self._begins_at, n_workers)

    def here(self, position: Position, n_workers: int = 1) -> Position:
        """Return a position with a last segment of this job's lanes, and of some workers."""
        # samplers that keep an order have the same batches by any number of workers
        return position.with_lanes(self._n_lanes, n_workers if self.shuffle else 1)

    def _position_of(self, epoch: int | None) -> Position:
        """Return where an epoch whose rows are asked for is: by default, the epoch begun last, or else the next one."""
        if self._pass is None and epoch is None:
            self._check_workers_have_not_read()
        position = self._position if self._pass is None else self._pass.position
        n_workers = position.segments[-1].n_workers if position.segments else 1
        if epoch is not None and epoch != position.epoch:
            position = Position(integer("epoch", epoch, least=0, below=BOUND))
        return position.with_lanes(self._n_lanes, n_workers)

    def _position_in_worker(self, position: Position) -> Position:
        """Return where a pass begins in a worker of a ``DataLoader`` that doesn't tell it."""
        if position.done or (self._is_set and position.passes):
            raise RuntimeError(
                "The workers of a DataLoader can't know where this pass begins: a state was loaded, or a pass was "
                "begun since set_epoch. Make the DataLoader with loader.to_dataloader(num_workers=...) of a "
                "StatefulLoader, which tells them; or call set_epoch(epoch) before each epoch, and pass "
                "persistent_workers=False."
            )
        # if nobody sets epochs, torch's seed for all workers of an iteration gives each iteration its own order
        return position if self._is_set else replace(position, passes=base_seed() + position.passes)

    def _check_workers_have_not_read(self) -> None:
        if self._workers_flag.is_set:
            raise RuntimeError(
                "The workers of a DataLoader may have begun a pass, and it isn't known here how far they are. Make the "
                "DataLoader with loader.to_dataloader(num_workers=...) of a StatefulLoader, whose state_dict() knows."
            )

    # Of the pass

    @property
    def last_pass(self) -> Pass | None:
        """The pass begun last; None if none was since an epoch was set or a state loaded."""
        return self._pass

    def check_is_last(self, begun: Pass) -> None:
        """Raise a RuntimeError if another pass was begun since one that is being read, or this is another rank now."""
        if begun.rank != self.placement.rank:
            self.check_rank(begun)
        if self._pass not in (None, begun):  # None after set_epoch, which leaves open passes as they are
            raise RuntimeError(
                "Another pass over this loader was begun, which has ended this one: a loader and what its "
                "to_dataloader() returns have one pass at a time. For a look at batches in the middle of an epoch, "
                "make another loader, with a sampler of its own."
            )

    def check_rank(self, begun: Pass) -> None:
        """Raise a RuntimeError if the ranks have changed since a pass was begun."""
        here, remedy = self.placement.rank, "Iterate over the loader again."
        if begun.rank == here and current_worker() is None:
            here = rank_now(self._dist_info, self.placement)
            remedy = "Call loader.reshard() in every process after the same step."
        if begun.rank != here:
            raise RuntimeError(
                f"The ranks have changed since this pass was begun: this process was {begun.rank}, and is {here} now. "
                f"{remedy}"
            )

    @contextmanager
    def resharded(self, dist_info: DistInfo | Deferred | None) -> Iterator[None]:
        """Change the rank, and resume in this context; if that raises, the rank is as it was."""
        before, dist_info = (self._placement, self._dist_info), self._dist_info if dist_info is None else dist_info
        if dist_info is None:
            raise ValueError(
                "The sampler was pickled in another process, where its dist_info stayed. Pass reshard(dist_info=...)."
            )
        try:
            self._placement, self._dist_info = placement_again(dist_info), dist_info
            yield
        except BaseException:
            self._placement, self._dist_info = before
            raise
        self.n_changes += 1

    def reshard_at(self, state: Mapping[str, Any], dist_info: DistInfo | Deferred | None) -> None:
        """Change the rank, and resume at a state of this sampler."""
        cut = self._pass or self._cut
        saved = self._saved  # what a loader hasn't compared with its collection yet
        with self.resharded(dist_info):
            self.resume(state, strict=True)
        self._cut = cut
        self._saved |= {name: part for name, part in saved.items() if part is not None}

    def has_cut(self, begun: Pass) -> bool:
        """Return True if the ranks have changed within a pass, and no other epoch was set since."""
        return begun is self._cut

    def has_left(self, begun: Pass) -> bool:
        """Return True if the ranks have changed within a pass, and the rest of it comes next."""
        return self.has_cut(begun) and not self._position.finished

    def begin(self, n_obs: int, position: Position | None = None, worker: Worker | None = None) -> Pass:
        """Begin a pass of this rank, or of a worker's part of it, at the next position or at a given one."""
        position = position or self._next()
        begun = self.pass_at(integer("n_obs", n_obs, least=0, below=BOUND), position, worker)
        if worker is None or not worker.number:  # one warning is enough
            self._warn_of_second_pass(begun.plan, position)
        self._pass, self._cut, self._is_loaded = begun, None, False
        # the rest of a resumed epoch stays next until it has been read to its end: a look at a batch doesn't lose it
        self._position = position if position.done else position.after()
        return begun

    def pass_at(self, n_obs: int, position: Position, worker: Worker | None = None) -> Pass:
        """Return the pass of this rank, or of a worker's part of it, that begins at a position."""
        _ = self.placement  # before the worker is hidden, which has it from its process
        with worker_info_hidden(current_worker()):
            plan, lanes = self._plan(n_obs, position), self._planner.lanes(n_obs, position)
        *_, (_, n_workers, done) = position.segments
        own = [lanes[lane] for lane in self._own_lanes]
        if worker is None:
            own = [lane.after(n_workers, done) for lane in own]
        else:
            # torch collects from worker 0 first, which has the part of the worker whose turn it is after `done` batches
            part = Worker((worker.number + done) % worker.n_workers, worker.n_workers)
            n_done = len(range(part.number, done, part.n_workers))
            own = [lane.of_worker(part, keeps_order=not self.shuffle).after(1, n_done) for lane in own]
        n_batches = position.done if position.finished else position.done_before + max(map(len, lanes))
        return self._pass_of(plan, own, position, n_batches)

    def begin_by_workers(self, n_obs: int, n_workers: int) -> Pass:
        """Begin the next pass in this process, for workers that are told its position."""
        begun = self.begin(n_obs, self._next(n_workers))
        begun.is_by_workers = True
        return begun

    def end(self, ended: Pass) -> None:
        """Take note that a pass has come to its end."""
        if ended is self._pass:
            self._position = replace(ended.position, segments=(), finished=True)

    # Of states

    def state_at(self, batches_done: int | None, collection: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state after some batches of the epoch, with what a loader knows of its collection.

        None, before a pass is begun, stands for the batches that are done then.
        """
        if self._pass is None and (batches_done is None or (self._position.finished and not batches_done)):
            return self._state(self._position.with_lanes(self._n_lanes), collection)
        assert batches_done is not None  # a loader that has begun a pass knows how far it is
        # before a pass is begun, it may go back to an earlier number of ranks
        position, least, n_batches = self._next(), 0, BOUND
        if self._pass is not None:
            position, least, n_batches = self._pass.position, self._pass.position.done_before, self._pass.n_batches
        elif batches_done > position.done:
            self._check_workers_have_not_read()
        if not least <= batches_done <= n_batches:
            raise ValueError(
                f"batches_done must be at least {least}, which were done before this pass, and at most {n_batches}, "
                f"the batches of its epoch, got {batches_done}."
            )
        return self._state(position.at(batches_done, n_batches), collection)

    def _state(self, position: Position, collection: Mapping[str, Any]) -> dict[str, Any]:
        return self.state_of(position, self._n_obs, collection)

    def state_of(self, position: Position, n_obs: Any, collection: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401 a state may have anything
        """Return a position as a state of this sampler."""
        return to_state(position, self.identity(n_obs, collection))

    def identity(self, n_obs: Any, collection: Mapping[str, Any]) -> Identity:  # noqa: ANN401 a state may have anything
        """Return what the rows and their order follow from, with what a loader knows of its collection."""
        return self._config.identity(n_obs) | dict(collection)

    @property
    def _n_obs(self) -> Any:  # noqa: ANN401 a state may have anything
        """Number of rows of the collection, as far as a pass or a state says."""
        return self._saved.get("n_obs") if self._pass is None else self._pass.plan.n_cells

    def resume(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool,
        n_obs: int | None = None,
        collection: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a state for a collection of which the number of rows is known, or also its datasets and cells."""
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
                        f"The state can't be resumed here. {error} To give up the rest of epoch {position.epoch}, call "
                        f"set_epoch({position.epoch + 1}) instead."
                    ) from error
        if changed:
            warn(
                f"The state was saved by {changed}. Batches that are left of epoch {position.epoch} may differ from "
                "those that the interrupted job would have had; its end is checked without the batches before."
            )
        self.go_to(position, is_loaded=True)
        self._saved, self._planner, self._is_set = saved, planner, False

    def compared(
        self, saved: Identity, n_obs: int | None, collection: Mapping[str, Any], *, is_within: bool
    ) -> tuple[Identity, Identity]:
        """Return what must be equal of the identity of a state, saved within an epoch or not, and of that here."""
        # the mask of a state may have been saved before the number of rows was known, which decides how it is written
        n_saved = saved.get("n_obs")
        n_known = n_saved if isinstance(n_saved, int) else n_obs
        here = self.identity(n_known, {"n_obs": self._n_obs, **collection})
        if isinstance(saved.get("rows"), dict):  # it may have been saved before the number of rows was known
            saved = saved | {"rows": open_ended(saved["rows"], n_known)}
        if not is_within:  # there is no order to restore
            here |= {name: saved.get(name) for name in ("datasets", "cells", "root")}
        elif n_obs is not None:
            here["n_obs"] = n_obs
        return saved | {"versions": None}, here | {"versions": None}

    def changed_versions(self, saved: Identity) -> str:
        """Return the versions of a state that differ from those here, in words; empty if none do."""
        theirs, ours = dict(saved.get("versions") or {}), self._config.identity(None)["versions"]
        changed = [name for name, version in sorted(ours.items()) if theirs.get(name, version) != version]
        return ", ".join(f"{name} {theirs[name]}, and this is {name} {ours[name]}" for name in changed)

    # Of cells and their names

    def _names_of(self, mask: object) -> pd.Index[Any] | None:
        """Return the names of the cells that a mask was made for, if it has a value for each of them."""
        return None if self._config.mask.n_obs is None else names_of("mask", mask)

    def check_cells(self, names: tuple[pd.Index[Any], ...] | None, collection: Mapping[str, Any] | None = None) -> None:
        """Raise if the mask was made for cells in another order, or the next pass resumes the state of other cells.

        ``names`` are the names of the cells of each dataset, None if they aren't known; ``collection`` is what tells
        datasets and cells from others.
        """
        if collection is not None and self._position.done and not self._position.finished:
            saved = {name: self._saved.get(name) for name in ("datasets", "cells")}
            check_identity(saved, dict(collection))
        if self._mask_names is not None and names is not None:
            check_names("mask" if self._config.sets is None else "obs", self._mask_names, names)
            self._mask_names = None

    # Of checks

    def agreeing(self) -> Placement:
        """Return the place of this process, with the source only where other processes have the same."""
        place = self.placement
        return place if place.framework is not None else replace(place, source="")

    def describe(self, place: Placement, n_obs: int, more: Mapping[str, Any]) -> Description:
        """Return what this process says of its next pass, with ``more`` that must be the same in all processes."""
        return self.describe_at(place, n_obs, self._next(), {"passes since set_epoch": self._position.passes, **more})

    def describe_at(self, place: Placement, n_obs: int, at: Position, more: Mapping[str, Any]) -> Description:
        """Return what this process says of a pass that begins at a position."""
        n_obs = integer("n_obs", n_obs, least=0, below=BOUND)
        if self._virtual_ranks is not None:
            more = {"virtual ranks": self._virtual_ranks, **more}
        return Description.of(place, self._config.identity(n_obs), at, self._plan(n_obs, at), more)

    def reading(self, place: Placement, n_obs: int, read: Read | None, last: Pass | None = None) -> Reading:
        """Return what this process says of a pass, by default the one begun last, of which it has read some rows."""
        n_obs, last = integer("n_obs", n_obs, least=0, below=BOUND), last or self._pass
        if last is None:
            self._check_workers_have_not_read()
            raise ValueError("no pass was begun since the epoch was set or a state loaded; check before set_epoch")
        if last.plan.n_cells != n_obs:
            raise ValueError(f"n_obs must be that of the last pass, {last.plan.n_cells}, got {n_obs}")
        return Reading.of(self.describe_at(place, n_obs, last.position, {}), last, read, self._own_lanes)

    # Of warnings

    def _warn_of_second_pass(self, plan: EpochPlan, position: Position) -> None:
        if position.passes and not position.done and not self._planner.is_same_next_epoch(plan):
            self._warn_once(
                "A second pass without set_epoch: every rank reads the rows that it had last time, in another order, "
                "although other epochs have the rows dealt anew or lose other ones. Call set_epoch(epoch) on every "
                "rank before each epoch. (A torch DataLoader hides set_epoch from Lightning; what "
                "loader.to_dataloader(num_workers=...) returns doesn't.)"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            warn(message)
            self._warned.add(message)  # not before: a filter may have made an error of it

    def __getstate__(self) -> dict[str, Any]:
        # a function or a process group stays in this process, which alone can ask it
        dist_info = self._dist_info if isinstance(self._dist_info, Deferred) else None
        return vars(self) | {"_dist_info": dist_info, "_cut": None}

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), _workers_flag=SharedFlag(), _planner=copy.copy(self._planner))
        duplicate._warned = set(self._warned)
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = memo[id(self)] = copy.copy(self)
        # a subclass may hold anything; the pass becomes the same object as in the copy of its loader
        for name, value in vars(duplicate).items():
            # names may belong to very many cells, and dist_info may be a trainer
            if name not in ("_mask_names", "_dist_info"):
                vars(duplicate)[name] = copy.deepcopy(value, memo)
        return duplicate

    def __repr__(self) -> str:
        config = self._config
        sets = "" if config.sets is None else f"sets={config.sets!r}, "
        virtual = "" if self._virtual_ranks is None else f"virtual_ranks={self._virtual_ranks}, "
        who, source = "rank=?, world_size=?", "deferred"
        if not isinstance(self._placement, Deferred) or self._placement.is_known:
            who, source = f"rank={self.rank}, world_size={self.world_size}", self.placement.source
        return (
            f"{type(self).__name__}({type(config.sampler).__name__}, {who}, remainder={config.remainder!r}, "
            f"sharding={getattr(config.sharding, '__name__', config.sharding)}, mask={shortened(self.mask)}, "
            f"seed={config.seed}, {sets}{virtual}epoch={self.epoch}, source={source!r})"
        )


_PACKAGES = str(Path(__file__).parent), str(Path(annbatch.__file__).parent)


def _is_annbatchs(frame: FrameType) -> bool:
    """Return True if code of annbatch has called."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "annbatch"


def warn(message: str) -> None:
    """Warn at the line that called this package, directly or by annbatch's Loader."""
    warnings.warn(message, UserWarning, skip_file_prefixes=_PACKAGES)


def _differing_classes(name: str, classes: tuple[Classes, ...]) -> str | None:
    """Return a warning if ranks can draw different classes; else None."""
    everywhere = frozenset[str]().union(*(own for _, own in classes))
    lacking = [(rank, sorted(everywhere - own)) for rank, own in classes if own != everywhere]
    if not lacking:
        return None
    rank, missing = lacking[0]
    return (
        f"The ranks of {name} can't all draw the same classes: there are {len(everywhere)}, and the rows of rank "
        f"{rank} lack {len(missing)} of them ({', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}). Each "
        "rank weighs the classes that it has, so that the job as a whole doesn't draw by the weights that were given. "
        "With sharding='independent' every rank draws from all rows."
    )
