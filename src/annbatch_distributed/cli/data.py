"""The command ``check --data``: reads each file of a collection once, and lists what isn't as it was written."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from annbatch_distributed.cli import CommandError
from annbatch_distributed.cli.collection import Cells
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.write.jobs import executor_of, run_each
from annbatch_distributed.core.values import few, n_cores, plural
from annbatch_distributed.loader.damage import arrays_of, cells_with, damage_in, files_of, has_checksums

#: Number of names that are shown.
_SHOWN = 5


def run(options: Namespace) -> int:
    """Print the damage of each file; return 1 if there is any."""
    if not Path(options.path).is_dir():
        raise CommandError("--data reads files of a folder on this machine. Copy the collection to a disk first")
    if options.cache is not None:
        raise CommandError("--data reads files of the collection itself. Leave out --cache")
    collection = Cells(options).collection
    groups = {group.basename: group for group in collection}
    files = [(name, stored) for name, group in groups.items() for stored in files_of(group)]
    # arrays of which a change may go unnoticed
    unknown = {
        f"{dataset}/{name}"
        for dataset, group in groups.items()
        for name, array in arrays_of(group)
        if not has_checksums(array)
    }
    lines = list[dict[str, Any]]()
    try:
        with executor_of(options.jobs or n_cores(), None) as executor:
            found = run_each(damage_in, [stored for _, stored in files], executor)
            for number, damages in tqdm(found, "files", len(files), disable=True if options.json else None):
                dataset, stored = files[number]
                for damage in damages:
                    cells = cells_with(damage, stored.array, groups[dataset])
                    about = {"dataset": dataset, "array": stored.array}
                    lines.append({**about, **cells._asdict(), "problem": damage.problem})
    except Problems as problems:
        raise CommandError(*problems.args, code=1) from problems
    lines.sort(key=lambda line: (line["dataset"], line["array"], line["start"]))
    if options.json:
        content = {"ok": not lines, "n_files": len(files), "damaged": lines, "without_checksums": sorted(unknown)}
        print(json.dumps(content))
    else:
        _show(lines, len(files), sorted(unknown))
    return int(bool(lines))


def _show(lines: Sequence[dict[str, Any]], n_files: int, unknown: Sequence[str]) -> None:
    for line in lines:
        print(f"{line['dataset']}/{line['array']}, cells {line['start']:,} to {line['stop'] - 1:,}: {line['problem']}")
    if lines:
        print(
            f"{plural(len(lines), 'damaged part')} in {plural(n_files, 'file')}. Copy these files again, or write the "
            "collection again."
        )
    else:
        print(f"{plural(n_files, 'file')}: no damage")
    if unknown:
        print(
            f"{plural(len(unknown), 'array')} without checksums ({few(unknown, _SHOWN)}): only what can't be decoded "
            "was found there. annbatch-distributed collect writes checksums."
        )
