"""Embeddings: what a model makes of every cell, computed by all ranks, and written in the order of the rows.

1. Ranks compare which cells they have.
2. They take rank 0's weights, since DDP leaves running statistics different, and compare what they make of the first
   cells. The array holds it too, so that another model doesn't resume it.
3. The array's chunks hold whole batches. Those without values are dealt to the ranks: no two ranks write to the same
   chunk, and batches are the same on any number of ranks.
4. A chunk is written when its last batch is done, so that a job that was killed resumes with the next chunk.

All ranks meet after each step: what fails on any of them raises on every rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from annbatch import Loader
from annbatch.samplers import SequentialSampler
from zarr.storage import StoreLike

from annbatch_distributed.checks import Timeout
from annbatch_distributed.checks.exchange import gather_texts, initialized, seconds_of
from annbatch_distributed.loader import StatefulLoader
from annbatch_distributed.loader._annbatch import preloads_to_gpu
from annbatch_distributed.ranks import Deferred, DistInfo, Placement, Rank, deferred, resolve
from annbatch_distributed.ranks.torch import default_group as torch_group
from annbatch_distributed.rows import BOUND, integer
from annbatch_distributed.sampler import DistributedSampler

type Compute = Callable[[Any], npt.ArrayLike]


__all__ = ["embed"]

#: Rows of a chunk of the array, at most, and of a load request, about.
_ROWS_OF_CHUNK, _ROWS_OF_REQUEST = 65_536, 8_192
#: A rank has so many chunks, if there are enough rows: a kill costs one chunk, and ranks differ by one.
_CHUNKS_OF_RANK = 8
#: Other hardware and other numbers of threads compute numbers that differ by no more.
_TOLERANCE = 1e-4
#: Of so many cells and columns are the numbers that are compared.
_N_FIRST = 8
#: zarr renames a chunk that it has written; zarrs writes it in place.
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
    where ranks have as many threads. When a job was killed, another call resumes, on any number of ranks, and keeps
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
    seconds, job = seconds_of(timeout), _placement(dist_info)
    meets = job.rank.world_size > 1 and (job.framework or initialized()) is not None

    def compare(said: Mapping[str, Any]) -> None:
        if meets:
            _check_same(gather_texts(json.dumps(said), job, seconds=seconds))

    is_shown = progress and job.rank.rank == 0
    steps = _steps(model, data, store, job, batch_size, meets=meets, is_shown=is_shown)
    # after each step, all ranks hear whether one has failed or says something else, before the next one begins
    while True:
        try:
            said = next(steps, None)
        except Exception as error:
            compare({"failed": f"{type(error).__name__}: {error}"})
            raise
        if said is None:
            return zarr.open_array(store, mode="r")
        compare(said)


def _check_same(texts: Mapping[int, str]) -> None:
    """Compare what processes, by number, say after a step."""
    said = {number: json.loads(text) for number, text in texts.items()}
    for number, words in said.items():
        if "failed" in words:
            raise ValueError(f"No rank continues, since process {number} has failed: {words['failed']}")
    first, *_ = said
    for number, words in said.items():
        if not _is_same(said[first], words):
            raise ValueError(
                "No rank continues, since they have different models or cells: of them and of the first cells, process "
                f"{first} makes {said[first]}, and process {number} {words}. Give all of them the same ones."
            )


def _is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two processes, or two jobs, say the same, but for the rounding of numbers."""
    if {**first, "values": None} != {**second, "values": None}:
        return False
    values, others = (np.array(words.get("values", []), dtype=float) for words in (first, second))
    # numbers near 0 are compared by the largest of all, since sums of others round there
    least = _TOLERANCE * float(np.max(np.abs(values), initial=0, where=np.isfinite(values)))
    return np.allclose(values, others, rtol=_TOLERANCE, atol=least, equal_nan=True)


def _take_model_of_rank_0(model: Any, job: Placement) -> None:  # noqa: ANN401 of scvi-tools, or any function
    """Give the network of a model rank 0's weights, if all processes of torch's job call this."""
    network: Any = getattr(model, "module", None)
    if job.rank.world_size == 1 or initialized() != "torch" or not hasattr(network, "load_state_dict"):
        return
    import torch.distributed as dist

    if job.rank != torch_group().rank:
        return
    weights = [{name: value.cpu() for name, value in network.state_dict().items()} if job.rank.rank == 0 else None]
    dist.broadcast_object_list(weights, src=0)
    network.load_state_dict(weights[0])


