"""The past: the job that a state is of, made anew from what the state holds, for commands that ask what it has read."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import Contiguous, DistributedSampler, Independent, Rank, Shuffled, StatefulLoader
from annbatch_distributed.cli import CommandError
from annbatch_distributed.state import from_state

if TYPE_CHECKING:
    from argparse import Namespace

    from annbatch_distributed.cli.cells import Cells
    from annbatch_distributed.state import Identity, Position

__all__ = ["loader_of"]

_SAMPLERS = {"random": RandomSampler, "sequential": SequentialSampler}
_SHARDINGS = {"contiguous": Contiguous, "shuffled": Shuffled}
#: Ranges of rows, as a state has those of a mask, unless there are many.
_RANGES = re.compile(r"\d+:\d*(, \d+:\d*)*")


def loader_of(options: Namespace, cells: Cells) -> StatefulLoader:
    """Return the loader of rank 0 of the job that a state is of, with that state; options must not contradict it."""
    try:
        state = json.loads(Path(options.state).read_text())
        position, identity = from_state(state)
        sampler = _sampler(options, cells, position.before_end, identity)
        loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
        loader.use_collection(cells.collection)
        # the root is a seed here, whatever it was drawn from
        loader.load_state_dict({**state, "identity": identity | {"seed": sampler._job.arguments.seed}})
    except (OSError, TypeError, ValueError) as error:
        raise CommandError(f"--state {options.state}: {error}") from error
    return loader


def _sampler(options: Namespace, cells: Cells, position: Position, identity: Identity) -> DistributedSampler:
    mask = cells.mask(options.mask, options.where)
    if mask is None:
        text = str(identity["mask"])
        if not _RANGES.fullmatch(text):
            raise CommandError(f"the state has only a digest of its mask, {text}: name its rows by --mask or --where")
        bounds = [part.split(":") for part in text.split(", ")]
        mask = [slice(int(start), int(stop) if stop else None) for start, stop in bounds]
    sizes = {name: getattr(options, name) for name in ("chunk_size", "preload_nchunks", "batch_size")}
    n_lanes = position.segments[-1].n_lanes
    ranks = options.ranks or n_lanes
    sharding = _made(identity["sharding"], {**_kinds(_SHARDINGS), "Independent": Independent}, options.sharding, {})
    return DistributedSampler(
        _made(identity["sampler"], _kinds(_SAMPLERS), options.sampler, sizes),
        dist_info=Rank(0, ranks),
        remainder=options.remainder or identity["remainder"],  # type: ignore[arg-type]  # checked there
        sharding=sharding,
        seed=next((seed for seed in (options.seed, identity["seed"], identity["root"]) if isinstance(seed, int)), 0),
        virtual_ranks=options.virtual_ranks or (None if ranks == n_lanes else n_lanes),
        align=identity["align"],  # type: ignore[arg-type]  # checked there
        mask=mask,
    )


def _kinds(named: dict[str, Any]) -> dict[str, Any]:
    return {kind.__name__: kind for kind in named.values()}


def _made(text: object, kinds: dict[str, Any], name: str | None, given: dict[str, Any]) -> Any:  # noqa: ANN401 of any kind
    """Return what a state has as a text, such as ``Shuffled(block_size=64)``, with the settings that are given."""
    try:
        call: Any = ast.parse(str(text), mode="eval").body
        kind = kinds[call.func.id]
        settings = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (AttributeError, KeyError, SyntaxError, ValueError):
        raise CommandError(
            f"the state is of {text}, which can't be made from it: ask sampler.rows_of or loader.cells_of, in the "
            "script that makes that object"
        ) from None
    kind = kind if name is None else (_SAMPLERS | _SHARDINGS)[name]
    settings |= {name: value for name, value in given.items() if value is not None}
    return kind(**{name: value for name, value in settings.items() if name in inspect.signature(kind).parameters})
