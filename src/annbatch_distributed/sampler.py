"""The DistributedSampler: gives every rank its own share of what any annbatch sampler samples.

It puts the other modules together and does no arithmetic of its own:

1. :mod:`ranks` says which rank this is, :mod:`sharding` which rows every rank owns in an epoch, and :mod:`counts` how
   many batches they make.
2. A :mod:`pass <passes>` runs a private copy of the wrapped sampler on local rows, with this rank's own generator, and
   turns what that yields into requests for global rows.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Self

import annbatch
import numpy as np
from annbatch.abc import Sampler

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Reading, Tally
from annbatch_distributed.integers import BOUND, integer
from annbatch_distributed.masks import Mask, resolve_mask
from annbatch_distributed.names import names_of
from annbatch_distributed.passes.compatibility import (
    check_batch_size,
    check_interface,
    check_not_within_annbatchs,
    check_shares_out_nothing,
    checked_rng,
    chunk_grid,
    own_mask,
    rank_warning,
    resolve_remainder,
    resolve_sharding,
)
from annbatch_distributed.passes.fingerprint import fingerprint
from annbatch_distributed.passes.holes import LONGEST
from annbatch_distributed.passes.private_copy import first_generator, make_numbers_ints, private_copy, samplers_in
from annbatch_distributed.passes.randomness import draw_root_seed
from annbatch_distributed.passes.run import Pass
from annbatch_distributed.passes.traits import (
    is_random,
)
from annbatch_distributed.planner import Planner, check_segments
from annbatch_distributed.progress import Begun, Progress
from annbatch_distributed.ranks import Deferred, Membership, member
from annbatch_distributed.ranks.rank import MOST_RANKS
from annbatch_distributed.ranks.worker import current_worker, worker_info_hidden
from annbatch_distributed.state import Position, check_identity, check_worker, from_state, to_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from annbatch_distributed.checks import Gather, Timeout
    from annbatch_distributed.lanes import Worker
    from annbatch_distributed.masks import AnyMask
    from annbatch_distributed.passes.compatibility import ShardingName
    from annbatch_distributed.plan import EpochPlan, Remainder
    from annbatch_distributed.ranks import DistInfo
    from annbatch_distributed.rows import Rows
    from annbatch_distributed.sharding import Sharding
    from annbatch_distributed.state import Identity

__all__ = ["DistributedSampler"]


class DistributedSampler(Sampler):
    """Give every rank of a job its own share of what an annbatch sampler samples.

    The rows that the mask selects are dealt to the ranks, and a private copy of the wrapped sampler runs on this rank's
    share with a generator of its own. Nothing is communicated: every rank works out the same plan.

    How 10 rows go to 2 ranks with a batch size of 2 (repeats in brackets)::

        remainder  rank 0         rank 1         batches
        "drop"     0 1 2 3        4 5 6 7        2 and 2; epoch 0 loses rows 8 and 9, others later
        "keep"     0 1 2 3 4      5 6 7 8 9      3 and 3; can differ by one
        "exact"    0 1 2 3 4      5 6 7 8 9      3 and 3; always the same
        "pad"      0 1 2 3 4 [5]  5 6 7 8 9 [0]  3 and 3, all full

    Parameters
    ----------
    sampler
        The annbatch sampler to distribute: any :class:`annbatch.abc.Sampler` but another ``DistributedSampler``. It is
        copied and never modified, and changing it later changes nothing. Arrays of 1 MiB and more that it holds are
        shared with the copy, so don't write into them.
    dist_info
        Where rank and world size come from. ``"torch"`` or ``"jax"`` ask the framework, which must have been
        initialised; ``"env"`` asks the variables that torchrun, Open MPI, MPICH, Intel MPI or Slurm's ``srun`` set; a
        torch ``ProcessGroup`` or ``DeviceMesh`` of one dimension says it of this process, and :func:`mesh_ranks` of any
        mesh; a callable returns ``(rank, world_size)``; a :class:`Rank` says it outright. :func:`deferred` around any
        of them has it asked when the rank is first needed. So is what knows the rank under a framework: Lightning's
        ``Trainer`` or ``Fabric``, accelerate's ``Accelerator`` or ``PartialState``, or Ray Train's context.
    enforce_equal_batches
        As in annbatch: True means ``remainder="drop"``, False means ``remainder="keep"``.
    remainder
        What becomes of the rows that don't divide evenly among ranks and batches; None leaves it to
        ``enforce_equal_batches``.

        ``"drop"``
            Every rank has the same number of full batches. The rows left over are lost in this epoch; which ones they
            are moves with :meth:`set_epoch`, and any two consecutive epochs together read every row. (Of class
            samplers, which need whole runs of a class, every epoch loses the last rows.)
        ``"keep"``
            No row is lost, and ranks may differ by one batch: for evaluation without a collective in each step.
        ``"exact"``
            Every row once, and the same number of batches on every rank. A rank that would be a batch short halves one
            of its last batches.
        ``"pad"``
            Every rank has the same number of full batches; some rows are read a second time. A load request then has
            the key ``repeated``, which says for each of its rows whether it is a repeat.
    sharding
        Which rank has which rows.

        ``"contiguous"``, :class:`Contiguous`
            A stretch of consecutive rows for each rank, the same in every epoch: for collections that were shuffled
            before they were written.
        ``"shuffled"``, :class:`Shuffled`
            Blocks of consecutive rows, dealt anew in every epoch: for rows that are sorted or grouped on disk, and for
            long training. Needs a ``seed``.
        ``"independent"``, :class:`Independent`
            Every rank draws from all rows, and the job makes as many draws as the wrapped sampler alone: for samplers
            that draw with replacement, such as class samplers.
        a function of yours
            ``order(rows, *, epoch, seed)`` returns the same :class:`~annbatch_distributed.Rows` in another
            order, which is cut into a stretch for each rank. It depends on these arguments alone.
    mask
        The rows to share out: a slice, a list of slices, a boolean array or pandas Series with a value for each row of
        the collection, an integer array of rows in any order, or :class:`~annbatch_distributed.Rows`. The
        rows are shared out in the order of the collection, whatever the order of these. All of them are by position; a
        :class:`StatefulLoader` compares the names in the index of a boolean Series with those of its cells. It narrows
        down the wrapped sampler's own mask and can't reach beyond it; None takes all of that.
    seed
        Makes the order reproducible, within ``[0, 2**63)``; None derives it from the wrapped sampler's generator.
        ``"shuffled"`` deals rows by it, so it must be the same on every rank.
    virtual_ranks
        Deals the epoch to so many virtual ranks instead, whatever the world size, which must divide it: a step, over
        all ranks, then has the same rows on any number of ranks. A rank runs several of them side by side, and its
        batch is theirs joined, so that the wrapped sampler's ``batch_size`` and ``num_samples`` are a virtual rank's.
        Whatever is said of ranks here is then true of virtual ones.
    align
        Whole chunks of a rank's rows begin at multiples of so many rows, as chunks of the store do, and come before the
        ragged ends of its stretches; None takes the wrapped sampler's own chunk size. Take the store's chunks if that
        has others, and 1 to leave rows in their order. Samplers that keep an order or draw with replacement
        have their rows in order anyway; so has every rank in epoch 0 where annbatch's own sampler has the same rows.
    read_through
        Holes of at most so many rows, 64 unless said, between rows that are asked for, are read as well and left out of
        the batches: to read a row takes less time than to begin another read. 0 reads no row that is in no batch, and
        takes less memory where few rows of many are selected.

    Raises
    ------
    TypeError
        If ``sampler`` is not an instance of a sampler, or an argument has the wrong type.
    ValueError
        If ``dist_info``, ``remainder``, ``sharding``, ``mask`` or ``seed`` are not what they can be, if the wrapped
        sampler has no batch size and ``remainder`` promises equal numbers of batches, if it can't run on such shards,
        or if something within it would share out the same rows once more.
    RuntimeError
        If the framework that ``dist_info`` names is not initialised, or no launcher has set its variables.

    Notes
    -----
    Which rows a rank owns depends on the arguments, on ``n_obs`` and on the epoch, never on what a rank did before. The
    order in which it reads them is a fresh one in every pass, and that of epoch ``e`` again after ``set_epoch(e)``.

    Unless the sharding is ``"independent"``, ``num_samples`` of the wrapped sampler counts per rank, class samplers
    draw from the rank's own share, and ``drop_last`` drops rows of the rank, as in annbatch. Each rank draws exactly
    ``num_samples`` rows, because that many were asked for: if they are no multiple of the batch size, its last batch is
    smaller, under ``"drop"`` and ``"pad"`` too.

    In workers of torch's ``DataLoader``, each has a part of the rank's batches. Make it with
    :meth:`StatefulLoader.to_dataloader`, whose workers hear of :meth:`set_epoch`.

    Examples
    --------
    >>> import numpy as np
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler
    >>> sampler = RandomSampler(
    ...     chunk_size=64,
    ...     preload_nchunks=32,
    ...     batch_size=256,
    ...     mask=slice(0, 16_000),
    ...     rng=np.random.default_rng(0),
    ... )
    >>> ranks = [
    ...     DistributedSampler(sampler, dist_info=lambda rank=rank: (rank, 2))
    ...     for rank in range(2)
    ... ]
    >>> [rank.n_batches(20_000) for rank in ranks]
    [31, 31]
    >>> print(ranks[0].plan(20_000))
    epoch 0: 2 ranks share 16000 of 20000 rows (remainder="drop", batch size 256)
    rank  batches  rows  repeated  global rows
       0       31  7936         0  0:7936
       1       31  7936         0  7936:15872
    lost in this epoch: 128 rows, 0.8 % (15872:16000)
    to lose none: remainder="exact", "keep" or "pad"
    in memory: up to 2048 rows on each rank
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
        read_through: int = LONGEST,
    ) -> None:
        if not isinstance(sampler, Sampler):
            hint = " Pass an instance, not the class." if isinstance(sampler, type) else ""
            raise TypeError(f"sampler must be an annbatch Sampler, got {sampler!r}.{hint}")
        check_interface(sampler)
        for held in samplers_in(sampler, closed=DistributedSampler):
            check_shares_out_nothing(held, DistributedSampler)
            if warning := rank_warning(held):
                warnings.warn(warning, UserWarning, skip_file_prefixes=_PACKAGES)
        self._member = member(dist_info)
        self._virtual_ranks = (
            None if virtual_ranks is None else integer("virtual_ranks", virtual_ranks, least=1, below=MOST_RANKS + 1)
        )
        if not isinstance(self._member, Deferred):
            _ = self._own_lanes  # raises if they can't be run by as many
        self._remainder = resolve_remainder(remainder, enforce_equal_batches=enforce_equal_batches)
        check_batch_size(sampler, self._remainder)
        self._seed = None if seed is None else integer("seed", seed, least=0, below=BOUND)
        self._read_through = integer("read_through", read_through, least=0, below=BOUND)
        self._sampler = private_copy(sampler)
        make_numbers_ints(self._sampler)
        self._align = chunk_grid(
            self._sampler, None if align is None else integer("align", align, least=1, below=BOUND)
        )
        self._sharding = resolve_sharding(sharding, self._sampler, seed=self._seed)
        # a seed takes the place of the wrapped sampler's generator
        self._own_rng = checked_rng(first_generator(self._sampler)) if self._seed is None else None
        self._root_seed = draw_root_seed(self._own_rng) if self._seed is None else self._seed
        self._fingerprint: str | None = None
        self._progress = Progress(shuffles=self._sampler.shuffle)
        # the plan of which warnings were given
        self._last_plan: EpochPlan | None = None
        # which collection a state that was loaded is of, as far as it says
        self._of_state: Identity = {}
        self._warned: set[str] = set()
        # what the wrapped sampler allows
        self._allowed: Mask = own_mask(sampler)
        self.mask = slice(None) if mask is None else mask

    @property
    def _membership(self) -> Membership:
        return self._member.membership() if isinstance(self._member, Deferred) else self._member

    @property
    def rank(self) -> int:
        """Which process of the job this is."""
        return self._membership.rank.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._membership.rank.world_size

    @property
    def batch_size(self) -> int | None:
        """Rows of a full batch, as the wrapped sampler has it; of virtual ranks, those of all that this rank runs."""
        if self._batch_size is None or self._virtual_ranks is None:  # a deferred rank may not be known yet
            return self._batch_size
        return self._batch_size * len(self._own_lanes)

    @property
    def _batch_size(self) -> int | None:
        size = self._sampler.batch_size
        return None if size is None else int(size)  # numpy's integers go round, and aren't for JSON

    @property
    def virtual_ranks(self) -> int | None:
        """How many virtual ranks share out the rows, whatever the world size; None if the ranks themselves do."""
        return self._virtual_ranks

    @property
    def _n_lanes(self) -> int:
        """How many lanes the job has: one for each rank, or each virtual rank."""
        return len(self._own_lanes) * self.world_size

    @property
    def _own_lanes(self) -> range:
        """Which of them this rank reads."""
        rank, world_size = self.rank, self.world_size
        if self._virtual_ranks is None:
            return range(rank, rank + 1)
        n_own, left = divmod(self._virtual_ranks, world_size)
        if left:
            fitting = [number for number in range(1, self._virtual_ranks + 1) if self._virtual_ranks % number == 0]
            raise ValueError(
                f"virtual_ranks={self._virtual_ranks} must be a multiple of the world size, which is {world_size}. Run "
                f"it on {', '.join(map(str, fitting[:-1]))} or {fitting[-1]} ranks."
            )
        return range(rank * n_own, (rank + 1) * n_own)

    @property
    def shuffle(self) -> bool:
        """Whether the wrapped sampler shuffles."""
        return self._sampler.shuffle

    @property  # type: ignore[override]  # annbatch's samplers know single slices only
    def mask(self) -> slice | list[slice] | Rows:
        """The rows that the ranks share out: a slice, several in ascending order, or rows.

        Assigning it takes effect with the next pass, which reads all of it. What can be assigned is what ``mask=``
        takes; ``slice(0, None)`` stands for all that the wrapped sampler's own mask allows.
        """
        return self._window_mask.given()

    @mask.setter
    def mask(self, value: AnyMask) -> None:
        check_not_within_annbatchs()
        self._window_mask: Mask = resolve_mask(value, self._allowed)
        # which cells the values are of, until a loader has compared it with its own
        self._mask_names = None if self._window_mask.n_obs is None else names_of("mask", value)
        self._mask_text: tuple[int | None, str] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._progress.go_to(Position(self.epoch))
        self._progress.n_changes += 1
        self._of_state, self._planner, self._last_plan = {}, self._new_planner(), None

    def _new_planner(self) -> Planner:
        return Planner(
            self._sampler,
            mask=self._window_mask,
            remainder=self._remainder,
            sharding=self._sharding,
            seed=self._seed,
            root_seed=self._root_seed,
            align=self._align,
        )

    @property
    def rng(self) -> np.random.Generator:
        """What this job's randomness begins from: the seed's generator, or a copy of the wrapped sampler's.

        Reading or using it changes no pass. Assigning another begins anew from that one, instead of the seed. Which
        rows a rank owns doesn't change with it: ``"shuffled"`` goes on with the blocks of the seed.
        """
        return np.random.default_rng(self._root_seed) if self._own_rng is None else copy.deepcopy(self._own_rng)

    @rng.setter
    def rng(self, value: np.random.Generator | None) -> None:
        self._own_rng = copy.deepcopy(checked_rng(value))
        self._root_seed = draw_root_seed(self._own_rng)
        self._begin_anew()

    @property
    def epoch(self) -> int:
        """Which epoch the next pass belongs to: 0 until :meth:`set_epoch` says otherwise."""
        return self._progress.position.epoch

    @property
    def next_epoch(self) -> int:
        """Which epoch to go on with: this one, or the one after it if a pass through this one has come to its end.

        After a state was loaded, this is where a training goes on:
        ``for epoch in range(sampler.next_epoch, n_epochs): sampler.set_epoch(epoch)``.
        """
        position = self._progress.position
        return position.epoch + bool(position.passes and not position.resumes)

    @property
    def batches_done(self) -> int:
        """How many batches of the epoch every rank had done before the next pass: 0 unless an epoch is resumed."""
        return self._progress.position.done

    @property
    def sampler(self) -> Self:
        """This sampler itself, where frameworks look for something whose ``set_epoch`` they can call.

        Lightning calls ``loader.batch_sampler.sampler.set_epoch``.
        """
        return self

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass belongs to, on every rank.

        It gives a new order, and under ``remainder="drop"`` other rows are lost. The same epoch again gives the same
        order again, but for the epoch of a state that was loaded, which goes on. Passes that are open go on as they
        began.

        Parameters
        ----------
        epoch
            At least 0 and below 2**63.

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
        epoch = integer("epoch", epoch, least=0, below=BOUND)
        if self._progress.set_epoch(epoch):
            self._of_state = {}

    def state_dict(self, *, batches_done: int) -> dict[str, Any]:
        """Return how far the epoch is, as a few integers and strings that JSON can hold, the same on every rank.

        Parameters
        ----------
        batches_done
            How many batches of this epoch every rank has done, those before an earlier resume included. The sampler
            can't know: a loader takes a load request and yields many batches of it, and prefetching runs ahead. If all
            are done, the state is that of the beginning of the next pass.

        Notes
        -----
        A state has a few hundred bytes, and some 20 more for each time that the epoch went on with another number of
        ranks or ``DataLoader`` workers, which it can do 99 times. Epochs, passes and batches are below 2**63, and there
        are at most 2**20 ranks, and workers of each.

        Examples
        --------
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
        >>> sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=4)
        >>> first, again = (
        ...     DistributedSampler(sampler, dist_info=Rank(0, 2), seed=0) for _ in range(2)
        ... )
        >>> splits = [
        ...     split.tolist() for request in first.sample(48) for split in request["splits"]
        ... ]
        >>> again.load_state_dict(first.state_dict(batches_done=4))
        >>> again.n_batches(48), len(splits)
        (2, 6)
        """
        batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        return self._state(self._progress.position_at(batches_done, self._n_lanes))

    def _state(self, position: Position) -> dict[str, Any]:
        return to_state(position, self._identity())

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where a state was saved, on every rank.

        The next pass yields the batches that were left of its epoch, bit for bit as the pass that was interrupted would
        have. Until then :meth:`n_batches` is the number of those. Setting the same epoch once more changes nothing.

        With another number of ranks than the state has, the batches that were left are cut into as many even stretches,
        in the order of the epoch: each is still read once, row for row, however often that number changes. What doesn't
        divide evenly becomes as ``remainder`` says: under ``"drop"`` fewer batches than there are ranks are lost.

        Parameters
        ----------
        state
            What :meth:`state_dict` has returned, on any rank.
        strict
            Whether the state must be of a sampler with the same settings. False goes on without comparing them; rows
            may then be read again, or not at all.

        Raises
        ------
        TypeError, ValueError
            If the state is damaged, of a newer format, or of a sampler with other settings: the message names each. If
            the epoch can't be gone on with, as far as that is known without the collection: because more batches are
            done than it has, or because too little is left for the ranks. The sampler is then as it was.
        """
        self._load(state, strict=strict)

    def _load(
        self, state: Mapping[str, Any], *, strict: bool, n_obs: int | None = None, data_sets: str | None = None
    ) -> None:
        """Load a state for a collection of which the number of rows is known, or also its data sets."""
        worker = current_worker()
        position, saved = from_state(state)
        position = position.without_idle_segments()
        check_worker(position, worker)
        check_segments(position.run_by(self._n_lanes, 1))
        if strict:
            identity = self._identity()
            n_saved, saved_mask = saved.get("n_obs"), saved.get("mask")
            n_known = n_saved if isinstance(n_saved, int) else n_obs
            identity["mask"] = self._selected(n_known)
            if isinstance(saved_mask, str):
                saved = saved | {"mask": _open(saved_mask, n_known)}
            if position.resumes:
                identity |= {"data sets": data_sets} | ({} if n_obs is None else {"n_obs": n_obs})
            else:  # there is no order to bring back
                identity |= {"data sets": None, "root": saved.get("root")}
            check_identity(saved, identity)
        of_state = {name: saved.get(name) for name in ("n_obs", "data sets")} if strict else {}
        planner = copy.copy(self._planner)  # so that nothing is lost if it raises
        n_planned: Any = of_state.get("n_obs") if n_obs is None else n_obs  # a state may have anything
        if position.resumes and n_planned is not None:
            with self._hidden_from_samplers(worker):
                try:
                    planner.lanes(n_planned, position.run_by(self._n_lanes, 1))
                except ValueError as error:
                    raise ValueError(
                        f"The state can't be gone on with here. {error} To give up what is left of epoch "
                        f"{position.epoch}, call set_epoch({position.epoch + 1}) instead."
                    ) from error
        self._progress.go_to(position, was_loaded=True)
        self._of_state, self._planner = of_state, planner

    def _check_data_sets(self, data_sets: str | None) -> None:
        """Raise if the next pass goes on with the state of other data sets, or of those in another order."""
        of_state = self._of_state.get("data sets")
        if self._progress.position.resumes and None not in (of_state, data_sets) and of_state != data_sets:
            raise ValueError(
                f"The state is of the data sets {of_state}, and these are {data_sets} (rows x columns of each). Add "
                "the state's data sets in the same order, and load it after that."
            )

    def _identity(self) -> Identity:
        """What the rows and their order follow from, by name."""
        if self._fingerprint is None:  # which goes through all that the sampler holds
            self._fingerprint = fingerprint(self._sampler)
        n_obs: Any = self._of_state.get("n_obs") if self._progress.begun is None else self._progress.begun.n_obs
        return {
            "n_obs": n_obs,
            "mask": self._selected(n_obs),
            "batch_size": self._batch_size,
            "remainder": self._remainder,
            "sharding": fingerprint(self._sharding),
            "seed": self._seed,
            "root": self._root_seed if is_random(self._sampler) else None,
            "sampler": self._fingerprint,
            "align": self._align or 1,
        }

    def _selected(self, n_obs: int | None) -> str:
        """Return a text of the rows that the mask selects of ``n_obs``, the same however it was given."""
        if self._mask_text is None or self._mask_text[0] != n_obs:
            mask = self._window_mask
            if n_obs is not None:
                with suppress(ValueError):  # a mask that doesn't fit is an error of the plan
                    mask = Mask(mask.window(n_obs))
            self._mask_text = n_obs, _open(mask.text(), n_obs)
        return self._mask_text[1]

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
        n_obs, worker = integer("n_obs", n_obs, least=0), current_worker()
        with self._hidden_from_samplers(worker):
            plan, n_left = self._plan(n_obs, self._progress.position), None
            if self._progress.position.resumes:
                n_left = tuple(self._n_left(n_obs, self._progress.position))
        return replace(plan, left=n_left, n_processes=None if self._virtual_ranks is None else self.world_size)

    def _n_left(self, n_obs: int, position: Position) -> list[int]:
        """How many batches each lane has left from a position on."""
        position = position.run_by(self._n_lanes, 1)
        return list(map(len, self._progress.left(self._planner.lanes(n_obs, position), None, position)))

    def _hidden_from_samplers(self, worker: Worker | None) -> AbstractContextManager[None]:
        """Hide a worker from samplers, once all ranks are known: a worker has them from its process."""
        if isinstance(self._member, Deferred):
            self._member.membership()
        return worker_info_hidden(worker)

    def _plan(self, n_obs: int, position: Position) -> EpochPlan:
        if position.resumes and self._of_state.get("n_obs") not in (None, n_obs):
            raise ValueError(
                f"The state is of a collection of {self._of_state['n_obs']} rows, and this one has {n_obs}. Load a "
                "state of this collection."
            )
        plan = self._planner.plan(n_obs, position.epoch, position.n_streams(self._n_lanes))
        if plan is not self._last_plan:
            classes = self._planner.classes
            if len({drawable for _, drawable in classes}) > 1:
                self._warn_once(_other_classes(type(self._sampler).__name__, classes))
            self._last_plan = plan
        return plan

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            warnings.warn(message, UserWarning, skip_file_prefixes=_PACKAGES)
            self._warned.add(message)  # not before: a filter may have made an error of it

    def n_batches(self, n_obs: int) -> int:
        """Return the number of batches that this rank yields in the next pass: in a resumed epoch, those that are left.

        Parameters
        ----------
        n_obs
            The number of rows of the collection, over all ranks.

        Raises
        ------
        ValueError
            As for :meth:`plan`.
        """
        n_obs, worker = integer("n_obs", n_obs, least=0), current_worker()
        with self._hidden_from_samplers(worker):
            self._plan(n_obs, self._progress.position)
            n_left = self._n_left(n_obs, self._progress.position)
        return max(n_left[lane] for lane in self._own_lanes)

    def validate(self, n_obs: int) -> None:
        """Check that every rank can run on a collection of ``n_obs`` rows in this epoch.

        The same is then true of every other epoch, unless the wrapped sampler or a sharding of your own has it depend
        on the epoch.

        Raises
        ------
        ValueError
            As for :meth:`plan`.
        """
        self.plan(n_obs)

    def check_ranks_agree(self, n_obs: int, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks of the job have the same configuration, and that each is another rank.

        Every process of the job calls it, best of all once before training. What is compared: the world size,
        ``n_obs``, the arguments of this sampler, the settings of the wrapped one, the epoch and how far it is, the
        plan, and the versions of the libraries. Processes that are to have the same share, such as tensor-parallel
        peers, must have the same randomness as well. No row is read.

        Parameters
        ----------
        n_obs
            The number of rows of the collection, over all ranks: ``loader.n_obs``.
        timeout
            For how many seconds to wait for the other processes, or for how long, as a :class:`datetime.timedelta`:
            more than nothing, and finite.
        gather
            How the processes reach each other where neither torch.distributed nor JAX knows them: a function that
            takes a text and returns the list of the texts of all processes, in the same order everywhere, such as
            mpi4py's ``comm.allgather``. It waits as long as it likes.

        Raises
        ------
        ValueError
            In every process, with the same message, if something differs: it names each difference, the values, and the
            ranks that have them. Or if something is wrong in one of them, such as an argument.
        TimeoutError
            In every process, if one of them doesn't come, or fails while it waits for the others.
        RuntimeError
            If the processes can't reach each other.

        Examples
        --------
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank
        >>> # what mpi4py's comm.allgather would return, if rank 1 had another n_obs
        >>> def every_rank_says(text):
        ...     return [text, text.replace('"rank": 0', '"rank": 1').replace("20000", "19000")]
        >>> sampler = DistributedSampler(
        ...     RandomSampler(64, 32, 256), dist_info=Rank(0, 2), seed=0
        ... )
        >>> sampler.check_ranks_agree(20_000, gather=every_rank_says)
        Traceback (most recent call last):
        ...
        ValueError: The ranks of this job don't agree:
          n_obs: 20000 on rank 0; 19000 on rank 1
        Every process must make its sampler with the same arguments, and be in the same epoch.
        """
        checks.ranks_agree(self._job, lambda job: self._description(job, n_obs, {}), timeout=timeout, gather=gather)

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
            The rows of each batch that this process was given in the pass. (A :class:`StatefulLoader` counts them, and
            :meth:`StatefulLoader.check_epoch_read` passes them.)
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

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch import Loader
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, Tally
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0)
        >>> loader = Loader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((48, 1))))
        >>> read = Tally()
        >>> for batch in loader:
        ...     read.add(batch["index"])
        >>> sampler.check_epoch_read(48, read)
        'epoch 0: 1 rank has read 48 rows in 12 batches, as planned. Each of the 48 rows was read once'
        """
        return checks.epoch_read(self._job, lambda job: self._reading(job, n_obs, read), timeout=timeout, gather=gather)

    def _job(self) -> Membership:
        """Return the place of this process in the job, with the source only where other processes have the same."""
        own = self._membership
        return own if own.framework is not None else replace(own, source="")

    def _description(self, job: Membership, n_obs: int, more: Mapping[str, int | str]) -> Description:
        """Return what this process says of its next pass, and what more must be the same in all processes."""
        position = self._progress.position
        return self._described(job, n_obs, position, {"passes since set_epoch": position.passes, **more})

    def _reading(self, job: Membership, n_obs: int, read: Tally) -> Reading:
        """Return what this process says of its last pass."""
        last = self._progress.begun
        if last is None and self._progress.workers_may_read:  # this process doesn't know more of them
            last = Begun(self._progress.position.run_by(self._n_lanes, 1), n_obs, 0)
        position = self._progress.position if last is None else last.position
        description, plan = self._described(job, n_obs, position, {}), self._plan(n_obs, position)
        position = position.run_by(self._n_lanes, 1) if not position.segments else position
        lanes = self._progress.left(self._planner.lanes(n_obs, position), None, position)
        plan = replace(plan, left=tuple(map(len, lanes))) if position.resumes else plan
        return Reading.of(
            *(description, last, read, plan),
            sampler=self._sampler,
            lanes=lanes,
            own=self._own_lanes,
            root_seed=self._root_seed,
        )

    def _described(self, job: Membership, n_obs: int, at: Position, more: Mapping[str, int | str]) -> Description:
        n_obs = integer("n_obs", n_obs, least=0)
        plan, identity = self._plan(n_obs, at), self._identity() | {"n_obs": n_obs, "mask": self._selected(n_obs)}
        if self._virtual_ranks is not None:
            more = {"virtual ranks": self._virtual_ranks, **more}
        return Description.of(job, identity, at, plan, more)

    def sample(self, n_obs: int) -> Pass:
        """Begin a pass of this rank over its shard.

        Parameters
        ----------
        n_obs
            The number of rows of the collection, over all ranks.

        Returns
        -------
        An iterator of load requests for rows of the collection. It can be copied and pickled at any time; the copy goes
        on from there.

        Raises
        ------
        ValueError
            As for :meth:`plan`.
        RuntimeError
            While iterating, if the wrapped sampler doesn't yield what its ``n_batches`` says, or asks for rows outside
            of those that it was given.
        """
        check_not_within_annbatchs()
        n_obs, worker = integer("n_obs", n_obs, least=0), current_worker()
        position = self._progress.next_position(worker, self._n_lanes)
        with self._hidden_from_samplers(worker):
            plan, lanes = self._plan(n_obs, position), self._planner.lanes(n_obs, position)
        if worker is None or not worker.number:  # workers don't know that another one has warned
            self._warn_of_same_rows(plan, position)
        own = self._progress.left([lanes[lane] for lane in self._own_lanes], worker, position)
        requests = Pass(self._sampler, plan, own, self._root_seed, position.passes, self._read_through)
        begun = self._progress.begin(n_obs, position, lanes, worker)
        begun.n_due = requests.n_batches
        requests.on_end = partial(self._progress.end, begun)
        return requests

    def _begin_by_workers(self, n_obs: int, n_workers: int) -> Begun:
        """Begin the next pass in this process, for workers that are told its position."""
        position = self._progress.position.run_by(self._n_lanes, n_workers if self.shuffle else 1)
        plan, lanes = self._plan(n_obs, position), self._planner.lanes(n_obs, position)
        self._warn_of_same_rows(plan, position)
        begun = self._progress.begin(n_obs, position, lanes)
        begun.n_due = max(len(lanes[lane]) for lane in self._own_lanes) - position.segments[-1].done
        begun.is_by_workers = True
        return begun

    def _warn_of_same_rows(self, plan: EpochPlan, position: Position) -> None:
        """Warn at a second pass where another epoch would have other rows on each rank."""
        if position.passes and not position.resumes and not self._planner.is_same_next_epoch(plan):
            self._warn_once(_SAME_ROWS)

    def _sample(self, n_obs: int) -> Pass:
        return self.sample(n_obs)

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), _progress=copy.deepcopy(self._progress), _planner=copy.copy(self._planner))
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the wrapped sampler is never run, only copies of it are: wrappers can share it, and its large arrays
        # and plans and shardings are frozen
        for shared in (self._sampler, self._sharding, self._last_plan, self._mask_names):
            memo[id(shared)] = shared
        duplicate = memo[id(self)] = object.__new__(type(self))
        vars(duplicate).update(copy.deepcopy(vars(self), memo))
        return duplicate

    def __repr__(self) -> str:
        virtual = "" if self._virtual_ranks is None else f"virtual_ranks={self._virtual_ranks}, "
        if isinstance(self._member, Deferred) and not self._member.is_known:
            who, source = "rank=?, world_size=?", "deferred"
        else:
            who, source = f"rank={self.rank}, world_size={self.world_size}", self._membership.source
        return (
            f"{type(self).__name__}({type(self._sampler).__name__}, {who}, remainder={self._remainder!r}, "
            f"sharding={getattr(self._sharding, '__name__', self._sharding)}, mask={shortened(self.mask)}, "
            f"seed={self._seed}, {virtual}"
            f"epoch={self.epoch}, source={source!r})"
        )


#: Warnings point at the code that called this package, directly or by annbatch's Loader.
_PACKAGES = str(Path(__file__).parent), str(Path(annbatch.__file__).parent)

_SAME_ROWS = (
    "A second pass without set_epoch: every rank reads the rows that it had last time, in another order, although "
    "other epochs have the rows dealt anew or lose other ones. Call set_epoch(epoch) on every rank before each epoch. "
    "(A torch DataLoader hides set_epoch from Lightning; what loader.to_dataloader(num_workers=...) returns doesn't.)"
)


def _open(text: str, n_obs: int | None) -> str:
    """Return the text of a mask with an open end, if it ends where the collection does."""
    return text.removesuffix(str(n_obs)) if text.endswith(f":{n_obs}") else text


def _other_classes(name: str, classes: Sequence[tuple[int, frozenset[str]]]) -> str:
    """The warning for ranks whose classes differ."""
    everywhere = frozenset[str]().union(*(own for _, own in classes))
    rank, missing = next((rank, sorted(everywhere - own)) for rank, own in classes if own != everywhere)
    shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return (
        f"The ranks of {name} can't all draw the same classes: there are {len(everywhere)}, and the rows of rank "
        f"{rank} lack {len(missing)} of them ({shown}). Each rank weighs the classes that it has, so that the job as a "
        "whole doesn't draw by the weights that were given. With sharding='independent' every rank draws from all rows."
    )
