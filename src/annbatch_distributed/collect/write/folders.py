"""Folders: the path of the new collection, and the folder of its parts next to it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from annbatch_distributed.collect.problems import Problems

try:
    import fcntl
except ImportError:  # on Windows, where two runs at once aren't noticed
    fcntl = None  # type: ignore[assignment]  # see above


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
        raise Problems(f"out={str(out)!r}: {error.strerror}: {folder}") from error
    with lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            except BlockingIOError as error:
                raise Problems(f"out={str(out)!r}: another collect is writing it") from error
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
    """Return the folder of the new collection in a folder of parts, and remove those of runs with a different key."""
    own = folder / f"cells-{key}"
    remove(*(path for path in folder.glob("cells-*") if path != own))
    return own


def remove(*folders: Path) -> None:
    """Remove folders; after an error, threads of zarr may still be writing to them."""
    for folder in folders:
        for _ in range(100):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)
