"""The AlignedLoader: the same cells of several modalities in each batch.

There is one sampler, one plan and one state. A :class:`.StatefulLoader` of each modality reads the same load requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import numpy.typing as npt
import pandas as pd
from annbatch import Loader

from annbatch_distributed.core.masks import AnyMask, AnyNames, first_difference
from annbatch_distributed.core.request import Marks, Request
from annbatch_distributed.core.values import plural
from annbatch_distributed.core.warning import warn
from annbatch_distributed.loader.collection import AnyCollection, as_collection
from annbatch_distributed.loader.epoch_loader import EpochLoader, common_n_var
from annbatch_distributed.loader.stateful import StatefulLoader, sampler_for
from annbatch_distributed.ranks import DistInfo
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.sets import CellSets

if TYPE_CHECKING:
    import anndata as ad
    import zarr

    from annbatch_distributed.loader.workers import WorkerDataLoader


class AlignedLoader(EpochLoader):
    """Loader of the same cells of several modalities, with one sampler and one state.

    A batch is a dict with the batch of each modality, by name: ``{"rna": {...}, "protein": {...}}``.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> import pandas as pd
    >>> from annbatch import Loader
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import AlignedLoader, DistributedSampler, Rank
    >>> obs = pd.DataFrame(
    ...     {"donor": 24 * [*"ab"]}, index=[f"cell {n}" for n in range(48)]
    ... )
    >>> def loader_of(values):
    ...     empty = Loader(
    ...         batch_size=4, chunk_size=4, preload_nchunks=2, preload_to_gpu=False
    ...     )
    ...     return empty.add_adata(ad.AnnData(values, obs=obs))
    >>> rna, protein = loader_of(np.ones((48, 3))), loader_of(np.ones((48, 2)))
    >>> sampler = DistributedSampler(
    ...     RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0
    ... )
    >>> loader = AlignedLoader(
    ...     {"rna": rna, "protein": protein}, batch_sampler=sampler
    ... )
    >>> batch = next(iter(loader))
    >>> batch["rna"]["X"].shape, batch["protein"]["X"].shape
    ((4, 3), (4, 2))
    >>> batch["rna"]["obs"].equals(batch["protein"]["obs"])
    True

    Parameters
    ----------
    modalities
        :class:`annbatch.Loader` or :class:`StatefulLoader` of each modality by name. Their datasets and options are
        used, and their samplers are ignored. All modalities must have the same cells in the same order.
    batch_sampler
        Sampler of the rows that this rank reads.
    prefetch
        Number of load requests to prefetch, as for :class:`StatefulLoader`. None takes the largest ``prefetch`` of
        ``modalities`` (default).

    Raises
    ------
    TypeError
        If a modality is not a loader, or ``batch_sampler`` is not a :class:`DistributedSampler`.
    ValueError
        If the modalities have different cells, or the same cells in a different order. Cells are compared by name. A
        modality without names causes a warning, and only its number of cells is compared.
    """

    def __init__(
        self,
        modalities: Mapping[str, Loader[Any, Any]],
        *,
        batch_sampler: DistributedSampler,
        prefetch: int | None = None,
    ) -> None:
        _check_names(modalities)
        if not isinstance(batch_sampler, DistributedSampler):
            raise TypeError(
                f"batch_sampler must be a DistributedSampler, got {batch_sampler!r}. Wrap the sampler: "
                "DistributedSampler(sampler, dist_info=...)."
            )
        if prefetch is None:
            prefetch = max(getattr(modality, "prefetch", 0) for modality in modalities.values())
        super().__init__(batch_sampler, prefetch)
        self._modalities = {
            name: StatefulLoader.from_loader(modality, batch_sampler=batch_sampler, prefetch=prefetch)
            for name, modality in modalities.items()
        }
        self._check_modalities()
        self._check_cells()  # for one, the names of a mask may be in a different order

    @classmethod
    def from_collections(
        cls,
        collections: Mapping[str, AnyCollection],
        *,
        dist_info: DistInfo,
        batch_size: int = 256,
        mask: AnyMask | None = None,
        seed: int = 0,
        shuffle: bool = True,
        sets: CellSets | None = None,
        memory: int | str = 1 << 30,
        prefetch: int = 1,
        names: bool = False,
        load_adata: Mapping[str, Callable[[zarr.Group], ad.AnnData]] | None = None,
        cache: str | PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        **options: Any,  # noqa: ANN401 of DistributedSampler and annbatch
    ) -> Self:
        """Make a loader of several collections of the same cells.

        Examples
        --------
        >>> import tempfile
        >>> from pathlib import Path
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch import DatasetCollection
        >>> from annbatch_distributed import AlignedLoader, Rank
        >>> folder = Path(tempfile.mkdtemp())
        >>> cells = ad.AnnData(
        ...     np.ones((1_000, 5)), obsm={"protein": np.ones((1_000, 3))}
        ... )
        >>> cells.write_h5ad(folder / "cells.h5ad")
        >>> collection = DatasetCollection(folder / "cells.zarr")
        >>> collection = collection.add_adatas([folder / "cells.h5ad"])
        >>> load_adata = {
        ...     "rna": lambda group: ad.AnnData(
        ...         group["X"], obs=ad.io.read_elem(group["obs"])
        ...     ),
        ...     "protein": lambda group: ad.AnnData(
        ...         group["obsm/protein"], obs=ad.io.read_elem(group["obs"])
        ...     ),
        ... }
        >>> loader = AlignedLoader.from_collections(
        ...     {"rna": collection, "protein": collection},
        ...     load_adata=load_adata,
        ...     dist_info=Rank(0, 2),
        ...     batch_size=128,
        ... )
        >>> batch = next(iter(loader))
        >>> batch["rna"]["X"].shape, batch["protein"]["X"].shape
        ((128, 5), (128, 3))

        Parameters
        ----------
        collections
            Collection of each modality by name, as for :meth:`StatefulLoader.from_collection`. With ``load_adata``, one
            collection can be several modalities.
        dist_info, batch_size, mask, seed, shuffle, sets, memory, prefetch, names, cache, cache_limit
            As for :meth:`StatefulLoader.from_collection`; ``memory`` is the limit of all modalities together.
        load_adata
            Functions by the names of modalities. Each loads the ``AnnData`` of a dataset, as for ``use_collection`` of
            :class:`annbatch.Loader`. Other modalities load ``X``.
        options
            As for :meth:`StatefulLoader.from_collection`. Options of the loader apply to every modality.

        Returns
        -------
        AlignedLoader
            Loader of this rank.

        Raises
        ------
        TypeError, ValueError
            As for :class:`AlignedLoader` and :meth:`StatefulLoader.from_collection`.
        """
        _check_names(collections)
        load_adata = {} if load_adata is None else load_adata
        if unknown := load_adata.keys() - collections.keys():
            raise ValueError(
                f"load_adata must have names of modalities, {', '.join(collections)}, got {', '.join(unknown)}."
            )
        opened = {
            name: as_collection(collection, cache=cache, cache_limit=cache_limit)
            for name, collection in collections.items()
        }
        sampler = sampler_for(
            "from_collections",
            list(opened.values()),
            options,
            dist_info=dist_info,
            batch_size=batch_size,
            mask=mask,
            seed=seed,
            shuffle=shuffle,
            sets=sets,
            memory=memory,
            prefetch=prefetch,
        )
        modalities = {}
        for name, collection in opened.items():
            modality = StatefulLoader(batch_sampler=sampler, **{"preload_to_gpu": False} | options)
            modalities[name] = modality.use_collection(collection, load_adata=load_adata.get(name), names=names)
        return cls(modalities, batch_sampler=sampler, prefetch=prefetch)

    @property
    def _shape(self) -> str:
        genes = ", ".join(
            f"{name} with {plural(modality.n_var, 'gene')}" for name, modality in self._modalities.items()
        )
        return f"{plural(self.n_obs, 'cell')} of {genes}" if self.n_obs else "no cells yet"

    @property
    def modalities(self) -> Mapping[str, StatefulLoader]:
        """Loaders of the modalities by name, for properties such as ``n_var``."""
        return dict(self._modalities)

    @property
    def _lead(self) -> StatefulLoader:
        """Modality whose cells represent all modalities: the first one with names of cells."""
        known = (modality for modality in self._modalities.values() if modality._cells is not None)
        return next(known, next(iter(self._modalities.values())))

    def _check_modalities(self) -> None:
        """Raise if the modalities have different cells, or the same cells in another order."""
        if empty := [name for name, modality in self._modalities.items() if not modality.n_obs]:
            raise ValueError(
                f"The modalities must have cells, got none in {', '.join(empty)}. Add datasets to their loaders."
            )
        lead = next(name for name, modality in self._modalities.items() if modality is self._lead)
        names = self._modalities[lead]._cells
        for name, modality in self._modalities.items():
            if modality.n_obs != self.n_obs:
                problem = f"{lead} has {self.n_obs:,} cells and {name} has {modality.n_obs:,}"
            elif names is None or modality._cells is None:
                if name != lead:
                    warn(f"The cells of {name} have no names, so only their number was compared with {lead}.")
                continue
            elif (difference := first_difference(names, modality._cells)) is not None:
                row, in_lead, in_other = difference
                problem = f"row {row:,} is {in_lead!r} in {lead} and {in_other!r} in {name}"
            else:
                continue
            raise ValueError(
                f"All modalities must have the same cells in the same order, but {problem}. Before you write them, "
                "select their common cells in one order: common = rna.obs_names.intersection(protein.obs_names), "
                "rna[common], protein[common]. Then write each with add_adatas(..., rng=np.random.default_rng(0)) and "
                "the same dataset_size, as a number of cells, so that all modalities are shuffled in the same way."
            )

    # The data

    @property
    def n_obs(self) -> int:
        """Number of cells, over all ranks."""
        return self._lead.n_obs

    @property
    def n_var(self) -> int:
        """Number of genes or features.

        Raises
        ------
        ValueError
            If the modalities have different numbers of genes or features; ``modalities`` has the number of each.
        """
        return common_n_var(self._modalities)

    @property
    def _cells(self) -> tuple[AnyNames, ...] | None:
        return self._lead._cells

    @property
    def _collection(self) -> dict[str, Any]:
        of_each = {name: modality._collection["datasets"] for name, modality in self._modalities.items()}
        return {"datasets": of_each, "cells": self._lead._collection["cells"]}

    def _annotated(self, cells: pd.DataFrame, columns: str | Sequence[str] | None) -> pd.DataFrame:
        return self._lead._annotated(cells, columns)

    def to_dataloader(self, *, num_workers: int = 0, **options: Any) -> WorkerDataLoader:  # noqa: ANN401 torch's own
        """Return a PyTorch ``DataLoader`` whose worker processes read, as :meth:`StatefulLoader.to_dataloader`."""
        from annbatch_distributed.loader.workers import WorkerDataLoader  # it needs PyTorch

        return WorkerDataLoader(self, num_workers=num_workers, **options)

    # Reading

    def _rows_in(self, batch: object) -> npt.NDArray[Any] | None:
        """Return the rows of a batch; None if it has none."""
        parts = batch if isinstance(batch, dict) else {}
        known = (modality._rows_in(parts.get(name)) for name, modality in self._modalities.items())
        return next((rows for rows in known if rows is not None), None)

    @contextmanager
    def _iterated(self) -> Generator[None]:
        with ExitStack() as stack:
            for modality in self._modalities.values():
                stack.enter_context(modality._iterated())
            yield

    def _preloads_to_gpu(self) -> bool:
        """Return True if annbatch moves batches to a GPU."""
        return any(modality._preloads_to_gpu() for modality in self._modalities.values())

    def _read_request(self, request: Request) -> Generator[Any]:
        reads = [modality._read_request(request) for modality in self._modalities.values()]
        for batches in zip(*reads, strict=True):
            yield dict(zip(self._modalities, batches, strict=True))

    def _finish(self, batch: Any, marks: Marks) -> Any:  # noqa: ANN401 of annbatch
        return {name: modality._finish(batch[name], marks) for name, modality in self._modalities.items()}


def _check_names(modalities: Mapping[str, object]) -> None:
    if not modalities:
        raise ValueError("There must be at least one modality, got none. Pass a dict of modalities by name.")
    if "source" in modalities:
        raise ValueError(
            "A modality must not have the name 'source', which is a key of the batches of a MixedLoader. Rename it."
        )
