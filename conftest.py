"""Collection of tests, including the examples of the README, the documentation and the docstrings.

Tests that start many processes, or have slow imports, run only if they are named, or with ``--all``.

The pages show complete programs, which run in a folder with a collection ``cells.zarr``, under a launcher with a single
rank. Here, this process plays the launcher. Examples in docstrings start from shared names, see :func:`shared_names`.
"""

from __future__ import annotations

import os
import sys
from doctest import ELLIPSIS
from typing import TYPE_CHECKING

import pytest
from sybil import Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.myst import CodeBlockParser
from sybil.parsers.rest import DocTestParser

from tests.processes.launch import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sybil import Document, Example

# tests run on CPUs, even on a machine with a GPU
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}

#: Folders that are skipped unless they are named.
LONG = ["docs/frameworks", "tests/frameworks", "tests/libraries", "tests/processes"]

pages = Sybil(
    name="pages",
    parsers=[PythonCodeBlockParser(), CodeBlockParser("ipython3", PythonEvaluator())],  # the latter for notebooks
    patterns=["README.md", "docs/*.md", "docs/frameworks/*.md"],
    fixtures=["launched_with_cells"],
)


def shared_names(document: Document) -> Iterator[Region]:
    """Yield a region at the start of a docstring with examples, which makes the names that its examples share."""
    # Sybil parses each docstring of a Python file as a document of its own, whose namespace is that of the file
    if ">>>" in document.text:
        yield Region(0, 0, evaluator=_make_shared_names)


def _make_shared_names(example: Example) -> None:
    """Make the names that docs/api.md describes, and import all public names."""
    # imported here because they take seconds
    import anndata as ad
    import numpy as np
    import pandas as pd
    from annbatch.samplers import RandomSampler, SequentialSampler

    import annbatch_distributed

    names = {name: getattr(annbatch_distributed, name) for name in annbatch_distributed.__all__}
    names |= {"RandomSampler": RandomSampler, "SequentialSampler": SequentialSampler, "ad": ad, "np": np, "pd": pd}
    # 50 cells: 10 of each donor, in order, with two cell types in turn
    obs = pd.DataFrame({"donor": np.repeat([*"abcde"], 10), "cell_type": 25 * ["B cell", "T cell"]})
    obs.index = pd.Index([f"cell {number}" for number in range(50)])

    def make_loader() -> annbatch_distributed.StatefulLoader:
        sampler = annbatch_distributed.DistributedSampler(
            RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=4),
            dist_info=annbatch_distributed.Rank(0, 2),
            seed=0,
        )
        loader = annbatch_distributed.StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
        return loader.add_adata(ad.AnnData(np.arange(50, dtype="float32").reshape(50, 1), obs=obs))

    loader, sources = make_loader(), {"tahoe": make_loader(), "census": make_loader()}
    mixed = annbatch_distributed.MixedLoader(sources, weights={"tahoe": 3, "census": 1}, n_steps=8)
    example.namespace |= names | {"obs": obs, "sampler": loader.sampler, "loader": loader, "mixed": mixed}


docstrings = Sybil(name="docstrings", parsers=[shared_names, DocTestParser(ELLIPSIS)], path="src", patterns=["*.py"])

