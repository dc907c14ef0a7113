"""Collections that are read through a cache: bytes of the store, each fetched once, whatever happens to blocks."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import obstore
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from zarr.abc.store import RangeByteRequest
from zarr.codecs import GzipCodec
from zarr.core.buffer import default_buffer_prototype

from annbatch_distributed import AlignedLoader, DistributedSampler, MixedLoader, Rank, StatefulLoader
from annbatch_distributed.collect import collect
from annbatch_distributed.loader import cache, cached_store
from annbatch_distributed.loader.cache import Cache
from annbatch_distributed.loader.collection import as_collection, store_at

if TYPE_CHECKING:
    from pathlib import Path

N_OBS = 900
#: Bytes of a block here: several of each array.
BLOCK = 1 << 12
KINDS = "none", "lz4", "zstd", "dense"


def written(folder: Path, kind: str, factor: int = 1) -> Path:
    """Collect cells in one form; return the path of the collection."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 50, (N_OBS, 40)) * (rng.random((N_OBS, 40)) < 0.5) * factor
    obs = pd.DataFrame(
        {"kind": pd.Categorical(rng.choice(["a", "b"], N_OBS)), "age": np.arange(N_OBS)},
        index=[f"cell {number}" for number in range(N_OBS)],
    )
    values: Any = rng.normal(size=(N_OBS, 40)).astype("float32") if kind == "dense" else sp.csr_matrix(counts)
    folder.mkdir(exist_ok=True)
    ad.AnnData(values.astype("float32"), obs=obs).write_h5ad(folder / "cells.h5ad")
    compression = "lz4" if kind == "dense" else kind
    collect(folder / "cells.h5ad", folder / "cells.zarr", compression=compression, tell=lambda _: None)
    return folder / "cells.zarr"


