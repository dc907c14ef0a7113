"""Folders: the path of the new collection, and the temporary folder next to it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from annbatch_distributed.collect.problems import Problems


@contextmanager
def reserved(out: Path) -> Iterator[None]:
    """Reserve the path of the collection by an empty folder, so that no other process uses it."""
    try:
        out.mkdir()
    except FileExistsError:
        is_empty = out.is_dir() and not any(out.iterdir())
        hint = ", an empty folder: another collect is writing it, or was killed" if is_empty else ""
        hint = ", a broken link" if not out.exists() else hint
        raise Problems(f"--out {out}: already exists{hint}. Pass a new path, or remove it") from None
    except OSError as error:
        raise Problems(f"--out {out}: {error.strerror}") from error
    try:
        yield
    finally:
        if not any(out.iterdir()):
            out.rmdir()


@contextmanager
def temporary_folder(out: Path) -> Iterator[Path]:
    """Make a folder next to the collection, and remove it at the end."""
    # on the same disk, so that the complete collection is renamed, not copied
    folder = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.absolute().parent))
    try:
        yield folder
    finally:
        # after an error, threads of zarr may still be writing
        for _ in range(100):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)
