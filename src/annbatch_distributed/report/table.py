"""A plan as a table: of text, of HTML for notebooks, of pandas'."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from annbatch_distributed.report.density import density

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

    from annbatch_distributed.plan import EpochPlan
    from annbatch_distributed.rows import Rows

__all__ = ["as_frame", "as_html", "as_text", "percent", "title"]

#: More ranks than this, and the table shows the first and the last ones.
_MOST_RANKS = 16
#: Numbers, which notebooks and Sphinx align in other ways.
_RIGHT = "text-align: right; padding: 0 0.5em"
#: In how many parts at most, and on how many points, a bar shows the rows of the collection.
_BINS = 240


class _Line(NamedTuple):
    """What the table says of a rank."""

    names: tuple[int, ...]
    """The rank; of a virtual rank, the rank that runs it and the virtual rank."""
    n_batches: int
    n_rows: int
    n_repeated: int
    rows: str
    """The first few stretches of its rows."""


def _in_short(rows: Rows) -> str:
    """Return rows as a text of their first few pieces."""
    return rows.in_short(3)


def percent(plan: EpochPlan) -> str:
    """Return how many of the window's rows are lost, of a hundred."""
    return f"{100 * plan.n_lost / len(plan.window):.2g} %"


def title(plan: EpochPlan) -> str:
    """Return who shares which rows, and how, in a line."""
    settings = [f'remainder="{plan.remainder}"']
    if repr(plan.sharding) != "Contiguous()":  # the default goes without saying
        settings.insert(0, f"sharding={getattr(plan.sharding, '__name__', plan.sharding)}")
    settings.append("no batch size" if plan.batch_size is None else f"batch size {plan.batch_size}")
    epoch = f"epoch {plan.epoch}"
    what = "share" if plan.n_draws is None else f"draw {sum(plan.sizes)} samples from"
    who = f"{plan.world_size} {'' if plan.n_processes is None else 'virtual '}ranks"
    who += "" if plan.n_processes is None else f" on {plan.n_processes} ranks"
    return f"{epoch}: {who} {what} {len(plan.window)} of {plan.n_obs} rows ({', '.join(settings)})"


def as_text(plan: EpochPlan) -> str:
    """Return the table as text."""
    lines = [_names(plan), *(_cells(line) for line in _lines(plan, _shown(plan)[0]))]
    if len(lines) <= plan.world_size:
        lines += [("...",) * len(lines[0]), *(_cells(line) for line in _lines(plan, _shown(plan)[1]))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    table = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    ]
    return "\n".join((title(plan), *table, *_notes(plan)))


def as_html(plan: EpochPlan) -> str:
    """Return the table as HTML, with a bar for each rank that shows where in the collection its rows are."""
    first, last = _shown(plan)
    names = [*_names(plan)[:-1], "0 &hellip; global rows &hellip; " + str(plan.n_obs)]
    body = [*_html_lines(plan, first)]
    if last:
        body += [f'<tr><td colspan="{len(names)}">&hellip;</td></tr>', *_html_lines(plan, last)]
    if plan.n_lost:
        lost = _bar(plan.lost, plan.n_obs, "#d55e00", _in_short(plan.lost))
        empty = "<td></td>" * (len(names) - 4)
        number = f'<td style="{_RIGHT}">{plan.n_lost}</td>'
        body.append(f"<tr><th>lost</th>{empty}{number}<td></td><td>{lost}</td></tr>")
    head = "".join(f'<th style="{_RIGHT}">{name}</th>' for name in names[:-1])
    head += f'<th style="text-align: left; padding: 0 0.5em">{names[-1]}</th>'
    notes = "<br/>".join(map(escape, _notes(plan)))
    return (
        f'<div style="overflow-x: auto"><p>{escape(title(plan))}</p>'
        f"<table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table><p>{notes}</p></div>"
    )