@pytest.fixture(scope="module")
def collections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: written(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def collection(request: pytest.FixtureRequest, collections: dict[str, Path]) -> Path:
    return collections[request.param]


@pytest.fixture
def sparse(collections: dict[str, Path]) -> Path:
    return collections["lz4"]


class Requests:
    """Requests that a process makes, of which obstore's functions are told."""

    def __init__(self) -> None:
        self.blocks, self.heads, self.n_bytes = Counter[tuple[str, int]](), Counter[str](), 0
        self.seconds, self.fails = 0.0, False

    def get(self, store: Any, key: str, *, options: Any) -> Any:
        time.sleep(self.seconds)
        start, stop = options["range"]
        self.blocks[key, start] += 1
        self.n_bytes += stop - start
        if self.fails:
            raise OSError("no answer")
        return obstore.get(store, key, options=options)

    def head(self, store: Any, key: str) -> Any:
        self.heads[key] += 1
        return obstore.head(store, key)

    @property
    def number(self) -> int:
        return self.blocks.total() + self.heads.total()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Requests of blocks that are small."""
    made = Requests()
    monkeypatch.setattr(cached_store, "obstore", made)
    for module in ("cache", "cached_store"):
        monkeypatch.setattr(f"annbatch_distributed.loader.{module}.BLOCK", BLOCK)
    return made


def loader(collection: Path, rank: int = 0, **options: Any) -> StatefulLoader:
    source: Any = collection.as_uri() if "cache" in options else collection
    options = {"prefetch": 0, "batch_size": 64, "return_index": True} | options
    return StatefulLoader.from_collection(source, dist_info=Rank(rank, 2), names=True, **options)


def read(batches: Any) -> list[Any]:
    """Return the rows of each batch, their values and labels."""
    return [_read(batch) for batch in batches]


def _read(batch: Any) -> Any:
    values = batch["X"].toarray() if sp.issparse(batch["X"]) else batch["X"]
    return batch["index"].tolist(), values.tolist(), batch["obs"].to_dict()


def blocks_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix == ".block")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_block_is_fetched_once(prefetch: int, collection: Path, tmp_path: Path, requests: Requests) -> None:
    """By two ranks, in three epochs, with batches of the local collection."""
    for epoch in range(3):
        for rank in range(2):
            cached, local = (loader(collection, rank, prefetch=prefetch, **more) for more in ({"cache": tmp_path}, {}))
            for one in (cached, local):
                one.set_epoch(epoch)
            assert read(cached) == read(local)
        assert {*requests.blocks.values()} == {1}
    assert requests.n_bytes <= sum(path.stat().st_size for path in blocks_in(tmp_path))


def test_second_epoch_makes_no_request(sparse: Path, tmp_path: Path, requests: Requests) -> None:
    cached = loader(sparse, cache=tmp_path)
    read(cached)
    number = requests.number
    read(cached)
    assert requests.number == number > 0


def small_requests(source: Any, **options: Any) -> StatefulLoader:
    """Return a loader whose load requests have two chunks of 16 rows, and are prefetched."""
    sampler = DistributedSampler(RandomSampler(16, 2, 16), dist_info=Rank(0, 1), seed=0)
    made = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, return_index=True, prefetch=8)
    return made.use_collection(as_collection(source, **options))


def test_reading_ends_with_the_first_error(
    sparse: Path, tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that have not begun are not made: each may take minutes to fail, and a process waits for them."""
    cached = loader(sparse, cache=tmp_path)
    read(cached)
    n_blocks = requests.blocks.total()
    for block in blocks_in(tmp_path):
        block.unlink()
    monkeypatch.setattr(cached_store, "_N_REQUESTS", 1)
    requests.seconds, requests.fails = 0.01, True
    with pytest.raises(OSError, match="no answer"):
        read(cached)
    time.sleep(0.2)
    assert requests.blocks.total() - n_blocks < n_blocks / 2


def test_block_of_several_load_requests_is_fetched_once(
    collection: Path, tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are read at the same time."""
    monkeypatch.setattr(requests, "seconds", 0.02)
    assert read(small_requests(collection.as_uri(), cache=tmp_path)) == read(small_requests(collection))
    assert {*requests.blocks.values()} == {1}


@pytest.fixture(scope="module")
def two_datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = written(tmp_path_factory.mktemp("two"), "lz4")
    more = ad.read_h5ad(path.parent / "cells.h5ad")
    more.obs_names = "more " + more.obs_names
    more.write_h5ad(path.parent / "more.h5ad")
    collect(path.parent / "more.h5ad", add_to=path, tell=lambda _: None)
    return path


PAIRS = {
    "values": ("dataset_0/X/data/", "dataset_0/X/indices/", {"version", "index", "rest"}),
    "datasets": ("dataset_0/X/data/", "dataset_1/X/data/", {"version", "index", "rest"}),
    "pointers": ("dataset_0/X/indptr/", "dataset_1/X/indptr/", {"version", "index", "rest"}),
    "labels of datasets": ("dataset_0/obs/kind/codes/", "dataset_1/obs/kind/codes/", {"version", "index", "rest"}),
    "labels": ("dataset_0/obs/kind/codes/", "dataset_0/obs/age/", {"rest"}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_requests_do_not_wait_for_each_other(
    pair: str, two_datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object of a load request has an answer once the other one was asked for."""
    monkeypatch.setattr(cached_store, "BLOCK", 256)
    monkeypatch.setattr(cache, "BLOCK", 256)
    monkeypatch.setattr(cached_store, "_N_REQUESTS", 256)
    first, second, steps = PAIRS[pair]
    asked = {step: threading.Event() for step in steps}
    late = list[str]()

    def ask(key: str, step: str) -> None:
        if step in steps and second in key:
            asked[step].set()
        if step in steps and first in key and not asked[step].wait(10):
            late.append(f"{step} of {key}")

    class Late:
        def get(self, store: Any, key: str, *, options: Any) -> Any:
            ask(key, "index" if options["range"][1] == obstore.head(store, key)["size"] else "rest")
            return obstore.get(store, key, options=options)

        def head(self, store: Any, key: str) -> Any:
            ask(key, "version")
            return obstore.head(store, key)

    monkeypatch.setattr(cached_store, "obstore", Late())
    made = StatefulLoader.from_collection(two_datasets.as_uri(), cache=tmp_path, dist_info=Rank(0, 1), batch_size=1800)
    assert len([*made]) == 1
    assert all(event.is_set() for event in asked.values())
    assert not late


@pytest.mark.parametrize(
    ("how", "kind"), [*(("flipped", kind) for kind in KINDS), ("cut", "lz4"), ("deleted", "zstd"), ("empty", "dense")]
)
def test_damaged_block_is_fetched_again(
    how: str, kind: str, collections: dict[str, Path], tmp_path: Path, requests: Requests
) -> None:
    """Each block once, one at a time."""
    collection = collections[kind]
    expected = read(loader(collection))
    read(loader(collection, cache=tmp_path))
    before, rng = requests.blocks.total(), np.random.default_rng(0)
    blocks = blocks_in(tmp_path)
    for block in blocks:
        content = block.read_bytes()
        place = int(rng.integers(len(content)))
        match how:
            case "cut":
                block.write_bytes(content[:place])
            case "flipped":
                block.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
            case "empty":
                block.write_bytes(b"")
            case _:
                block.unlink()
        assert read(loader(collection, cache=tmp_path)) == expected
        # a bit of rows that this rank doesn't read isn't noticed
        assert how == "flipped" or block.read_bytes() == content
    assert requests.blocks.total() - before >= (1 if how == "flipped" else len(blocks))


def test_replaced_object_is_another_one(tmp_path: Path, requests: Requests) -> None:
    """A new loader reads the new collection, and an older one what it began to read, or raises."""
    path, folder = written(tmp_path / "cells", "none"), tmp_path / "cache"
    old = loader(path, cache=folder)
    whole = read(old)
    half = loader(path, rank=1, cache=folder)
    next(iter(half))
    shutil.rmtree(path)
    written(tmp_path / "cells", "none", factor=2)
    expected = read(loader(path))
    assert expected != whole
    assert read(loader(path, cache=folder)) == expected
    old.set_epoch(0)
    assert read(old) == whole
    shutil.rmtree(folder / blocks_in(folder)[0].relative_to(folder).parts[0])
    with pytest.raises(OSError, match=r"was replaced while it was open. Make the loader again"):
        read(half)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of few blocks: a process looks after each of them, and the last eighth is reserved."""
    monkeypatch.setattr(cache, "_LOOKS", 8)


def test_limit_holds_and_blocks_of_this_job_stay(
    sparse: Path, tmp_path: Path, requests: Requests, limits: None
) -> None:
    """With a limit of half of the collection, seven eighths of it are read from the cache in each later epoch."""
    read(loader(sparse, cache=tmp_path / "all"))
    n_blocks = len(blocks_in(tmp_path / "all"))
    limit = n_blocks // 2 * BLOCK
    cached, expected = loader(sparse, cache=tmp_path / "half", cache_limit=limit), read(loader(sparse))
    for _ in range(3):
        before = requests.blocks.total()
        cached.set_epoch(0)
        assert read(cached) == expected
        assert sum(path.stat().st_size for path in blocks_in(tmp_path / "half")) <= limit
    n_kept = len(blocks_in(tmp_path / "half"))
    assert n_kept >= limit * 7 // 8 // BLOCK - 1
    assert requests.blocks.total() - before <= n_blocks - n_kept


def test_full_cache_fetches_only_what_is_read(tmp_path: Path, requests: Requests, limits: None) -> None:
    """Not the blocks around it, which it can't keep; but for one."""
    content, first = bytes(range(251)) * 660, np.empty(10, np.uint8)
    (tmp_path / "object").write_bytes(content)
    store = store_at(tmp_path.as_uri(), Cache(tmp_path / "cache", 8 * BLOCK))
    out = np.empty(len(content), np.uint8)
    store.open_file("object").read(0, out)
    assert out.tobytes() == content
    before, starts = requests.n_bytes, range(0, len(content), BLOCK)
    for start in starts:
        store.open_file("object").read(start + 5, first)
        assert first.tobytes() == content[start + 5 : start + 15]
    # it may notice with the first of them that it is full
    assert requests.n_bytes - before <= BLOCK + 10 * (len(starts) - len(blocks_in(tmp_path / "cache")))


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("511 MiB", r"cache_limit must be at least 536,870,912 bytes, got"),
        (1, r"cache_limit must be at least 536,870,912 bytes, got"),
        ("five", r"cache_limit must be a number of bytes or a string such as '4GB', got 'five'\."),
        (0, r"cache_limit must be at least 1, got 0\."),
    ],
)
def test_limit_of_few_blocks_is_refused(limit: int | str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Cache(tmp_path, limit)


def test_limit_holds_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several processes writes more than the limit, in several threads."""
    monkeypatch.setattr(cache, "BLOCK", 1_000)
    limit, most = 512_000, 0
    children = [FORK.Process(target=overfill, args=(tmp_path, limit, number)) for number in range(4)]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        most = max(most, sum(file.n_bytes for file in Cache(tmp_path)._files()))
    assert [child.exitcode for child in children] == [0] * 4
    assert limit * 3 // 4 < most <= limit


def overfill(folder: Path, limit: int, process: int) -> None:
    own = Cache(folder, limit)
    with ThreadPoolExecutor(8) as threads:
        [*threads.map(lambda number: own.write(f"{process}", number, bytes(1_000)), range(600))]
    assert own._unwritten == 0


def test_blocks_of_earlier_jobs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: None) -> None:
    """Those that were read longest ago, until an eighth of the limit is free beyond the reserved one."""
    monkeypatch.setattr(cache, "BLOCK", 2)
    earlier = Cache(tmp_path, limit=32)
    assert [earlier.write("a", number, b"12") for number in range(16)] == [True] * 14 + [False] * 2
    for number in range(14):
        os.utime(tmp_path / "a" / f"{number}.block", (number, number))
    later = Cache(tmp_path, limit=32)
    assert later.has("a", 0, 2)
    assert later.write("a", 16, b"34")
    assert {int(path.stem) for path in blocks_in(tmp_path)} == {0, *range(3, 14), 16}


def test_full_cache_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: None) -> None:
    """Which takes seconds in a large folder."""
    monkeypatch.setattr(cache, "BLOCK", 2)
    own = Cache(tmp_path, limit=16)
    assert [own.write("a", number, b"12") for number in range(8)] == [True] * 7 + [False]
    monkeypatch.setattr(own, "_files", None)
    assert not own.write("a", 8, b"12")


def test_end_of_a_cut_block_is_not_read(tmp_path: Path) -> None:
    """By a rank that has seen it whole."""
    own, out = Cache(tmp_path), np.empty(3, np.uint8)
    own.write("a", 0, b"1234")
    assert own.read("a", 0, 1, out)
    os.truncate(tmp_path / "a" / "0.block", 3)
    assert not own.read("a", 0, 1, out)


def test_later_loader_deletes_nothing_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: None
) -> None:
    """Such as a loader of held-out cells, which is made while training has filled the cache."""
    monkeypatch.setattr(cache, "BLOCK", 2)
    training = Cache(tmp_path, limit=16)
    assert [training.write("a", number, b"12") for number in range(8)] == [True] * 7 + [False]
    assert not Cache(tmp_path, limit=16).write("b", 0, b"12")
    assert len(blocks_in(tmp_path)) == 7


def test_blocks_that_are_being_written_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: None) -> None:
    """A look at the folder doesn't see them."""
    monkeypatch.setattr(cache, "BLOCK", 2)
    own, replace = Cache(tmp_path, limit=16), os.replace
    waiting, may_end = list[str](), threading.Event()

    def wait(part: Path, path: Path) -> None:
        waiting.append(str(path))
        may_end.wait(10)
        replace(part, path)

    monkeypatch.setattr(os, "replace", wait)
    with ThreadPoolExecutor(10) as threads:
        written = [threads.submit(own.write, "a", number, b"12") for number in range(10)]
        while len(waiting) + sum(one.done() for one in written) < 10:
            time.sleep(0.01)
        may_end.set()
        assert sum(one.result() for one in written) == 7


def test_full_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before stays of use."""
    own, out = Cache(tmp_path), np.empty(2, np.uint8)
    own.write("a", 0, b"12")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(
        UserWarning, match="can't be written: .*No space left on device.* This process adds nothing to it"
    ):
        assert not own.write("a", 1, b"12")
    assert own.has("a", 0, 2)
    assert own.read("a", 0, 0, out)


def test_block_that_is_deleted_meanwhile_is_fetched_again(tmp_path: Path, requests: Requests) -> None:
    """Between its announcement and its reading."""
    (tmp_path / "object").write_bytes(b"1234")
    store, out = store_at(tmp_path.as_uri(), Cache(tmp_path / "cache")), np.empty(4, np.uint8)
    store.open_file("object").read(0, out)
    file = store.open_file("object")
    file.announce(0, 4)
    blocks_in(tmp_path)[0].unlink()
    file.read(0, out)
    assert (out.tobytes(), requests.blocks.total()) == (b"1234", 2)


def test_folder_that_is_deleted_meanwhile_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Cache(tmp_path)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "replace", lambda *_: (tmp_path / "nothing").stat())
        assert not own.write("a", 0, b"12")
    assert own.write("a", 0, b"12")


def test_only_blocks_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: None) -> None:
    monkeypatch.setattr(cache, "BLOCK", 4)
    own = Cache(tmp_path, limit=32)
    for number in range(7):
        assert own.write("a", number, b"1234")
    notes = tmp_path / "a" / "0"  # as a shard is named
    notes.write_text("a note")
    left, writing = (tmp_path / "annbatch-distributed.writing" / name for name in ("0123.part", "4567.part"))
    for path in (left, writing):
        path.write_text("part")
    for path in (left, notes, tmp_path / "a" / "0.block"):
        os.utime(path, (0, 0))
    assert Cache(tmp_path, limit=32).write("b", 0, b"5678")
    assert notes.exists()
    assert writing.exists()  # another process may be about to finish it
    assert not left.exists()
    assert not (tmp_path / "a" / "0.block").exists()


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a note")
    with pytest.raises(ValueError, match=r"cache must be an empty folder, .* with notes.txt"):
        Cache(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    other = Cache(tmp_path / "other").folder
    for mark in ('{"cache": 2}', ""):
        (other / "annbatch-distributed.json").write_text(mark)
        with pytest.raises(ValueError, match="which another version has written"):
            Cache(other)


@pytest.mark.parametrize("problem", ["full", "gone"])
def test_reading_goes_on_without_the_disk(
    problem: str, sparse: Path, tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one warning."""
    cached, local = loader(sparse, 1, cache=tmp_path), loader(sparse, 1)
    read(loader(sparse, 0, cache=tmp_path))
    if problem == "gone":
        shutil.rmtree(tmp_path)
    else:
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for epoch in range(2):
        for one in (cached, local):
            one.set_epoch(epoch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert read(cached) == read(local)
        said = [str(one.message) for one in caught if "The cache" in str(one.message)]
        assert len(said) == (epoch == 0)
    assert problem == "gone" or not [*(tmp_path / "annbatch-distributed.writing").iterdir()]


def test_killed_processes_leave_whole_blocks(tmp_path: Path) -> None:
    """Two processes write blocks, read each other's, and are killed; 30 times."""
    rng = random.Random(0)
    for _ in range(30):
        children = [FORK.Process(target=fill, args=(tmp_path, number)) for number in range(2)]
        for child in children:
            child.start()
        time.sleep(rng.uniform(0.005, 0.05))
        for child in children:
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL, "a process has read other bytes"
    blocks = blocks_in(tmp_path)
    assert len(blocks) == 40
    assert all(block.read_bytes() == content_of(int(block.stem)) for block in blocks)


FORK = multiprocessing.get_context("fork")


def content_of(number: int) -> bytes:
    return bytes([number]) * (50_000 + number)


def fill(folder: Path, seed: int) -> None:
    own, numbers = Cache(folder), random.Random(seed)
    while True:
        number = numbers.randrange(40)
        content, out = content_of(number), np.empty(1_000, np.uint8)
        own.write("a", number, content)
        assert own.has("a", number, len(content))
        assert own.read("a", number, 500, out)
        assert out.tobytes() == content[500:1_500]


def test_opened_collection_is_refused(sparse: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be a URL or a path, got one that was opened before"):
        StatefulLoader.from_collection(DatasetCollection(sparse), dist_info=Rank(0, 1), cache=tmp_path)


def test_zip_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a folder of objects to be read through a cache, got a zip file"):
        StatefulLoader.from_collection("cells.zip", dist_info=Rank(0, 1), cache=tmp_path)


def test_limit_without_cache_is_refused(sparse: Path) -> None:
    with pytest.raises(TypeError, match="cache_limit is the limit of a folder, got none"):
        StatefulLoader.from_collection(sparse, dist_info=Rank(0, 1), cache_limit="1GB")


@pytest.mark.parametrize("pipeline", ["zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs.ZarrsCodecPipeline"])
def test_arrays_that_only_zarr_can_read_are_cached(
    pipeline: str, sparse: Path, tmp_path: Path, requests: Requests
) -> None:
    """With zarr's codecs and with zarrs, which passes this store on to them, without a warning."""
    file, path = sparse.parent / "cells.h5ad", tmp_path / "cells.zarr"
    DatasetCollection(path).add_adatas([file], zarr_compressor=(GzipCodec(),))
    with zarr.config.set({"codec_pipeline.path": pipeline}), warnings.catch_warnings():
        warnings.filterwarnings("error", message="zarrs")
        for number in range(2):
            before = requests.blocks.total()
            cached = loader(path, cache=tmp_path / "cache")
            assert read(cached) == read(loader(path))
            assert (requests.blocks.total() > before) is (number == 0)


@pytest.mark.parametrize("kind", ["aligned", "mixed", "workers"])
def test_all_kinds_of_loaders_read_through_the_cache(
    kind: str, sparse: Path, tmp_path: Path, requests: Requests
) -> None:
    """With the batches of a local collection, and no request in a second loader."""

    def make(**options: Any) -> Any:
        source: Any = sparse.as_uri() if options else sparse
        match kind:
            case "aligned":
                stores = {"rna": source, "other": source}
                made = AlignedLoader.from_collections(
                    stores, dist_info=Rank(0, 2), names=True, return_index=True, **options
                )
                return (batch[name] for batch in made for name in stores)
            case "mixed":
                sources = {name: loader(sparse, seed=seed, **options) for seed, name in enumerate("ab")}
                return MixedLoader(sources, weights={"a": 1, "b": 2}, n_steps=9)
        return loader(sparse, **options).to_dataloader(num_workers=0)

    expected = read(make())
    assert read(make(cache=tmp_path)) == expected
    number = requests.blocks.total()
    assert read(make(cache=tmp_path)) == expected
    assert requests.blocks.total() == number > 0


def test_spawned_workers_read_through_the_cache(sparse: Path, tmp_path: Path) -> None:
    cached = loader(sparse, cache=tmp_path).to_dataloader(num_workers=1, timeout=120)
    assert read(cached) == read(loader(sparse))
    assert blocks_in(tmp_path)


def test_copies_read_through_the_cache(sparse: Path, tmp_path: Path) -> None:
    """As spawned workers do."""
    cached = loader(sparse, cache=tmp_path)
    expected = read(loader(sparse))
    copy: StatefulLoader = pickle.loads(pickle.dumps(cached))
    assert read(copy) == expected
    assert blocks_in(tmp_path)


def test_copies_read_the_versions_of_their_original(tmp_path: Path, requests: Requests) -> None:
    """Not newer ones, so that all workers of a rank read the same cells."""
    (tmp_path / "object").write_bytes(b"1234")
    store, out = store_at(tmp_path.as_uri(), Cache(tmp_path / "cache")), np.empty(4, np.uint8)
    store.open_file("object").read(0, out)
    (tmp_path / "object").write_bytes(b"56789")
    pickle.loads(pickle.dumps(store)).open_file("object").read(0, out)
    assert out.tobytes() == b"1234"


def test_short_answer_is_not_kept(tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "object").write_bytes(b"1234")
    store = store_at(tmp_path.as_uri(), Cache(tmp_path / "cache"))
    monkeypatch.setattr(np, "frombuffer", lambda content, dtype: np.asarray(bytearray(content), dtype)[:3])
    with pytest.raises(OSError, match="the server has sent 3 bytes instead of 4"):
        store.open_file("object").read(0, np.empty(4, np.uint8))
    assert not blocks_in(tmp_path)


def test_bytes_beyond_the_end_are_refused(tmp_path: Path, requests: Requests) -> None:
    """As a shard that has lost its last bytes makes a reader ask for them."""
    (tmp_path / "object").write_bytes(b"1234")
    file = store_at(tmp_path.as_uri(), Cache(tmp_path / "cache")).open_file("object")
    with pytest.raises(OSError, match=r"object ended at byte 4 while it was read\.$"):
        file.read(2, np.empty(3, np.uint8))
    assert not requests.blocks


def test_ranges_that_zarr_asks_for_end_with_the_object(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"1234")
    store = store_at(tmp_path.as_uri(), Cache(tmp_path / "cache"))
    content = asyncio.run(store.get("object", default_buffer_prototype(), RangeByteRequest(1, 10)))
    assert content is not None
    assert content.to_bytes() == b"234"


def test_shard_without_an_index_asks_for_none(
    sparse: Path, tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sparse, tmp_path / "cells")
    for shard in (tmp_path / "cells" / "dataset_0" / "X" / "data" / "c").iterdir():
        os.truncate(shard, 10)
    offsets = []

    def announce(file: Any, offset: int, n_bytes: int) -> None:
        offsets.append(offset)
        own(file, offset, n_bytes)

    own = cached_store.CachedObject.announce
    monkeypatch.setattr(cached_store.CachedObject, "announce", announce)
    with pytest.raises(OSError, match=r"the checksum of its index is wrong\. It has 10 bytes\."):
        read(loader(tmp_path / "cells", cache=tmp_path / "cache"))
    assert min(offsets) >= 0


def test_path_behind_a_symlink_is_that_of_the_system(tmp_path: Path) -> None:
    """Where .. is the folder above the target, not above the link."""
    folder = tmp_path / "target" / "cells #1"
    (tmp_path / "target" / "below").mkdir(parents=True)
    folder.mkdir()
    (folder / "object").write_bytes(b"1234")
    (tmp_path / "link").symlink_to(tmp_path / "target" / "below")
    out = np.empty(4, np.uint8)
    store_at(f"{tmp_path}/link/../cells #1", Cache(tmp_path / "cache")).open_file("object").read(0, out)
    assert out.tobytes() == b"1234"


def test_long_urls_are_cached(tmp_path: Path, requests: Requests) -> None:
    folder = tmp_path / ("é" * 80) / ("é" * 80)
    folder.mkdir(parents=True)
    (folder / "object").write_bytes(b"1234")
    for _ in range(2):
        out = np.empty(4, np.uint8)
        store_at(str(folder), Cache(tmp_path / "cache")).open_file("object").read(0, out)
        assert out.tobytes() == b"1234"
    assert requests.blocks.total() == 1


def test_forked_process_raises(tmp_path: Path) -> None:
    """Where a request would never be answered, as a fork doesn't copy the threads of obstore."""
    (tmp_path / "object").write_bytes(b"1234")
    store = store_at(tmp_path.as_uri(), Cache(tmp_path / "cache"))
    store.prepare(["object"])
    child = FORK.Process(target=refused, args=(store,))
    child.start()
    child.join(30)
    assert child.exitcode == 0


def refused(store: Any) -> None:
    with pytest.raises(RuntimeError, match="was forked after its parent had read object storage"):
        store.open_file("object").read(0, np.empty(4, np.uint8))
