"""The journal: entries that several processes write, each of which reads all of them in the same order.

Entries are files in a private folder, and their names are numbers. Whoever writes one does so aside, and then links it
to the first number that is free, which the operating system lets one process do: an entry is there wholly or not at
all, and nobody waits. A process that is killed leaves nothing half-written.

The process that has made the journal removes the folder when it ends, or has no more use for it. If it is killed, a
folder with a few small files for each pass stays in the system's folder for temporary files.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Entry", "Journal"]

#: What JSON can hold.
type Entry = dict[str, Any]


class Journal:
    """A journal as one process reads it."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._n_read = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a folder, or was one."""
        return self._folder is not None

    def open(self) -> None:
        """Make the folder, in the process that answers for it, before others can write."""
        # copies of a journal that isn't open, such as two loads of one pickle, have a folder each
        self._folder = Path(tempfile.mkdtemp(prefix=f"annbatch-distributed-{os.getpid()}-"))
        # multiprocessing's own, since processes that it forks run no others; after the workers, which it ends before
        Finalize(self, shutil.rmtree, (self._folder, True), exitpriority=-100)

    def read(self) -> Iterator[Entry]:
        """Return the entries that have not been read yet."""
        while self._folder is not None:
            try:
                text = (self._folder / str(self._n_read)).read_text()
            except FileNotFoundError:
                return
            self._n_read += 1
            yield json.loads(text)

    def write(self, entry: Entry) -> bool:
        """Write an entry behind those that were read, which counts as read; return False if there is another one.

        A journal that is not open, or whose folder is gone, is a RuntimeError.
        """
        if self._folder is None or not self._folder.exists():
            where = self._folder or f"a folder in {tempfile.gettempdir()}"
            raise RuntimeError(
                f"The workers of a DataLoader agree on their pass through files in {where}, which isn't there: "
                "either the loader is gone, or its process couldn't make the folder. Let TMPDIR be a folder that can "
                "be written to."
            )
        aside = self._folder / f"aside-{os.getpid()}-{threading.get_ident()}"
        aside.write_text(json.dumps(entry))
        try:
            os.link(aside, self._folder / str(self._n_read))
        except FileExistsError:
            return False
        except OSError as error:
            raise RuntimeError(
                f"The workers of a DataLoader need hard links in {self._folder}: {error}. Let TMPDIR be elsewhere."
            ) from error
        finally:
            aside.unlink()
        self._n_read += 1
        return True
