"""Embeddings of all cells: computed by all ranks, and written to a zarr array in the order of the rows.

1. Ranks compare their cells.
2. Ranks take the weights of rank 0, since running statistics differ between ranks under DDP, and compare the values of
   the first cells. These values are also stored with the array, so that a model with different values can't resume it.
3. The chunks of the array have whole batches. Chunks without values are assigned to the ranks, so no two ranks write to
   the same chunk, and batches are the same on any number of ranks.
4. A chunk is written when its last batch is done, so a job that was killed resumes with the next chunk.

Ranks synchronize after each step, so that an error on one rank raises on every rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from reprlib import repr as shortened
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from annbatch import Loader
from annbatch.samplers import SequentialSampler
from zarr.storage import StoreLike

from annbatch_distributed.checks import Timeout
from annbatch_distributed.checks.exchange import gather_texts, initialized, seconds_of
from annbatch_distributed.core.values import BOUND, integer
from annbatch_distributed.loader import StatefulLoader
from annbatch_distributed.loader._annbatch import preloads_to_gpu
from annbatch_distributed.ranks import DistInfo, Placement, Rank, RankSource
from annbatch_distributed.ranks.torch import default_group as torch_group
from annbatch_distributed.sampler import DistributedSampler

#: Floats of PyTorch that NumPy has, too.
_TORCH_FLOATS = {"torch.float16", "torch.float32", "torch.float64"}

type Compute = Callable[[Any], npt.ArrayLike]


__all__ = ["embed"]

#: Largest number of rows of a chunk of the array, and approximate number of rows of a load request.
_ROWS_OF_CHUNK, _ROWS_OF_REQUEST = 65_536, 8_192
#: Number of chunks of a rank, if there are enough rows: a kill loses one chunk, and ranks differ by one chunk.
_CHUNKS_OF_RANK = 8
#: Largest relative difference between values on different hardware or numbers of threads.
_TOLERANCE = 1e-4
#: Number of cells, and of columns, whose values are compared.
_N_FIRST = 8
#: zarr writes a chunk to a temporary file and renames it; zarrs writes it in place, which a kill would interrupt.
_WRITTEN_WHOLE = {"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}


def embed(
    model: Any,  # noqa: ANN401 of scvi-tools, or any function
    data: Any,  # noqa: ANN401 an annbatch loader, or a data module
    store: StoreLike,
    *,
    dist_info: DistInfo | None = None,
    batch_size: int | None = None,
    progress: bool = True,
    timeout: Timeout = 300.0,
) -> zarr.Array[Any]:
    """Compute an embedding of every cell on all ranks, into a zarr array.

    Call it on every rank of the job. Each rank reads, embeds and writes a part of the cells; the rows of the array are
    in the order of the cells. Rank 0's weights are broadcast. If ranks have different values for the first cells, every
    rank raises before anything is written.

    The array is bit for bit the same on any number of ranks with equal numbers of threads, since batches and PyTorch's
    random numbers are the same. If the job was killed, call it again, on any number of ranks: it resumes and keeps the
    values in the array.

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

    Parameters
    ----------
    model
        Trained model of scvi-tools, whose ``get_latent_representation`` is written; or a function that takes a batch
        and returns an array of floats of shape ``(n_cells, width)``, with the same width for all batches.
    data
        Annbatch ``Loader`` of the cells, whose order and mask are ignored; or a data module such as scvi-tools'
        ``AnnbatchDataModule``, distributed or not, which prepares batches for the model.
    store
        Path or zarr store of the array, which is created, or resumed if it exists.
    dist_info
        Source of the rank and the world size, as for :class:`.DistributedSampler`. None takes PyTorch's default process
        group, or else JAX's processes, the variables of the launcher, or a single process (default).
    batch_size
        Number of rows of a batch. None takes the batch size of the loader's sampler (default).
    progress
        True to show a progress bar for the rows of rank 0 (default).
    timeout
        Time to wait for other ranks, in seconds or as a :class:`datetime.timedelta` (default 300 s).

    Returns
    -------
    zarr.Array
        Array of shape ``(n_obs, width)``, opened for reading. If neither PyTorch nor JAX is initialized, ranks can't
        wait for each other, and the parts of other ranks may be incomplete.

    Raises
    ------
    TypeError
        If ``model`` or ``data`` has the wrong type, or the model doesn't return floats. If there are several ranks,
        they raise a ValueError that quotes it.
    ValueError
        On every rank, if ranks have different cells, or different values of the first cells, or if a rank fails. If
        ``store`` has an array of different cells or of a model with different values for the first cells, or
        if the model returns a wrong shape.
    TimeoutError
        If a rank doesn't respond in time. Its chunks in the array are kept.
    """
    seconds, job = seconds_of(timeout), _placement(dist_info)
    meets = job.world_size > 1 and (job.framework or initialized()) is not None

    def compare(facts: Mapping[str, Any]) -> None:
        if meets:
            _check_same(gather_texts(json.dumps(facts), job, seconds=seconds))

    is_shown = progress and job.rank == 0
    steps = _steps(model, data, store, job, batch_size, meets=meets, is_shown=is_shown)
    # after each step, all ranks learn of errors and differences before the next step begins
    while True:
        try:
            facts = next(steps, None)
        except Exception as error:
            compare({"failed": f"{type(error).__name__}: {error}"})
            raise
        if facts is None:
            return zarr.open_array(store, mode="r")
        compare(facts)


def _check_same(texts: Mapping[int, str]) -> None:
    """Compare the facts of all processes, by number, after a step."""
    facts_of = {number: json.loads(text) for number, text in texts.items()}
    for number, facts in facts_of.items():
        if "failed" in facts:
            raise ValueError(f"All ranks stop, because process {number} has failed: {facts['failed']}")
    first, *_ = facts_of
    for number, facts in facts_of.items():
        if not _is_same(facts_of[first], facts):
            raise ValueError(
                f"All ranks stop, because they differ: process {first} has {facts_of[first]}, and process {number} has "
                f"{facts}. Pass the same model, data, batch_size and store on every rank."
            )


def _is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return True if the facts of two processes or jobs are the same, except for rounding."""
    if {**first, "values": None} != {**second, "values": None}:
        return False
    values, others = (np.array(facts.get("values", []), dtype=float) for facts in (first, second))
    # the tolerance near 0 is relative to the largest value, as values near 0 may be rounded sums of large ones
    least = _TOLERANCE * float(np.max(np.abs(values), initial=0, where=np.isfinite(values)))
    return np.allclose(values, others, rtol=_TOLERANCE, atol=least, equal_nan=True)