def _placement(dist_info: DistInfo | Deferred | None) -> Placement:
    if dist_info is not None:
        return deferred(dist_info).placement()
    if (framework := initialized()) is not None:
        return resolve(framework)
    try:
        return resolve("env")
    except RuntimeError:  # no launcher
        return resolve(Rank(0, 1))


def _loader(data: Any) -> Loader[Any, Any]:  # noqa: ANN401 anything
    loader = data if isinstance(data, Loader) else getattr(data, "dataset", None)
    if not isinstance(loader, Loader):
        raise TypeError(
            f"Expected an annbatch Loader, or a data module with one as its dataset, got {data!r} of type "
            f"{type(data).__name__}."
        )
    return loader


def _compute(model: Any, data: Any) -> Compute:  # noqa: ANN401 anything
    """Return the function from what the loader yields to an array."""
    of_batch: Compute
    if hasattr(model, "get_latent_representation"):
        of_batch = lambda batch: model.get_latent_representation(dataloader=[batch])  # noqa: E731 of one line
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
    """Have torch draw the same random numbers for a batch on any rank."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(number)
        yield


def _steps(
    model: Any,  # noqa: ANN401 of scvi-tools, or any function
    data: Any,  # noqa: ANN401 a loader of annbatch's, or a data module
    store: StoreLike,
    job: Placement,
    batch_size: int | None,
    *,
    meets: bool,
    is_shown: bool,
) -> Iterator[dict[str, Any]]:
    """Embed a rank's part of the cells, and yield after each step what must be the same on all ranks."""
    # 1. the cells, the model, and the array that is there
    loader = _loader(data)
    compute, n_obs, sampler = _compute(model, data), loader.n_obs, loader.batch_sampler
    if batch_size is None:
        batch_size = sampler.batch_size
        # with virtual ranks, each has batches of its own, whatever their number
        if batch_size is not None and isinstance(sampler, DistributedSampler) and sampler.virtual_ranks:
            batch_size = batch_size * sampler.world_size // sampler.virtual_ranks
    if batch_size is None:
        raise ValueError(f"The sampler of the loader, {sampler!r}, has no batch size: pass batch_size.")
    batch_size = integer("batch_size", batch_size, least=1, below=BOUND)
    cells = {"n_obs": n_obs, "n_var": loader.n_var, "batch_size": batch_size}
    _open(store, cells)
    yield cells

    # 2. what the model of rank 0 makes of the first cells
    _take_model_of_rank_0(model, job)
    _, like = next(_batches([slice(0, min(batch_size, n_obs))], loader, compute, batch_size, store))
    shown = like[:_N_FIRST, :_N_FIRST].astype(float).tolist()
    # as texts, since JSON has no nan
    made = {"dtype": str(like.dtype), "width": like.shape[1], "values": [list(map(str, row)) for row in shown]}
    first = cells | made
    yield first

    # 3. the array, which one rank makes and all others open, and the chunks that are left
    array = _open(store, cells)
    if array is None:
        array = _make(store, cells, first, job.rank.world_size)
    there: Any = dict(array.attrs)["annbatch_distributed"]
    if not _is_same(there, first):
        raise ValueError(
            f"The array at {store} was begun with another model, or with other cells: of the first ones, that made "
            f"{there}, and this one makes {first}. Remove it to begin anew, or name another place."
        )
    n_rows = array.chunks[0]
    chunks = [slice(start, min(start + n_rows, n_obs)) for start in range(0, n_obs, n_rows)]
    # chunks go to ranks in turn: rank 1 of 3 has chunks 1, 4, 7, ...
    mine = slice(job.rank.rank, None, job.rank.world_size)
    if meets:
        left = _without_values(array, chunks)
        own = left[mine]
        yield {"left": [rows.start for rows in left]}
    else:  # the array may change while this rank looks at it
        own = _without_values(array, chunks[mine])

    # 4. the values of this rank's chunks
    from tqdm.auto import tqdm

    with tqdm(total=sum(rows.stop - rows.start for rows in own), unit=" cells", disable=not is_shown) as bar:
        chunk: list[npt.NDArray[Any]] = []
        for rows, values in _batches(own, loader, compute, batch_size, store, like):
            chunk.append(values)
            bar.update(len(values))
            # a chunk is written when its last batch is there, as no two ranks may write to one chunk
            if rows.stop % n_rows == 0 or rows.stop == n_obs:
                array[rows.stop - sum(map(len, chunk)) : rows.stop] = np.concatenate(chunk)
                chunk.clear()
    yield {}