pytest_collect_file = (pages + docstrings).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs all tests."""
    parser.addoption("--all", action="store_true", help=f"run {', '.join(LONG)} too")


def pytest_configure(config: pytest.Config) -> None:
    """Run all tests of named paths."""
    # workers of pytest-xdist always seem to have named paths; they get the option from the process that started them
    if config.args_source is not config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput"):
        config.option.all = True


def pytest_report_header(config: pytest.Config) -> str | None:
    """Report the skipped folders."""
    return None if config.option.all else f"skipped without --all: {', '.join(LONG)}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the long folders."""
    is_skipped = not config.option.all and collection_path in {config.rootpath / folder for folder in LONG}
    return is_skipped or None


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path to a collection of 20,000 cells with 32 genes, with ``cell_type``, ``donor`` and ``split`` in ``obs``."""
    # imported here because they take seconds, and most tests don't need them
    import anndata as ad
    import numpy as np
    import pandas as pd
    import scipy.sparse as sp
    from annbatch import DatasetCollection

    rng = np.random.default_rng(0)
    types = rng.integers(3, size=20_000)
    # (cells, genes): True for the marker genes of a cell's type
    is_marker = np.arange(32) % 3 == types[:, None]
    counts = rng.poisson(0.2 + 2.0 * is_marker).astype("float32")
    obs = pd.DataFrame({"cell_type": pd.Categorical.from_codes(types, ["B cell", "T cell", "monocyte"])})
    # in contiguous ranges, as samples are usually written one by one
    obs["donor"] = pd.Categorical(np.repeat([f"d{number}" for number in range(10)], 2_000))
    obs["split"] = np.where(obs["donor"].isin(["d3", "d7"]), "test", "train")
    folder = tmp_path_factory.mktemp("collection")
    ad.AnnData(sp.csr_matrix(counts), obs=obs.set_index(obs.index.astype(str))).write_h5ad(folder / "cells.h5ad")
    path = folder / "cells.zarr"
    DatasetCollection(path).add_adatas([folder / "cells.h5ad"], rng=rng)
    return path


@pytest.fixture(scope="session")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path to a collection of 18,000 cells with 50 genes, of 3 cell lines, 5 drugs and DMSO, and 12 donors."""
    import anndata as ad
    import numpy as np
    import pandas as pd
    import scipy.sparse as sp
    from annbatch import DatasetCollection

    rng = np.random.default_rng(0)
    drugs = ["DMSO", "afatinib", "bosutinib", "cisplatin", "dasatinib", "erlotinib"]
    columns = {"cell_line": ["A549", "HeLa", "K562"], "drug": drugs, "donor": [f"d{number}" for number in range(12)]}
    obs = pd.DataFrame({name: rng.choice(values, 18_000) for name, values in columns.items()}).astype("category")
    obs.index = pd.Index([f"cell {number}" for number in range(len(obs))])
    counts = sp.csr_matrix(rng.poisson(0.5, size=(len(obs), 50)).astype("float32"))
    folder = tmp_path_factory.mktemp("perturbed")
    ad.AnnData(counts, obs=obs).write_h5ad(folder / "perturbed.h5ad")
    path = folder / "perturbed.zarr"
    DatasetCollection(path).add_adatas([folder / "perturbed.h5ad"], groupby=["cell_line", "drug"], rng=rng)
    return path


@pytest.fixture(scope="module")
def launched_with_cells(cells: Path, perturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the variables of torchrun and Slurm for a single rank, in a folder with the collections; end jobs after."""
    import zarr

    # one folder per page, because some pages write h5ad files, and others read all that exist
    folder = tmp_path_factory.mktemp("page")
    for path in (cells, cells.with_suffix(".h5ad"), perturbed):
        (folder / path.name).symlink_to(path)
    port = free_port()
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    slurm = {
        # otherwise JAX handles SIGTERM, and neither this process nor its forks end on it
        "JAX_ENABLE_PREEMPTION_SERVICE": "0",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_ARRAY_TASK_COUNT": "1",
    }
    codecs = "codec_pipeline.path"
    # the context restores zarr's setting, which a page may change
    with pytest.MonkeyPatch.context() as patch, zarr.config.set({codecs: zarr.config.get(codecs)}):
        patch.chdir(folder)
        for name, value in (torchrun | slurm).items():
            patch.setenv(name, value)
        _end_jobs()  # JAX can't join a job after a computation, which an earlier test may have run
        # if JAX was imported, it has read its variables already; old versions have no such service
        if "jax" in sys.modules and hasattr(sys.modules["jax"].config, "jax_enable_preemption_service"):
            sys.modules["jax"].config.update("jax_enable_preemption_service", False)
        yield
        _end_jobs()


def _end_jobs() -> None:
    """Reset PyTorch and JAX to their state after import."""
    if "torch" in sys.modules:
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if "jax" in sys.modules:
        import jax
        from jax.extend.backend import clear_backends

        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
        clear_backends()