def _take_model_of_rank_0(model: Any, job: Placement) -> None:  # noqa: ANN401 of scvi-tools, or any function
    """Broadcast rank 0's weights, if this is a PyTorch job of which every process has its own rank."""
    network: Any = getattr(model, "module", None)
    if job.world_size == 1 or initialized() != "torch" or not hasattr(network, "load_state_dict"):
        return
    import torch.distributed as dist

    if job != torch_group():
        return
    weights = [{name: value.cpu() for name, value in network.state_dict().items()} if job.rank == 0 else None]
    dist.broadcast_object_list(weights, src=0)
    network.load_state_dict(weights[0])


def _placement(dist_info: DistInfo | None) -> Placement:
    dist_info = initialized() if dist_info is None else dist_info
    if dist_info is not None:
        return RankSource.of(dist_info).placement
    try:
        return RankSource.of("env").placement
    except RuntimeError:  # no launcher
        return RankSource.of(Rank(0, 1)).placement


def _loader(data: Any) -> Loader[Any, Any]:  # noqa: ANN401 anything
    loader = data if isinstance(data, Loader) else getattr(data, "dataset", None)
    if not isinstance(loader, Loader):
        raise TypeError(
            f"data must be an annbatch Loader, or a data module with a Loader as its dataset, got {data!r} of type "
            f"{type(data).__name__}."
        )
    return loader


def _compute(model: Any, data: Any) -> Compute:  # noqa: ANN401 anything
    """Return a function from a batch of the loader to an array."""
    of_batch: Compute
    if hasattr(model, "get_latent_representation"):
        of_batch = lambda batch: model.get_latent_representation(dataloader=[batch])  # noqa: E731 short enough
    elif callable(model):
        of_batch = model
    else:
        raise TypeError(
            "model must have get_latent_representation, or be a function from a batch to an array, got "
            f"{model!r} of type {type(model).__name__}."
        )
    if hasattr(data, "on_before_batch_transfer"):
        return lambda batch: of_batch(data.on_before_batch_transfer(batch, 0))
    if any(kind.__module__.partition(".")[0] == "scvi" for kind in type(model).__mro__):
        raise TypeError(
            f"data must be the data module of a scvi-tools model, got {type(data).__name__}. Pass the "
            "AnnbatchDataModule, distributed or not."
        )
    return of_batch


