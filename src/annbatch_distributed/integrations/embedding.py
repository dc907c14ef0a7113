"""Embeddings: what a model makes of every cell, computed by all ranks, and written in the order of the rows.

1. Ranks compare which cells and which network they have.
2. They take rank 0's weights, since DDP leaves running statistics different, and compare what they make of the first
   cells. The array knows it too: what another model has begun isn't gone on with.
3. The array is cut into its chunks along the rows, which hold whole batches. The chunks that hold no values yet are
   dealt to the ranks: no two of them write to the same chunk, and batches are the same ones on any number of ranks.
4. A chunk is written at once, when its last batch is done, so that a job that was killed goes on where it was.

After each step all ranks meet, so that what fails on one of them is an error on all.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from annbatch import Loader
from annbatch.samplers import SequentialSampler

from annbatch_distributed.checks.exchange import gather_texts, initialized, seconds_of
from annbatch_distributed.integers import BOUND, integer
from annbatch_distributed.loader import StatefulLoader
from annbatch_distributed.loader.inside import preloads_to_gpu
from annbatch_distributed.ranks import Rank, resolve
from annbatch_distributed.ranks.deferred import Deferred
from annbatch_distributed.ranks.torch import default_group as torch_group
from annbatch_distributed.sampler import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt
    from zarr.storage import StoreLike

    from annbatch_distributed.checks import Timeout
    from annbatch_distributed.ranks import DistInfo, Membership

    type Compute = Callable[[Any], npt.ArrayLike]

__all__ = ["embed"]

#: Rows of a chunk of the array, at most, and of a load request, about.
_ROWS_OF_CHUNK, _ROWS_OF_REQUEST = 65_536, 8_192
#: How many chunks a rank has at least, where there are rows enough: a kill costs one, and ranks differ by one.
_CHUNKS_OF_RANK = 8
#: What other hardware or another number of threads computes differs by no more, of so many cells and numbers.
_TOLERANCE, _N_FIRST = 1e-4, 8
#: zarr's own way to write chunks.
_WRITTEN_WHOLE = {"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}


def embed(
    model: Any,  # noqa: ANN401 of scvi-tools, or any function
    data: Any,  # noqa: ANN401 a loader of annbatch's, or a data module
    store: StoreLike,
    *,
    dist_info: DistInfo | Deferred | None = None,
    batch_size: int | None = None,
    progress: bool = True,
    timeout: Timeout = 300.0,
) -> zarr.Array[Any]:
    """Compute what a model makes of every cell, on all ranks, into a zarr array in the order of the rows.

    Every rank of the job calls it. It reads a part of the cells, in an order that is fast to read, and writes it. The
    network of a model becomes that of rank 0, and ranks that would write something else are an error before anything is
    written. The array is the same on any number of ranks, bit for bit, as batches are and what torch draws for them,
    where ranks have as many threads. When a job was killed, another call goes on, on any number of ranks, and keeps
    what there is.

    Parameters
    ----------
    model
        A trained model of scvi-tools, of which ``get_latent_representation`` is written; or a function that is given a
        batch and returns an array of floats, a row for each cell, of a width that is the same for all batches.
    data
        The cells: an annbatch ``Loader``, whose order and mask don't count; or a data module such as scvi-tools'
        ``AnnbatchDataModule``, distributed or not, which makes the model's batches of them.
    store
        Where the array is, or will be: the path of an array of zarr with the shape (rows of the cells, width), or
        another store of zarr's.
    dist_info
        As for :class:`.DistributedSampler`. None takes torch's default process group if there is one, or else the
        launcher's variables, or else this process for the only one.
    batch_size
        Rows of a batch. None takes that of the loader's sampler.
    progress
        Whether rank 0 shows a bar of its own rows.
    timeout
        For how many seconds a rank that is done waits for the others.

    Returns
    -------
    The array, opened for reading. If no framework is initialised by which ranks could wait for each other, that of
    other ranks may not be complete yet.

    Raises
    ------
    TypeError
        If ``model`` or ``data`` is something else, or the model returns no floats.
    ValueError
        On every rank, if they have other cells or networks, make other things of the first cells, or if one fails. If
        there is another array in ``store``, of other cells or by another model; or if the model returns other shapes.
    TimeoutError
        If another rank didn't come in time. What it has written is kept.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> import zarr
    >>> from annbatch import Loader
    >>> from annbatch_distributed.integrations.embedding import embed
    >>> cells = ad.AnnData(np.arange(20.0).reshape(10, 2))
    >>> loader = Loader(
    ...     batch_size=4, chunk_size=4, preload_nchunks=1, preload_to_gpu=False
    ... ).add_adata(cells)
    >>> store = zarr.storage.MemoryStore()  # or a path
    >>> sums = embed(
    ...     lambda batch: batch["X"].sum(axis=1, keepdims=True),
    ...     loader,
    ...     store,
    ...     progress=False,
    ... )
    >>> sums[:, 0].tolist()
    [1.0, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0, 29.0, 33.0, 37.0]
    """
    seconds, job = seconds_of(timeout), _membership(dist_info)
    meets = job.rank.world_size > 1 and (job.framework or initialized()) is not None

    def compare(said: Mapping[str, Any]) -> None:
        if meets:
            _check_same(gather_texts(json.dumps(said), job, seconds=seconds))

    run = _Run(model, data, store, batch_size, job, is_shown=progress and job.rank.rank == 0, meets=meets)
    for step in (run.prepare, run.first, run.begin, run.go):
        try:
            said = step()
        except Exception as error:
            compare({"failed": f"{type(error).__name__}: {error}"})
            raise
        compare(said)
    return zarr.open_array(store, mode="r")


def _check_same(texts: Mapping[int, str]) -> None:
    """Compare what processes, by number, say after a step."""
    found = {number: json.loads(text) for number, text in texts.items()}
    for number, one in found.items():
        if "failed" in one:
            raise ValueError(f"No rank goes on, since process {number} has failed: {one['failed']}")
    first, *_ = found
    for number, one in found.items():
        if not _is_same(found[first], one):
            raise ValueError(
                "No rank goes on, since they have different models or cells: of them and of the first cells, process "
                f"{first} makes {found[first]}, and process {number} {one}. Give all of them the same ones."
            )


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two processes, or two jobs, say the same, where numbers may be what other hardware rounds."""
    if {**one, "values": None} != {**other, "values": None}:
        return False
    values, others = (np.array(each.get("values", []), dtype=float) for each in (one, other))
    least = _TOLERANCE * float(np.max(np.abs(values), initial=0, where=np.isfinite(values)))
    return np.allclose(values, others, rtol=_TOLERANCE, atol=least, equal_nan=True)


