"""The StatefulLoader: annbatch's Loader that knows how far its consumer is.

A sampler can't know what was trained on: a loader takes one load request and yields many batches of it. Here the
batches are counted as they are yielded, and what load requests ask for is kept as they are taken, so that a batch can
say which of its rows are repeats.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import zarr
from annbatch import Loader
from annbatch.abc import Sampler
from annbatch.utils import convert

from annbatch_distributed import checks
from annbatch_distributed.checks import Tally
from annbatch_distributed.integers import BOUND, integer
from annbatch_distributed.loader import local
from annbatch_distributed.loader.ahead import ahead
from annbatch_distributed.loader.delivered import Delivered
from annbatch_distributed.loader.inside import (
    arrays_in,
    data_in,
    data_sets_of,
    has_room_for_pointers,
    iterated,
    obs_of,
    options_of,
    preloads_to_gpu,
    shapes_of,
    take_data_of,
)
from annbatch_distributed.loader.layout import check_layout
from annbatch_distributed.names import check_names
from annbatch_distributed.passes.callers import check_not_dispatched
from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.state import brief

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Iterable, Iterator, Mapping
    from typing import Self

    import anndata as ad
    import numpy.typing as npt
    import pandas as pd
    from annbatch import DatasetCollection
    from annbatch.types import LoadRequest
    from annbatch.utils import CSRContainer

    from annbatch_distributed.checks import Description, Gather, Timeout
    from annbatch_distributed.loader.workers import WorkerDataLoader
    from annbatch_distributed.passes.run import Pass
    from annbatch_distributed.plan import EpochPlan
    from annbatch_distributed.progress import Begun
    from annbatch_distributed.ranks import Membership
    from annbatch_distributed.state import Position

__all__ = ["StatefulLoader"]


class StatefulLoader(Loader[Any, Any]):
    """An annbatch Loader that can be saved in the middle of an epoch, and go on there.

    It takes the arguments of :class:`annbatch.Loader`. Its ``batch_sampler`` must be a :class:`DistributedSampler`.

    Under ``remainder="pad"``, a batch has the key ``"repeated"``: for each of its rows, whether some rank reads it for
    the second time in this epoch, as a boolean array.

    ``len()`` is the number of batches of the whole epoch, also while one is resumed, as Lightning and torch expect it;
    those that are left are ``loader.sampler.n_batches(loader.n_obs)``.

    Parameters
    ----------
    batch_sampler
        Which rows this rank reads.
    read_ahead
        How many load requests are read, in a thread, while the batches of another one are trained on, and so are held
        beside it. That hides reading behind a training which takes about as long. 0 reads where a batch is asked for,
        as annbatch does. Batches, states and errors are the same.
    kwargs
        Those of :class:`annbatch.Loader`.

    Raises
    ------
    TypeError
        If ``batch_sampler`` is not a :class:`DistributedSampler`, or ``read_ahead`` not an integer.
    ValueError
        If ``read_ahead`` is negative, or is more than 0 with ``preload_to_gpu=True``: the device would be used in
        another thread than that of the training.

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
        **kwargs: Any,  # noqa: ANN401 annbatch's own
    ) -> None:
        if not isinstance(batch_sampler, DistributedSampler):
            raise TypeError(
                f"StatefulLoader needs a DistributedSampler as its batch_sampler, got {batch_sampler!r}. In a single "
                "process, wrap it: DistributedSampler(sampler, dist_info=Rank(0, 1), seed=...)."
            )
        self._given = {"read_ahead": read_ahead, **kwargs}
        self._read_ahead = integer("read_ahead", read_ahead, least=0, below=BOUND)
        self._one_request = _OneRequest(batch_sampler)
        # what frameworks are set to can hold for a thread only, so that batches are theirs where they are taken
        self._to_be = kwargs.pop("to", None) if self._read_ahead else None
        super().__init__(batch_sampler=self._one_request, **kwargs)
        if self._read_ahead and preloads_to_gpu(self):
            raise ValueError(
                f"read_ahead={self._read_ahead} reads in a thread, from which preload_to_gpu=True would use the GPU, "
                "while the training uses it as well. Pass preload_to_gpu=False, and move batches in the training step."
            )
        self._sampler = batch_sampler
        # the pass of this loader that was begun last, and whether another is about to begin
        self._pass: Delivered | None = None
        self._is_new = False
        # of data sets whose cells have names only, of which annbatch keeps nothing
        self._names: dict[int, pd.Index[Any]] = {}

    @classmethod
    def from_loader(
        cls,
        loader: Loader[Any, Any],
        *,
        batch_sampler: DistributedSampler | None = None,
        **options: Any,  # noqa: ANN401 annbatch's own, too
    ) -> Self:
        """Make one of an annbatch ``Loader`` that has its data sets already, which stays as it is.

        Nothing is opened or copied: both read the same data sets. Data sets that are added to one of them later on
        are not added to the other.

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
            If ``loader`` is no loader, or one of a class of its own, whose methods would be lost; or as
            :class:`StatefulLoader` does, for instance if the sampler is not a :class:`DistributedSampler`.

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
                f"from_loader takes an annbatch Loader, got {loader!r} of type {type(loader).__name__}. Of a class of "
                "its own it would lose the methods: make that a subclass of StatefulLoader instead."
            )
        sampler = loader.batch_sampler if batch_sampler is None else batch_sampler
        if not isinstance(sampler, DistributedSampler):
            raise TypeError(
                f"from_loader needs a DistributedSampler, got {sampler!r}. Wrap the sampler of the loader: "
                "from_loader(loader, batch_sampler=DistributedSampler(loader.batch_sampler, dist_info=...))."
            )
        given = loader._given if isinstance(loader, StatefulLoader) else options_of(loader)
        made = cls(batch_sampler=sampler, **given | options)
        made._check_layouts(data_in(loader))
        of_passes = vars(made).keys() - vars(Loader(preload_to_gpu=False)).keys() - {"_names"}
        take_data_of(loader, into=made, without=of_passes)
        return made

    def use_collection(self, collection: DatasetCollection, **options: Any) -> Self:  # noqa: ANN401 annbatch's own
        """Read a collection, as ``use_collection`` of :class:`annbatch.Loader` does.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`add_adatas`, or as annbatch raises them.
        RuntimeError
            If the process was forked after zarrs had begun to read, and would wait for ever: see :doc:`/workers`.
        """
        local.check_zarrs_answers(lambda: "zarrs" in zarr.config.get("codec_pipeline.path"))
        if "load_adata" not in options:
            self._check_layouts(group["X"] for group in collection)
        return super().use_collection(collection, **options)

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
        return super().add_datasets(datasets, obs, var)

    def add_dataset(self, dataset: Any, obs: Any = None, var: Any = None) -> Self:  # noqa: ANN401 annbatch's own
        """Add a data set: see :meth:`add_datasets`."""
        self._check_layouts([dataset])
        return super().add_dataset(dataset, obs, var)

    def _check_layouts(self, data: Iterable[object]) -> None:
        """Raise if some data can't be read by rows, before any of it is added."""
        for number, cells in enumerate(data, len(shapes_of(self))):
            check_layout(cells, f"X of data set {number}")

    def _check_cells(self) -> None:
        """Raise if a state is of other data sets, or the mask was given for cells in another order."""
        self._sampler._check_data_sets(data_sets_of(self))
        self._check_names()

    def _check_names(self) -> None:
        """Raise if the mask was given for cells in another order, by their names."""
        names = self._sampler._mask_names
        if names is not None and (cells := self._cells) is not None:
            check_names("mask", names, cells)
            self._sampler._mask_names = None

    @property
    def _cells(self) -> tuple[pd.Index[Any], ...] | None:
        """The names of the cells of each data set; None if some have none that are known."""
        known = self._names | {number: obs.index for number, obs in enumerate(obs_of(self))}
        found = [known[number] for number in range(len(shapes_of(self))) if number in known]
        return tuple(found) if len(found) == len(shapes_of(self)) else None

    @property
    def batch_sampler(self) -> DistributedSampler:
        """The sampler."""
        return self._sampler

    @property
    def sampler(self) -> DistributedSampler:
        """The sampler, where frameworks look for something whose ``set_epoch`` they can call."""
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass belongs to, on every rank: see :meth:`DistributedSampler.set_epoch`.

        Raises
        ------
        RuntimeError
            If accelerate calls it, for a ``DataLoader`` that it has prepared and would share out once more.
        """
        check_not_dispatched()
        self._sampler.set_epoch(epoch)

    @property
    def next_epoch(self) -> int:
        """Which epoch to go on with: see :attr:`DistributedSampler.next_epoch`."""
        return self._sampler.next_epoch

    def plan(self) -> EpochPlan:
        """Return every rank's rows and batches of the next pass: see :meth:`DistributedSampler.plan`.

        Raises
        ------
        ValueError
            As for :meth:`DistributedSampler.plan`.

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
        >>> loader.plan().rows_in_memory
        16
        """
        self._check_names()
        plan = self._sampler.plan(self.n_obs)
        held = None if plan.rows_per_request is None else plan.rows_per_request * (1 + self._read_ahead)
        return replace(plan, rows_per_request=held, cells=self._cells)

    def __len__(self) -> int:
        """Return how many batches the epoch has on this rank, those included that were done before a resume."""
        return self._sampler.batches_done + self._sampler.n_batches(self.n_obs)

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
            If the mask has the names of the cells in another order, or a state is of other data sets.
        RuntimeError
            While iterating, if another pass was begun since.
        """
        self._check_cells()
        # whoever keeps the states of workers asks for one before the first batch
        self._is_new = True
        return self._batches()

    def _batches(self) -> Generator[Any]:
        sampler = self._sampler
        # in this thread, which may be the only one that a framework tells its rank
        requests = sampler.sample(self.n_obs)
        requests.on_end = None  # the pass is as far as its consumer is, and that is said here
        begun = sampler._progress.begun
        assert begun is not None
        self._pass = pass_ = Delivered(begun)
        self._is_new = False
        load_requests = self._load_requests(requests, pass_)
        read = ahead(load_requests, self._read_ahead) if self._read_ahead else _in_turn(load_requests)
        with iterated(self), closing(requests), closing(read) as batches:
            for batch in batches:
                if self._to_be is not None:
                    batch["X"] = convert(batch["X"], preload_to_gpu=False, to=self._to_be)
                repeats = pass_.deliver(batch["index"])  # before it is yielded: whoever saves a state has this batch
                if pass_.n_yielded == begun.n_due:
                    sampler._progress.end(begun)  # a consumer who knows the number doesn't come to ask for more
                yield batch if repeats is None else {**batch, "repeated": repeats}
                del batch  # else it would be held until the next one is read
                if self._pass is not pass_:
                    raise RuntimeError(_ENDED)
            sampler._progress.end(begun)

    def _load_requests(self, requests: Pass, pass_: Delivered) -> Generator[Iterator[Any]]:
        """Return the batches of each load request of a pass, which is read when the first of them is asked for.

        Each is a pass of its own for annbatch, which would keep what it has read until the next one is read.
        """
        for request in requests:
            pass_.ask(request)
            with closing(self._read(request)) as batches:
                yield batches

    def _read(self, request: LoadRequest) -> Generator[Any]:
        """Read a load request as annbatch does."""
        self._one_request.given[threading.get_ident()] = request
        yield from super().__iter__()

    def _index_datasets(self, dataset_index_to_rows: Any) -> Coroutine[Any, Any, Any]:  # noqa: ANN401 annbatch's own
        """Read what a load request asks for: here, if zarrs has it on a local disk, or as annbatch does.

        annbatch gives what this returns to zarr's thread, in which nothing else could be read meanwhile.
        """
        local.check_zarrs_answers(lambda: any(map(local.is_by_zarrs, arrays_in(self))))
        found = local.read(self, dataset_index_to_rows)
        return super()._index_datasets(dataset_index_to_rows) if found is None else _returning(found)

    def _allocate_out(self, dataset_index_to_rows: Any) -> CSRContainer | npt.NDArray[Any]:  # noqa: ANN401 annbatch's own
        return has_room_for_pointers(super()._allocate_out(dataset_index_to_rows))

    def _allocate_per_dataset_outs(self, dataset_index_to_rows: Any) -> Any:  # noqa: ANN401 annbatch's own
        outs = super()._allocate_per_dataset_outs(dataset_index_to_rows)
        return OrderedDict((number, has_room_for_pointers(out)) for number, out in outs.items())

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return how far the epoch is: see :meth:`DistributedSampler.state_dict`.

        Parameters
        ----------
        batches_done
            How many batches of this epoch every rank has done. None takes the number that was yielded, which is known
            where the loader itself is iterated over, and not where the workers of a ``DataLoader`` do so.

        Raises
        ------
        RuntimeError
            If it isn't known; or if the pass that was begun last is not one of this loader, but of another one with the
            same sampler.
        """
        if batches_done is None:
            return self._state(None)
        batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        return self._state(self._sampler._progress.position_at(batches_done, self._sampler._n_lanes))

    def _state(self, position: Position | None) -> dict[str, Any]:
        state = self._sampler._state(self._position() if position is None else position)
        return state | {"identity": state["identity"] | {"data sets": data_sets_of(self)}}

    def _position(self) -> Position:
        """How far this loader's consumer is."""
        sampler, worker = self._sampler, current_worker()
        begun = sampler._progress.begun
        if begun is None or (self._is_new and worker is not None):
            if begun is None and sampler._progress.workers_may_read:
                raise RuntimeError(_NOT_KNOWN)
            position = sampler._progress.next_position(worker, sampler._n_lanes)
            return replace(position, worker=sampler._progress.part(worker, position))
        return begun.position_after(self._read_of(begun).n_yielded)

    def _read_of(self, begun: Begun) -> Delivered:
        """Return what this loader has delivered of a pass."""
        if begun.is_by_workers:
            raise RuntimeError(_NOT_KNOWN)
        if self._pass is None or self._pass.begun is not begun:
            raise RuntimeError(
                "The pass that was begun last is not one of this loader, but of another loader with the same sampler, "
                "or of sampler.sample(...). Give each loader a sampler of its own."
            )
        return self._pass

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks of the job have the same configuration, and as many rows of as many data sets in order.

        Every process of the job calls it, best of all once before training: see
        :meth:`DistributedSampler.check_ranks_agree`, which knows the number of rows only.

        Parameters
        ----------
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Raises
        ------
        ValueError, TimeoutError, RuntimeError
            As for :meth:`DistributedSampler.check_ranks_agree`.
        """
        checks.ranks_agree(self._sampler._job, self._description, timeout=timeout, gather=gather)

    def _description(self, job: Membership) -> Description:
        """Return what this process says of its sampler and its data sets."""
        self._check_names()
        shapes = shapes_of(self)
        rows = ", ".join(str(n_rows) for n_rows, *_ in shapes)
        n_var = shapes[0][1] if shapes else 0
        more: dict[str, int | str] = {"data sets": len(shapes), "rows of each data set": brief(rows) or "none"}
        return self._sampler._description(job, self.n_obs, more | {"n_var": n_var})

    def check_epoch_read(
        self, read: Tally | None = None, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read in the last pass what was planned.

        Every process of the job calls it, at the end of an epoch and before ``set_epoch``: see
        :meth:`DistributedSampler.check_epoch_read`.

        Parameters
        ----------
        read
            The rows of each batch that this process was given in the pass. None takes the rows of the batches that the
            loader has yielded: their ``"index"``, or without ``return_index=True`` what was asked of annbatch. They are
            known where it is iterated over, and not where the workers of a ``DataLoader`` do so.
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Raises
        ------
        ValueError, TimeoutError, RuntimeError
            As for :meth:`DistributedSampler.check_epoch_read`. Or if the rows aren't known in some process: a
            ``ValueError`` in all of them, and a ``RuntimeError`` in a process without others.

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
        return checks.epoch_read(
            self._sampler._job,
            lambda job: self._sampler._reading(job, self.n_obs, self._yielded() if read is None else read),
            timeout=timeout,
            gather=gather,
        )

    def _yielded(self) -> Tally:
        """The rows that this loader has yielded of the last pass."""
        begun = self._sampler._progress.begun
        if begun is None and self._sampler._progress.workers_may_read:
            raise RuntimeError(_NOT_KNOWN)
        return Tally() if begun is None else self._read_of(begun).read

    def to_dataloader(self, *, num_workers: int, **options: Any) -> WorkerDataLoader:  # noqa: ANN401 torch's own
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

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where a state was saved, on every rank: see :meth:`DistributedSampler.load_state_dict`.

        Add all data sets before, in the order that they had: what a state can't be gone on with then is refused here,
        and not when the next pass begins.
        """
        self._sampler._load(state, strict=strict, n_obs=self.n_obs or None, data_sets=data_sets_of(self))


_ENDED = (
    "Another pass over this loader was begun, which has ended this one: a loader has one pass at a time. For a look at "
    "batches in the middle of an epoch, make another loader, with a sampler of its own."
)
_NOT_KNOWN = (
    "The workers of a DataLoader take the batches, so that it isn't known here which were trained on. Make it with "
    "loader.to_dataloader(num_workers=...), and ask its state_dict(); or use torchdata's StatefulDataLoader. To check "
    "what was read, make a Tally, add each batch['index'] to it, and pass it."
)


def _in_turn(load_requests: Generator[Iterator[Any]]) -> Generator[Any]:
    """Read the batches of load requests where they are taken."""
    with closing(load_requests):
        for batches in load_requests:
            yield from batches


async def _returning[Found](found: Found) -> Found:
    """Return what is there, for whoever awaits it."""
    return found


class _OneRequest(Sampler):
    """A sampler whose passes have one load request each."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self._sampler = sampler
        #: For each thread, the load request of the pass that it is about to begin.
        self.given: dict[int, LoadRequest] = {}

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
        return iter([self.given.pop(threading.get_ident())])

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sample(n_obs)
