"""cache_write: keys and values of new rows go into the pages of their sequences.

k, v float32 [T, J, E]; slots int64 [T]: where in its sequence's ring a row goes; sequence int64 [T]: which row of the
table; table int64 [B, n_table]: page ids. cache [n_pages, 2, J, PAGE, E] (K then V), changed in place; or bytes that
hold codes, or less of K (``rotated``), see ``pages.py``.
Slot s lies in page table[b, (s // PAGE) % n_table] at offset s % PAGE.
``storage`` names what the cache keeps (float32, bf16, int8, fp8: the last two with a scale for each head and position);
rounding to it is the only rounding here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.ops import pages as layout
from bytefloor.ops.op import Case, Op, Operand
from bytefloor.ops.round_to import round_to


def page_ids(slots: Tensor, table_rows: Tensor, page_size: int) -> Tensor:
    """The page of each slot, given each slot's row of the table: [n] and [n, n_table] -> [n]."""
    ring_index = (slots // page_size) % table_rows.shape[1]
    return table_rows.gather(1, ring_index[:, None])[:, 0]


def reference(
    k: Tensor, v: Tensor, slots: Tensor, sequence: Tensor, table: Tensor, cache: Tensor, storage: str, rotated: int = 0
) -> None:
    """Scatter the rounded rows."""
    page_size = layout.page_size_of(cache, k.shape[-1])
    pages = page_ids(slots, table[sequence], page_size)
    offsets = slots % page_size
    halves = (torch.cat((v, layout.turning_lanes(k, rotated)), dim=-1),) if rotated else (k, v)
    for half, x in enumerate(halves):
        if layout.holds_codes(cache):
            layout.write_rows(cache, half, pages, offsets, x, storage)
        else:
            cache[pages, half, :, offsets] = round_to(x, storage).to(cache.dtype)


OP = Op(
    name="cache_write",
    operands=(
        Operand("k", ("T", "J", "E")),
        Operand("v", ("T", "J", "E")),
        Operand("slots", ("T",), "int64"),
        Operand("sequence", ("T",), "int64"),
        Operand("table", ("B", "P"), "int64"),
    ),
    outputs=(),
    attributes=("storage", "rotated"),
    reference=reference,
    cache_bytes=lambda sizes, attributes: sizes["T"] * sizes["J"] * sizes["C"],
    writes_cache=True,
    cases=(
        Case({"T": 5, "J": 2, "E": 8}, {"storage": "float32", "rotated": 0}),
        Case({"T": 5, "J": 1, "E": 8}, {"storage": "bf16", "rotated": 0}),
        Case({"T": 5, "J": 2, "E": 8}, {"storage": "int8", "rotated": 0}),
        Case({"T": 5, "J": 2, "E": 8}, {"storage": "fp8", "rotated": 0}),
    ),
)
