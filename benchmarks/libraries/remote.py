"""A process that reads epochs from object storage, one for each request."""

from __future__ import annotations

import json
import sys
import time
from typing import IO, Any

from benchmarks.libraries.cells import numbers_of


def serve(library: Any, out: IO[str], *arguments: str) -> None:  # noqa: ANN401 a module
    """Read an epoch for each request on standard input.

    The library's function ``remote`` gets the arguments and returns a function that begins an epoch. A request has the
    number of the epoch, and whether to note the numbers of the cells in the answer. The first epoch includes opening.
    """
    print(json.dumps(None), file=out, flush=True)
    way = None
    for line in sys.stdin:
        asked = json.loads(line)
        numbers, n_rows, first = list[int](), 0, 0.0
        began, on_cores = time.perf_counter(), time.process_time()
        way = library.remote(*arguments) if way is None else way
        for cells in way(asked["epoch"]):
            first = first or time.perf_counter() - began
            n_rows += cells.shape[0]
            if asked["note"]:
                numbers += numbers_of(cells)
        seconds = {"seconds": time.perf_counter() - began, "core seconds": time.process_time() - on_cores}
        print(json.dumps({"rows": n_rows, "first": first, "numbers": numbers} | seconds), file=out, flush=True)