def as_frame(plan: EpochPlan) -> pd.DataFrame:
    """Return a line for each rank, whatever their number."""
    import pandas as pd

    lines = list(_lines(plan, range(plan.world_size)))
    *index, _, _, _, _ = _names(plan)
    columns = {
        "batches": [line.n_batches for line in lines],
        "rows" if plan.n_draws is None else "samples": [line.n_rows for line in lines],
        "repeated": [line.n_repeated for line in lines],
        "global rows": [line.rows for line in lines],
    }
    names = [line.names for line in lines]
    if len(index) > 1:
        return pd.DataFrame(columns, index=pd.MultiIndex.from_tuples(names, names=["rank", "virtual rank"]))
    return pd.DataFrame(columns, index=pd.RangeIndex(len(lines), name="rank"))


def _names(plan: EpochPlan) -> tuple[str, ...]:
    ranks = ("rank",) if plan.n_processes is None else ("rank", "virtual")
    return *ranks, "batches", "rows" if plan.n_draws is None else "samples", "repeated", "global rows"


def _shown(plan: EpochPlan) -> tuple[Sequence[int], Sequence[int]]:
    """The ranks that are shown, and those after the others."""
    ranks = range(plan.world_size)
    return (ranks, ranks[:0]) if len(ranks) <= _MOST_RANKS else (ranks[: _MOST_RANKS - 1], ranks[-1:])


def _lines(plan: EpochPlan, ranks: Iterable[int]) -> Iterable[_Line]:
    for rank in ranks:
        shard = plan.shard(rank)
        runs = () if plan.n_processes is None else (rank * plan.n_processes // plan.world_size,)
        rows = _in_short(plan.in_order(rank))
        yield _Line((*runs, rank), plan.n_batches(rank), plan.size(rank), len(shard) - shard.n_own, rows)


def _cells(line: _Line) -> tuple[str, ...]:
    return *map(str, (*line.names, line.n_batches, line.n_rows, line.n_repeated)), line.rows


def _html_lines(plan: EpochPlan, ranks: Iterable[int]) -> Iterable[str]:
    for line in _lines(plan, ranks):
        *cells, rows = _cells(line)
        bar = _bar(plan.shard(line.names[-1]).rows, plan.n_obs, "#0072b2", rows)
        numbers = "".join(f'<td style="{_RIGHT}">{cell}</td>' for cell in cells)
        yield f"<tr>{numbers}<td>{bar}</td></tr>"


def _bar(rows: Rows, n_obs: int, colour: str, label: str) -> str:
    """A bar with a darker part where more of the rows are: an SVG, which notebooks show whatever their styles are."""
    parts = density(rows, n_obs, min(_BINS, n_obs))
    # whatever is there can be seen, however little it is
    opacities = np.where(parts > 0, np.maximum(0.15, parts), 0.0)
    rectangles, start = [], 0
    for stop in range(1, len(parts) + 1):
        if stop == len(parts) or abs(opacities[stop] - opacities[start]) > 0.02:
            if opacity := opacities[start]:
                rectangles.append(
                    f'<rect x="{start}" width="{stop - start}" height="12" fill-opacity="{opacity:.2f}"/>'
                )
            start = stop
    return (
        f'<svg width="{_BINS}" height="12" viewBox="0 0 {len(parts)} 12" preserveAspectRatio="none" role="img" '
        'style="background: rgba(128, 128, 128, 0.15)">'
        f'<title>{escape(label)}</title><g fill="{colour}">{"".join(rectangles)}</g></svg>'
    )


def _notes(plan: EpochPlan) -> Iterable[str]:
    """What is left, what is lost and repeated, what would lose none, and what that takes of memory."""
    if plan.left is not None:
        least, most = min(plan.left), max(plan.left)
        batches = f"{most}" if least == most else f"{least} to {most}"
        yield f"left of it: {batches} batches on each of {len(plan.left)} {'virtual ' * bool(plan.n_processes)}ranks"
    if plan.n_draws is not None:
        yield f"alone, the wrapped sampler draws {plan.n_draws} samples"
    else:
        lost = f"lost in this epoch: {plan.n_lost} rows"
        lost += f", {percent(plan)} ({_in_short(plan.lost)})" if plan.n_lost else ""
        yield lost + (f"; repeated: {plan.n_repeated}" if plan.n_repeated else "")
    if plan.n_lost and plan.left is None:
        yield 'to lose none: remainder="exact", "keep" or "pad"'
    if plan.rows_in_memory is not None:
        yield f"in memory: up to {plan.rows_in_memory} rows on each rank"