def _open(store: StoreLike, cells: Mapping[str, int]) -> zarr.Array[Any] | None:
    """Return the array that is there; a ValueError if it is of other cells."""
    try:
        with zarr.config.set(_WRITTEN_WHOLE):
            array = zarr.open_array(store, mode="r+")
    except (FileNotFoundError, zarr.errors.ArrayNotFoundError):
        return None
    except zarr.errors.NodeTypeValidationError:
        raise ValueError(f"At {store} is no array. Remove what is there, or name another place.") from None
    told: Any = array.attrs.get("annbatch_distributed") or {}
    if {name: told.get(name) for name in cells} != cells:
        raise ValueError(
            f"At {store} is an array of something else: expected one of {cells}, found {told or None}. Remove it, or "
            "name another place."
        )
    return array


def _make(store: StoreLike, cells: Mapping[str, int], first: Mapping[str, Any], world_size: int) -> zarr.Array[Any]:
    """Make the array, or open it if another rank has made it meanwhile."""
    n_obs, batch_size = cells["n_obs"], cells["batch_size"]
    # 1,000 rows, batches of 4 and 3 ranks: 250 batches // (3 * 8) are 10 batches, or 40 rows, a chunk
    fair = -(-n_obs // batch_size) // (world_size * _CHUNKS_OF_RANK)
    n_rows = batch_size * max(1, min(fair, _ROWS_OF_CHUNK // batch_size))
    try:
        with zarr.config.set(_WRITTEN_WHOLE):
            return zarr.create_array(
                store,
                shape=(n_obs, first["width"]),
                chunks=(n_rows, first["width"]),
                dtype=first["dtype"],
                fill_value=np.nan,
                attributes={"annbatch_distributed": dict(first)},
            )
    except zarr.errors.ContainsArrayError:
        array = _open(store, cells)
        assert array is not None
        return array


def _without_values(array: zarr.Array[Any], chunks: list[slice]) -> list[slice]:
    return [rows for rows in chunks if np.isnan(np.asarray(array[rows])).all()]


def _batches(
    ranges: list[slice],
    loader: Loader[Any, Any],
    compute: Compute,
    batch_size: int,
    store: StoreLike,
    like: npt.NDArray[Any] | None = None,
) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """Yield the rows of each batch in some ranges of rows, and what the model makes of it, of the same kind."""
    if not ranges:
        return
    sampler = DistributedSampler(
        SequentialSampler(batch_size, max(1, _ROWS_OF_REQUEST // batch_size), batch_size),
        dist_info=Rank(0, 1),
        remainder="keep",
        mask=ranges,
        seed=0,
    )
    ahead = 0 if preloads_to_gpu(loader) else 1
    for batch in StatefulLoader.from_loader(loader, batch_sampler=sampler, return_index=True, read_ahead=ahead):
        index = np.asarray(batch["index"])
        rows = slice(int(index[0]), int(index[-1]) + 1)
        # by the batch's first row, so that any rank draws the same for it
        with _seeded(rows.start):
            made: Any = compute(batch)
        values = np.asarray(made.detach().cpu() if hasattr(made, "detach") else made)
        if values.dtype.kind != "f":
            raise TypeError(
                f"Expected floats from the model, which an array that isn't complete needs, got {values.dtype}."
            )
        if values.ndim != 2 or len(values) != len(index):
            raise ValueError(
                f"Expected an array with a row for each of {len(index)} cells from the model, got one of shape "
                f"{values.shape}."
            )
        like = values if like is None else like
        if (values.dtype, values.shape[1]) != (like.dtype, like.shape[1]):
            raise ValueError(
                f"Expected {like.dtype} of width {like.shape[1]} from the model, as for other cells in {store}, got "
                f"{values.dtype} of width {values.shape[1]} for rows {rows.start} to {rows.stop - 1}. If it is another "
                "model, name another place."
            )
        yield rows, values