def _take_model_of_rank_0(model: Any, job: Membership) -> None:  # noqa: ANN401 of scvi-tools, or any function
    """Give the network of a model the weights that it has on rank 0, if all processes of torch's job call this."""
    module = _network(model)
    if job.rank.world_size == 1 or initialized() != "torch" or module is None:
        return
    import torch.distributed as dist

    if job.rank != torch_group().rank:
        return
    held = [{name: value.cpu() for name, value in module.state_dict().items()} if job.rank.rank == 0 else None]
    dist.broadcast_object_list(held, src=0)
    module.load_state_dict(held[0])


def _network(model: Any) -> Any:  # noqa: ANN401 torch's
    """Return what has the weights of a model of scvi-tools; None if there is no such thing."""
    module = getattr(model, "module", None)
    return module if hasattr(module, "load_state_dict") else None


def _shapes(model: Any) -> str:  # noqa: ANN401 of scvi-tools, or any function
    """Return a digest of the shapes of a network's weights."""
    module = _network(model)
    shapes = {} if module is None else {name: str(tuple(value.shape)) for name, value in module.state_dict().items()}
    return blake2b(json.dumps(shapes).encode(), digest_size=8).hexdigest()


def _membership(dist_info: DistInfo | Deferred | None) -> Membership:
    if isinstance(dist_info, Deferred):
        return dist_info.membership()
    if dist_info is not None:
        return resolve(dist_info)
    if initialized() is not None:
        return resolve("torch" if initialized() == "torch" else "jax")
    try:
        return resolve("env")
    except RuntimeError:  # no launcher
        return resolve(Rank(0, 1))


def _loader(data: Any) -> Loader[Any, Any]:  # noqa: ANN401 anything may come
    """Return the loader that has the cells."""
    loader = data if isinstance(data, Loader) else getattr(data, "dataset", None)
    if not isinstance(loader, Loader):
        raise TypeError(
            f"Expected an annbatch Loader, or a data module with one as its dataset, got {data!r} of type "
            f"{type(data).__name__}."
        )
    return loader


