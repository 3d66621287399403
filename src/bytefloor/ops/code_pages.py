"""code_pages: pages that no later row sees as they were written go into codes.

slots, sequence int64 [T] and tables int64 [B, n_table] as in cache_write, a table for each of three kinds of pages:
recent [n_pages, 2, J, PAGE, E], where cache_write puts rows; cache, pages of codes (``page_codes.py``); first, as
recent: pages that begin before ``n_first`` are kept as they are. The last two change in place.

A row sees a page as it was written if one of its positions is among the ``recent_window`` that end with the row's own.
So behind rows a .. b of a sequence those pages are coded that row b + 1 sees in codes; not those that row a saw so,
which were before. Only positions say what is coded and when, and each page is coded by itself: how rows came in chunks,
and what else is in a step, changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand
from bytefloor.ops.page_codes import encode
from bytefloor.ops.pages import holds_codes


def oldest_recent(slots: Tensor, recent_window: int, page_size: int) -> Tensor:
    """The first page that a row at each slot sees as it was written."""
    return (slots - recent_window + 1).clamp(min=0) // page_size


def reference(
    slots: Tensor,
    sequence: Tensor,
    table: Tensor,
    recent_table: Tensor,
    first_table: Tensor,
    cache: Tensor,
    recent: Tensor,
    first: Tensor,
    recent_window: int,
    n_first: int,
) -> None:
    """One page of one sequence after another."""
    page_size = recent.shape[3]
    for row_of_table in sequence.unique_consecutive().tolist():
        own = slots[sequence == row_of_table]
        begin, end = oldest_recent(torch.stack((own[0], own[-1] + 1)), recent_window, page_size).tolist()
        for place in range(begin, end):
            held = recent[_page_at(place, recent_table[row_of_table])]
            if place * page_size < n_first:
                first[_page_at(place, first_table[row_of_table])] = held
            else:
                coded = encode(held) if holds_codes(cache) else held
                cache[_page_at(place, table[row_of_table])] = coded


def _page_at(place: int, ring: Tensor) -> Tensor:
    return ring[place % len(ring)]


OP = Op(
    name="code_pages",
    operands=(
        Operand("slots", ("T",), "int64"),
        Operand("sequence", ("T",), "int64"),
        Operand("table", ("B", "P"), "int64"),
        Operand("recent_table", ("B", "N"), "int64"),
        Operand("first_table", ("B", "F"), "int64"),
    ),
    outputs=(),
    attributes=("recent_window", "n_first"),
    reference=reference,
    cache_bytes=lambda sizes, attributes: sizes["T"] * sizes["J"] * sizes["C"],
    writes_cache=True,
    cases=(Case({"T": 5, "J": 2, "E": 8}, {"recent_window": 3, "n_first": 2}),),
)
