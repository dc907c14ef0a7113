"""Folders: the path of the new collection, and the folder of its parts next to it."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zarr

from annbatch_distributed.collect.problems import Problems

try:
    import fcntl
except ImportError:  # on Windows, where two runs at once aren't noticed
    fcntl = None  # type: ignore[assignment]  # see above

#: Attribute of a collection: datasets that are moved into it.
_MOVED = "moved"


def check_new(out: Path) -> None:
    """Raise Problems if there is something at the path of the collection."""
    if out.exists() or out.is_symlink():
        hint = "" if out.exists() else ", a broken link"
        raise Problems(f"out={str(out)!r}: already exists{hint}. Pass a new path, or remove it")


@contextmanager
def folder_of_parts(out: Path, *, restart: bool) -> Iterator[Path]:
    """Make a folder next to the collection, or use the one of an earlier run; it is removed if no error is raised.

    After an error, it is removed if it has no part. No other process may use it at the same time.
    """
    # on the same disk, so that the complete collection is renamed, not copied
    folder = out.absolute().parent / f"{out.name}.parts"
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise Problems(f"{out}: {error.strerror}: {folder}") from error
    with lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            except BlockingIOError as error:
                raise Problems(f"{out}: another collect is writing it") from error
            except OSError:  # some shared file systems have no locks, so that two runs at once aren't noticed
                pass
        if restart:
            remove(*(path for path in folder.iterdir() if path.name != "lock"))
        try:
            yield folder
        except BaseException:
            remove(*folder.glob("*.unfinished"))
            if not [*folder.glob("*.zarr")]:
                remove(folder)
            raise
        remove(folder)


def folder_of_datasets(folder: Path, key: str) -> Path:
    """Return the folder of the new datasets in a folder of parts, and remove the folders of other keys."""
    own = folder / f"cells-{key}"
    remove(*(path for path in folder.glob("cells-*") if path != own))
    return own


def add_datasets(unfinished: Path, out: Path) -> None:
    """Move the datasets of a folder into a collection, all at once for its readers.

    Meanwhile, the metadata of the collection lists the datasets before, and says which ones are on their way.
    """
    names = sorted(path.name for path in unfinished.glob("dataset_*"))
    scratch = unfinished.parent / "metadata.unfinished"
    remove(scratch)
    for path in out.rglob("zarr.json"):
        copy = scratch / path.relative_to(out)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    zarr.open_group(scratch, mode="r+").attrs[_MOVED] = {"from": unfinished.name, "datasets": names}
    with warnings.catch_warnings(action="ignore"):  # of zarr, that its format doesn't have consolidated metadata yet
        zarr.consolidate_metadata(str(scratch))
    (scratch / "zarr.json").replace(out / "zarr.json")
    for name in names:
        (unfinished / name).rename(out / name)
    _list_all(out)


def take_back(folder: Path, out: Path) -> None:
    """Undo what a run that was ended in :func:`add_datasets` has done; its datasets are kept in the folder of parts."""
    moved: Any = zarr.open_group(out, mode="r").attrs.get(_MOVED)
    if moved is None:
        return
    before = folder / moved["from"]
    for path in (out / name for name in moved["datasets"] if (out / name).exists()):
        if before.exists():
            path.rename(before / path.name)
        else:
            remove(path)
    _list_all(out)


def _list_all(out: Path) -> None:
    """Let the metadata of a collection list all of its datasets, as they are in its folder."""
    metadata = json.loads((out / "zarr.json").read_text())
    del metadata["consolidated_metadata"], metadata["attributes"][_MOVED]
    new = out / "zarr.json.unfinished"
    new.write_text(json.dumps(metadata, indent=2))
    new.replace(out / "zarr.json")


def remove(*folders: Path) -> None:
    """Remove folders; after an error, threads of zarr may still be writing to them."""
    for folder in folders:
        for _ in range(100):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)