def _compute(model: Any, data: Any) -> Compute:  # noqa: ANN401 anything may come
    """Return the function from what the loader yields to an array."""
    if hasattr(model, "get_latent_representation"):

        def of_batch(batch: Any) -> npt.ArrayLike:  # noqa: ANN401 the data module's
            latent: npt.ArrayLike = model.get_latent_representation(dataloader=[batch])
            return latent
    elif callable(model):
        of_batch = model
    else:
        raise TypeError(
            "Expected a model with get_latent_representation, or a function from a batch to an array, got "
            f"{model!r} of type {type(model).__name__}."
        )
    if hasattr(data, "on_before_batch_transfer"):
        return lambda batch: of_batch(data.on_before_batch_transfer(batch, 0))
    if any(kind.__module__.partition(".")[0] == "scvi" for kind in type(model).__mro__):
        raise TypeError(
            f"A model of scvi-tools needs its data module, which names what it reads, got {type(data).__name__}. Pass "
            "the AnnbatchDataModule, distributed or not."
        )
    return of_batch


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Have torch draw the same random numbers for a batch whoever computes it, and go on as before."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(number)
        yield


class _Run:
    """A rank's part of an embedding, in steps, each of which returns what must be the same on all ranks."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401 of scvi-tools, or any function
        data: Any,  # noqa: ANN401 a loader of annbatch's, or a data module
        store: StoreLike,
        batch_size: int | None,
        job: Membership,
        *,
        is_shown: bool,
        meets: bool,
    ) -> None:
        self._model, self._data, self._store, self._asked_size, self._job = model, data, store, batch_size, job
        self._is_shown, self._meets = is_shown, meets
        # what the model makes of a cell
        self._kind: tuple[np.dtype[Any], int] | None = None

    def prepare(self) -> dict[str, Any]:
        """Look at what there is: the cells, the model, and the array."""
        self._loader = _loader(self._data)
        self._compute, self._n_obs = _compute(self._model, self._data), self._loader.n_obs
        sampler, size = self._loader.batch_sampler, self._asked_size
        if size is None:  # of virtual ranks, each has batches of its own, whatever their number
            size = sampler._job.arguments.batch_size if isinstance(sampler, DistributedSampler) else sampler.batch_size
        if size is None:
            raise ValueError(f"The sampler of the loader, {sampler!r}, has no batch size: pass batch_size.")
        self._batch_size = integer("batch_size", size, least=1, below=BOUND)
        self._found = self._open()
        return self._told | {"weights": _shapes(self._model)}

    def _open(self) -> zarr.Array[Any] | None:
        """Return the array that there is; a ValueError if it is one of other cells."""
        try:
            # whatever others read with: zarrs writes a chunk in place, where zarr renames it when it is whole
            with zarr.config.set(_WRITTEN_WHOLE):
                array = zarr.open_array(self._store, mode="r+")
        except (FileNotFoundError, zarr.errors.ArrayNotFoundError):
            return None
        except zarr.errors.NodeTypeValidationError:
            raise ValueError(f"At {self._store} is no array. Remove what is there, or name another place.") from None
        told: Any = array.attrs.get("annbatch_distributed") or {}
        if {name: told.get(name) for name in self._told} != self._told:
            raise ValueError(
                f"At {self._store} is an array of something else: expected one of {self._told}, found {told or None}. "
                "Remove it, or name another place."
            )
        return array

    @property
    def _told(self) -> dict[str, Any]:
        """What the array says of itself."""
        return {"n_obs": self._n_obs, "n_var": self._loader.n_var, "batch_size": self._batch_size}

    def first(self) -> dict[str, Any]:
        """Return what the model of rank 0 makes of the first cells."""
        _take_model_of_rank_0(self._model, self._job)
        _, values = next(self._batches([slice(0, min(self._batch_size, self._n_obs))]))
        shown = values[:_N_FIRST, :_N_FIRST].astype(float).tolist()
        # as texts, since JSON has no nan
        made = {"dtype": str(values.dtype), "width": values.shape[1], "values": [list(map(str, row)) for row in shown]}
        self._first = self._told | made
        return self._first

    def begin(self) -> dict[str, Any]:
        """Make the array, or go on with the one that there is; a ValueError if that is of another model."""
        found, first = self._found, self._first
        if found is None:
            n_batches = -(-self._n_obs // self._batch_size)
            fair = n_batches // (self._job.rank.world_size * _CHUNKS_OF_RANK)
            n_rows = self._batch_size * max(1, min(fair, _ROWS_OF_CHUNK // self._batch_size))
            with zarr.config.set(_WRITTEN_WHOLE):
                try:
                    found = zarr.create_array(
                        self._store,
                        shape=(self._n_obs, first["width"]),
                        chunks=(n_rows, first["width"]),
                        dtype=first["dtype"],
                        fill_value=np.nan,
                        attributes={"annbatch_distributed": first},
                    )
                except zarr.errors.ContainsArrayError:  # another rank has made it meanwhile
                    found = self._open()
            assert found is not None
        there: Any = dict(found.attrs)["annbatch_distributed"]
        if not _is_same(there, first):
            raise ValueError(
                f"The array at {self._store} was begun with another model, or with other cells: of the first ones, "
                f"that made {there}, and this one makes {first}. Remove it to begin anew, or name another "
                "place."
            )
        self._array, self._n_rows = found, found.chunks[0]
        rank, world_size = self._job.rank.rank, self._job.rank.world_size
        chunks = [slice(start, start + self._n_rows) for start in range(0, self._n_obs, self._n_rows)]
        if self._meets:  # so that nobody writes now, and all see the same chunks
            left = self._without_values(chunks)
            self._own = left[rank::world_size]
            return {"left": [rows.start for rows in left]}
        self._own = self._without_values(chunks[rank::world_size])
        return {}

    def _without_values(self, chunks: list[slice]) -> list[slice]:
        return [rows for rows in chunks if np.isnan(np.asarray(self._array[rows])).all()]

    def go(self) -> dict[str, Any]:
        """Compute and write this rank's chunks."""
        from tqdm.auto import tqdm

        own = [slice(rows.start, min(rows.stop, self._n_obs)) for rows in self._own]
        n_rows = sum(rows.stop - rows.start for rows in own)
        with tqdm(total=n_rows, unit=" cells", disable=not self._is_shown) as bar:
            found: list[npt.NDArray[Any]] = []
            for rows, values in self._batches(own):
                found.append(values)
                bar.update(len(values))
                if rows.stop % self._n_rows == 0 or rows.stop == self._n_obs:
                    self._array[rows.stop - sum(map(len, found)) : rows.stop] = np.concatenate(found)
                    found.clear()
        return {}

    def _batches(self, masks: list[slice]) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        """Yield the rows of each batch in some stretches of rows, and what the model makes of it."""
        if not masks:
            return
        joined = [masks[0]]
        for before, rows in pairwise(masks):
            if before.stop == rows.start:
                joined[-1] = slice(joined[-1].start, rows.stop)
            else:
                joined.append(rows)
        size = self._batch_size
        sampler = DistributedSampler(
            SequentialSampler(chunk_size=size, preload_nchunks=max(1, _ROWS_OF_REQUEST // size), batch_size=size),
            dist_info=Rank(0, 1),
            remainder="keep",
            mask=joined,
            seed=0,
        )
        ahead = 0 if preloads_to_gpu(self._loader) else 1
        loader = StatefulLoader.from_loader(self._loader, batch_sampler=sampler, return_index=True, read_ahead=ahead)
        for batch in loader:
            index = np.asarray(batch["index"])
            rows = slice(int(index[0]), int(index[-1]) + 1)
            with _seeded(rows.start):
                made: Any = self._compute(batch)
            values = np.asarray(made.detach().cpu() if hasattr(made, "detach") else made)
            self._check_kind(values, rows)
            yield rows, values

    def _check_kind(self, values: npt.NDArray[Any], rows: slice) -> None:
        n_rows = rows.stop - rows.start
        if values.dtype.kind != "f":
            raise TypeError(
                f"Expected floats from the model, which an array that isn't complete needs, got {values.dtype}."
            )
        if values.ndim != 2 or len(values) != n_rows:
            raise ValueError(
                f"Expected an array with a row for each of {n_rows} cells from the model, got one of shape "
                f"{values.shape}."
            )
        kind = values.dtype, values.shape[1]
        if self._kind is None:
            self._kind = kind
        if kind != self._kind:
            expected, arrived = (f"{dtype} of width {width}" for dtype, width in (self._kind, kind))
            raise ValueError(
                f"Expected {expected} from the model, as for other cells in {self._store}, got {arrived} for rows "
                f"{rows.start} to {rows.stop - 1}. If it is another model, name another place."
            )