def _as_floats(output: Any) -> npt.NDArray[Any]:  # noqa: ANN401 whatever a model returns
    """Return the output of a model as floats that NumPy knows: bfloat16 and float8 become float32."""
    output = np.asarray(output) if isinstance(output, list) else output
    is_sparse = hasattr(output, "toarray") or str(getattr(output, "layout", "torch.strided")) != "torch.strided"
    if is_sparse or not hasattr(output, "dtype"):
        kind = f"{'a sparse ' if is_sparse else ''}{type(output).__name__}"
        raise TypeError(f"The model must return a dense array or tensor, got {kind}. Return its embedding alone.")
    if hasattr(output, "detach"):
        output = output.detach().cpu()
        if output.is_floating_point() and str(output.dtype) not in _TORCH_FLOATS:
            output = output.float()
    values = np.asarray(output)
    if values.dtype.kind == "V":  # such as JAX's bfloat16
        values = values.astype(np.float32)
    if values.dtype.kind != "f":
        raise TypeError(
            f"The model must return floats, since NaN marks incomplete chunks, got {values.dtype}. Convert its result."
        )
    return values


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Seed PyTorch in this context, so that a batch gets the same random numbers on any rank."""
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
    """Embed a rank's part of the cells; after each step, yield facts that must be the same on all ranks."""
    # 1. the cells, the model, and the array if it exists
    loader = _loader(data)
    compute, n_obs, sampler = _compute(model, data), loader.n_obs, loader.batch_sampler
    if batch_size is None:
        batch_size = sampler.batch_size
        # the batch size of a virtual rank, which is the same on any number of ranks
        if batch_size is not None and isinstance(sampler, DistributedSampler) and sampler.virtual_ranks:
            batch_size = batch_size * sampler.world_size // sampler.virtual_ranks
    if batch_size is None:
        raise ValueError(f"The sampler of the loader must have a batch size, got {sampler!r}. Pass batch_size.")
    batch_size = integer("batch_size", batch_size, least=1, below=BOUND)
    cells = {"n_obs": n_obs, "n_var": loader.n_var, "batch_size": batch_size}
    _open(store, cells)
    yield cells

    # 2. the values of the first cells, by the model of rank 0
    _take_model_of_rank_0(model, job)
    _, like = next(_batches([slice(0, min(batch_size, n_obs))], loader, compute, batch_size, store))
    corner = like[:_N_FIRST, :_N_FIRST].astype(float).tolist()
    # values as strings, since JSON has no NaN
    output = {"dtype": str(like.dtype), "width": like.shape[1], "values": [list(map(str, row)) for row in corner]}
    first = cells | output
    yield first

    # 3. the array, which one rank makes and all others open, and its remaining chunks
    array = _open(store, cells)
    if array is None:
        array = _make(store, cells, first, job.world_size)
    stored: Any = dict(array.attrs)["annbatch_distributed"]
    if not _is_same(stored, first):
        raise ValueError(
            f"The array at {store} is of a different model or of different cells: for the first cells, it has "
            f"{shortened(stored)}, and this model has {shortened(first)}. Load the model that began the array, remove "
            "the array, or pass a different store."
        )
    n_rows = array.chunks[0]
    chunks = [slice(start, min(start + n_rows, n_obs)) for start in range(0, n_obs, n_rows)]
    # chunks go to ranks in turn: rank 1 of 3 has chunks 1, 4, 7, ...
    turns = slice(job.rank, None, job.world_size)
    if meets:
        remaining = _without_values(array, chunks)
        of_rank = remaining[turns]
        yield {"remaining": [rows.start for rows in remaining]}
    else:  # other ranks may write to the array meanwhile, so the assignment mustn't depend on it
        of_rank = _without_values(array, chunks[turns])

    # 4. the values of this rank's chunks
    from tqdm.auto import tqdm

    with tqdm(total=sum(rows.stop - rows.start for rows in of_rank), unit=" cells", disable=not is_shown) as bar:
        chunk: list[npt.NDArray[Any]] = []
        for rows, values in _batches(of_rank, loader, compute, batch_size, store, like):
            chunk.append(values)
            bar.update(len(values))
            # a chunk is written as a whole, after its last batch
            if rows.stop % n_rows == 0 or rows.stop == n_obs:
                array[rows.stop - sum(map(len, chunk)) : rows.stop] = np.concatenate(chunk)
                chunk.clear()
    yield {}


def _open(store: StoreLike, cells: Mapping[str, int]) -> zarr.Array[Any] | None:
    """Return the array if it exists; a ValueError if it is of different cells."""
    try:
        with zarr.config.set(_WRITTEN_WHOLE):
            array = zarr.open_array(store, mode="r+")
    except (FileNotFoundError, zarr.errors.ArrayNotFoundError):
        return None
    except zarr.errors.NodeTypeValidationError:
        raise ValueError(f"store must have an array or be empty, got {store}. Pass a different store.") from None
    stored: Any = array.attrs.get("annbatch_distributed") or {}
    if {name: stored.get(name) for name in cells} != cells:
        raise ValueError(
            f"The array at {store} must be an embedding with {cells}, got {stored or None}. Remove it, or pass a "
            "different store."
        )
    return array


def _make(store: StoreLike, cells: Mapping[str, int], first: Mapping[str, Any], world_size: int) -> zarr.Array[Any]:
    """Create the array, or open it if another rank has just created it."""
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
    """Yield the rows of each batch in some ranges, and its embedding, with the dtype and width of ``like``."""
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
    for batch in StatefulLoader.from_loader(loader, batch_sampler=sampler, return_index=True, prefetch=ahead):
        index = np.asarray(batch["index"])
        rows = slice(int(index[0]), int(index[-1]) + 1)
        # the seed is the first row of the batch, which is the same on any rank
        with _seeded(rows.start):
            output: Any = compute(batch)
        values = _as_floats(output)
        if values.ndim != 2 or len(values) != len(index):
            raise ValueError(f"The model must return an array of shape ({len(index)}, width), got {values.shape}.")
        like = values if like is None else like
        if (values.dtype, values.shape[1]) != (like.dtype, like.shape[1]):
            raise ValueError(
                f"The model must return {like.dtype} of width {like.shape[1]}, as for the first cells, got "
                f"{values.dtype} of width {values.shape[1]} for rows {rows.start} to {rows.stop - 1}. For a different "
                f"model, pass a different store than {store}."
            )
        yield rows, values
