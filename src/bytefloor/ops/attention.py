"""attention: softmax(scale * q K^T) V over the live band of each row's own sequence.

q float32 [T, H, E]; slots, sequence int64 [T] and table int64 [B, n_table] as in cache_write; cache
[n_pages, 2, J, PAGE, E], or bytes that hold codes of ``storage``, or V [..., E] and some lanes of K
(``rotated``; the others are V times k_norm [E]), see ``pages.py``. A row at slot p sees slots
max(0, p - window + 1) .. p, all of 0 .. p where window is None; nothing else in the cache matters. H is a multiple of
J: query head h reads key/value head h // (H / J). Rows of one sequence are contiguous and their slots ascend. out
float32 [T, H, E].
Approximate: softmax in at least float32, the maximum subtracted first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bytefloor.errors import ShapeError
from bytefloor.ops import pages as layout
from bytefloor.ops.cache_write import page_ids
from bytefloor.ops.op import Case, Op, Operand, Sizes

Read = Callable[[Tensor], Tensor]
"""Float [n, 2, J, PAGE, E] of pages [n, ...]; of their keys alone, where these are whole, [n, 1, J, PAGE, E]."""


def reader(dtype: torch.dtype, head_size: int, storage: str, rotated: int, k_norm: Tensor | None) -> Read:
    """Keys and values of whole heads, whatever it is that pages keep of them."""

    def read(pages: Tensor) -> Tensor:
        values = layout.values_of(pages, head_size, storage).to(dtype)
        if k_norm is None:
            return values
        return torch.cat((layout.keys_of(values, k_norm, rotated), values[..., :head_size]), dim=1)

    return read


def reference(
    q: Tensor,
    slots: Tensor,
    sequence: Tensor,
    table: Tensor,
    cache: Tensor,
    scale: float,
    window: int | None,
    storage: str = "float32",
    rotated: int = 0,
    k_norm: Tensor | None = None,
) -> Tensor:
    """One sequence after another, with an explicit mask."""
    read = reader(q.dtype, q.shape[-1], storage, rotated, k_norm)
    ids, counts = sequence.unique_consecutive(return_counts=True)
    outputs = []
    start = 0
    for row_of_table, count in zip(ids.tolist(), counts.tolist(), strict=True):
        rows = slice(start, start + count)
        outputs.append(_attend_one(q[rows], slots[rows], table[row_of_table], cache, scale, window, read))
        start += count
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_one(
    q: Tensor, slots: Tensor, pages: Tensor, cache: Tensor, scale: float, window: int | None, read: Read
) -> Tensor:
    n_heads, n_kv_heads = q.shape[1], cache.shape[2]
    if n_heads % n_kv_heads:
        raise ShapeError(f"attention: {n_heads} query heads are not a multiple of {n_kv_heads} key/value heads")
    first, last = int(slots[0]), int(slots[-1])
    start = 0 if window is None else max(0, first - window + 1)
    k, v = gather_band(cache, pages, start, last + 1, q.shape[-1], read).unbind()
    band = torch.arange(start, last + 1, device=q.device)
    return mix(q, k, v, sees(slots, band, window), scale)


def sees(slots: Tensor, band: Tensor, window: int | None) -> Tensor:
    """[T, n]: which slots of a band each row's own allows."""
    is_visible = band[None, :] <= slots[:, None]
    if window is not None:
        is_visible &= band[None, :] > slots[:, None] - window
    return is_visible


def mix(q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor, scale: float) -> Tensor:
    """[T, H, E] of q [T, H, E], k and v [J, n, E], with a mask [T, n]."""
    grouped = q.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)
    scores = grouped @ k[:, None].transpose(-1, -2) * scale
    weights = scores.masked_fill(~is_visible, float("-inf")).softmax(dim=-1)
    return (weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1, 2)


def gather_band(cache: Tensor, pages: Tensor, start: int, end: int, head_size: int, read: Read) -> Tensor:
    """K and V of slots start .. end - 1, [2, J, n, E]: of the sequence's pages alone."""
    page_size = layout.page_size_of(cache, head_size)
    first_page, last_page = start // page_size, (end - 1) // page_size
    starts = torch.arange(first_page, last_page + 1, device=cache.device) * page_size
    ids = page_ids(starts, pages.expand(starts.shape[0], -1), page_size)
    whole = read(cache[ids]).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return whole[:, :, start - first_page * page_size : end - first_page * page_size]


def band_length(length: int, window: int | None) -> int:
    """How many positions the last row of a sequence of this length sees."""
    return length if window is None else min(length, window)


def _cache_bytes(sizes: Sizes, attributes: Mapping[str, Any]) -> int:
    """The live band; C is the bytes of K and V of one head at one position, as they are stored."""
    live = band_length(sizes["S"], attributes["window"])
    return sizes["B"] * live * sizes["J"] * sizes["C"]


OP = Op(
    name="attention",
    operands=(
        Operand("q", ("T", "H", "E")),
        Operand("slots", ("T",), "int64"),
        Operand("sequence", ("T",), "int64"),
        Operand("table", ("B", "P"), "int64"),
        Operand("k_norm", ("E",), is_optional=True),
    ),
    outputs=(Operand("out", ("T", "H", "E")),),
    attributes=("scale", "window", "storage", "rotated"),
    reference=reference,
    weight_bytes=lambda sizes, stored_bytes: 0,  # the K norm's, which the step has read before
    cache_bytes=_cache_bytes,
    flops=lambda sizes: 4 * sizes["T"] * sizes["H"] * sizes["E"] * sizes["S"],
    is_exact=False,
    error_budget=1e-10,
    reads_cache=True,
    cases=(
        Case({"T": 5, "H": 4, "J": 2, "E": 8}, {"scale": 0.35, "window": None, "storage": "float32", "rotated": 0}),
        Case({"T": 5, "H": 4, "J": 1, "E": 8}, {"scale": 1.0, "window": 3, "storage": "float32", "rotated": 0}),
    ),
)
