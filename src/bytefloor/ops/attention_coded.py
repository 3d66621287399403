"""attention_coded: attention over pages of which a row sees the recent ones as they were written, others in codes.

q float32 [T, H, E], its lanes turned as those of keys (``rotate.py``); slots, sequence, the three tables and the three
kinds of pages as in ``code_pages.py``, which has run. A row at slot p sees slots max(0, p - window + 1) .. p, all of
0 .. p where window is None: those of pages that begin before ``n_first``, and of pages with a position among the
``recent_window`` that end with p, as they were written; all others in codes. Rows of a sequence are contiguous, their
slots ascend. out float32 [T, H, E], lanes still turned.
Approximate: softmax in at least float32, the maximum subtracted first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bytefloor.ops.attention import band_length, mix, sees
from bytefloor.ops.cache_write import page_ids
from bytefloor.ops.code_pages import oldest_recent
from bytefloor.ops.op import Case, Op, Operand, Sizes
from bytefloor.ops.page_codes import CODED
from bytefloor.ops.pages import values_of


def reference(
    q: Tensor,
    slots: Tensor,
    sequence: Tensor,
    table: Tensor,
    recent_table: Tensor,
    first_table: Tensor,
    cache: Tensor,
    recent: Tensor,
    first: Tensor,
    scale: float,
    window: int | None,
    recent_window: int,
    n_first: int,
) -> Tensor:
    """One sequence after another."""
    outputs = []
    for row_of_table in sequence.unique_consecutive().tolist():
        is_own = sequence == row_of_table
        pools = ((first, first_table), (cache, table), (recent, recent_table))
        held = Held(*((pool, each[row_of_table]) for pool, each in pools))
        outputs.append(_attend_one(q[is_own], slots[is_own], held, scale, window, recent_window, n_first))
    return torch.cat(outputs)


class Held(NamedTuple):
    """A sequence's pages of each kind: a pool, and its row of the table."""

    first: tuple[Tensor, Tensor]
    coded: tuple[Tensor, Tensor]
    recent: tuple[Tensor, Tensor]


def _attend_one(
    q: Tensor, slots: Tensor, held: Held, scale: float, window: int | None, recent_window: int, n_first: int
) -> Tensor:
    """Older pages and recent ones side by side, and a mask that knows which of the two a row sees."""
    page_size = held.recent[0].shape[3]
    oldest = oldest_recent(slots, recent_window, page_size)
    start, last = 0 if window is None else max(0, int(slots[0]) - window + 1), int(slots[-1])
    begin, end = start // page_size, int(oldest[-1])
    n_kept = min(end, -(-n_first // page_size))
    kept = torch.arange(begin, max(begin, n_kept), device=q.device)
    coded = torch.arange(max(begin, n_kept), max(begin, end), device=q.device)
    recent = torch.arange(max(begin, int(oldest[0])), last // page_size + 1, device=q.device)
    places = torch.cat((kept, coded, recent))
    is_recent = torch.arange(len(places), device=q.device) >= len(kept) + len(coded)
    is_seen = (is_recent == (places >= oldest[:, None])).repeat_interleave(page_size, dim=1)
    band = (places[:, None] * page_size + torch.arange(page_size, device=q.device)).flatten()
    is_live = (band >= start) & (band <= last)
    each = zip(held, (kept, coded, recent), strict=True)
    pages = torch.cat([_read(own, at, page_size, q) for own, at in each])
    k, v = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, is_live]
    del pages
    return mix(q, k, v, (sees(slots, band, window) & is_seen)[:, is_live], scale)


def _read(held: tuple[Tensor, Tensor], places: Tensor, page_size: int, q: Tensor) -> Tensor:
    """Values [n, 2, J, PAGE, E] of a sequence's pages, in q's dtype."""
    pool, table = held
    pages = pool[page_ids(places * page_size, table.expand(len(places), -1), page_size)]
    return values_of(pages, q.shape[-1], CODED, q.dtype).to(q.dtype)


def _cache_bytes(sizes: Sizes, attributes: Mapping[str, Any]) -> int:
    """The live band; C is the bytes of a head at a position in codes, and others are bf16."""
    live = band_length(sizes["S"], attributes["window"])
    n_old = max(0, live - attributes["recent_window"])
    n_first = min(attributes["n_first"], n_old) if live == sizes["S"] else 0
    of_head = (n_old - n_first) * sizes["C"] + (live - n_old + n_first) * 4 * sizes["E"]
    return sizes["B"] * sizes["J"] * of_head


OP = Op(
    name="attention_coded",
    operands=(
        Operand("q", ("T", "H", "E")),
        Operand("slots", ("T",), "int64"),
        Operand("sequence", ("T",), "int64"),
        Operand("table", ("B", "P"), "int64"),
        Operand("recent_table", ("B", "N"), "int64"),
        Operand("first_table", ("B", "F"), "int64"),
    ),
    outputs=(Operand("out", ("T", "H", "E")),),
    attributes=("scale", "window", "recent_window", "n_first"),
    reference=reference,
    cache_bytes=_cache_bytes,
    flops=lambda sizes: 4 * sizes["T"] * sizes["H"] * sizes["E"] * sizes["S"],
    is_exact=False,
    error_budget=1e-10,
    reads_cache=True,
    cases=(
        Case(
            {"T": 5, "H": 4, "J": 2, "E": 8},
            {"scale": 0.35, "window": None, "recent_window": 3, "n_first": 2},
        ),
    ),
)
