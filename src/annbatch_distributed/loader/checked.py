"""annbatch's Loader that refuses data it would read wrongly, and reads a load request at a time.

Collections on a local disk are read through zarrs in the thread that asks, see :mod:`local`.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import zarr
from annbatch import Loader
from annbatch.abc import Sampler
from zarr import Array, AsyncArray
from zarr.storage import LocalStore

from annbatch_distributed.loader import local
from annbatch_distributed.loader.inside import (
    arrays_in,
    batches_of,
    has_room_for_pointers,
    obs_of,
    shapes_of,
    stores_of,
)
from annbatch_distributed.loader.layout import check_layout

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Iterable, Iterator
    from typing import Self

    import anndata as ad
    import numpy.typing as npt
    import pandas as pd
    from annbatch import DatasetCollection
    from annbatch.types import LoadRequest
    from annbatch.utils import CSRContainer

__all__ = ["CheckedLoader"]


class CheckedLoader(Loader[Any, Any]):
    """annbatch's Loader, with checks of what is added to it, that reads a load request at a time."""

    def __init__(self, *, batch_sampler: Sampler, **kwargs: Any) -> None:  # noqa: ANN401 annbatch's own
        self._one_request = _OneRequest(batch_sampler)
        super().__init__(batch_sampler=self._one_request, **kwargs)
        # of data sets whose cells have names only, of which annbatch keeps nothing
        self._names: dict[int, pd.Index[Any]] = {}

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
        for group in collection:
            _in_place(group)
        _warn_of_zarrs(collection)
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
        """The names of the cells of each data set; None if some have none that are known."""
        known = self._names | {number: obs.index for number, obs in enumerate(obs_of(self))}
        numbers = range(len(shapes_of(self)))
        return tuple(known[number] for number in numbers) if known.keys() >= {*numbers} else None

    def read(self, request: LoadRequest) -> Generator[Any]:
        """Read a load request as annbatch does."""
        # in a pass of its own: annbatch keeps what it has read until it has read the next one
        self._one_request.given[threading.get_ident()] = request
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
        local.check_zarrs_answers(lambda: any(map(local.is_by_zarrs, arrays_in(self))))
        rows = local.read(self, dataset_index_to_rows)
        return super()._index_datasets(dataset_index_to_rows) if rows is None else _returning(rows)

    def _allocate_out(self, dataset_index_to_rows: Any) -> CSRContainer | npt.NDArray[Any]:  # noqa: ANN401 annbatch's own
        return has_room_for_pointers(super()._allocate_out(dataset_index_to_rows))

    def _allocate_per_dataset_outs(self, dataset_index_to_rows: Any) -> Any:  # noqa: ANN401 annbatch's own
        outs = super()._allocate_per_dataset_outs(dataset_index_to_rows)
        return OrderedDict((number, has_room_for_pointers(out)) for number, out in outs.items())


def _in_place(data: Any) -> Any:  # noqa: ANN401 whatever annbatch takes
    """Return data whose relative path leads to where it leads now, also once the process goes to another folder."""
    place = getattr(getattr(data, "group", data), "store_path", None)
    if place is None or not isinstance(place.store, LocalStore):
        return data
    place.store.root = place.store.root.absolute()
    if not isinstance(data, Array) or not local.is_by_zarrs(data.async_array):
        return data
    # zarrs has the path of when the array was opened
    return Array(AsyncArray(metadata=data.metadata, store_path=place, config=data.async_array.config))


def _warn_of_zarrs(collection: DatasetCollection) -> None:
    """Warn of a collection that zarrs would read from object storage."""
    for group in collection:
        cells: Any = group["X"]
        array = cells if isinstance(cells, Array) else cells["data"]
        if local.is_far_by_zarrs(array.async_array):
            warnings.warn(
                f"zarrs reads {array.store} one chunk a request, few at once: zarrs 0.2.3 took 25 times as long as "
                "zarr's own codecs where a request took 30 ms. Have these read, before the collection is opened: "
                "zarr.config.set({'codec_pipeline.path': 'zarr.core.codec_pipeline.BatchedCodecPipeline'}).",
                UserWarning,
                stacklevel=3,
            )
            return


async def _returning[Value](value: Value) -> Value:
    """Return what is there, for whoever awaits it."""
    return value


class _OneRequest(Sampler):
    """A sampler for annbatch, whose passes have one load request each."""

    def __init__(self, sampler: Sampler) -> None:
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
