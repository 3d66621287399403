"""Attention of many rows as launches: tiles that fit, and the items that the rows are cut into. No GPU here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.kernels import KernelSpec, spec
from bytefloor.engine.launches import RESERVED_BYTES, STORAGES, Card
from bytefloor.errors import UnsupportedError
from bytefloor.model.step import CacheKind

GROUP_ROWS = 64
"""Rows of a warpgroup's products."""
LOADERS = 128
"""Threads that fill the ring, beside the warpgroups that multiply."""
LEAST_SLOTS, MOST_SLOTS = 2, 6
"""Of the ring: keys and values by turns, or both together where keys are values but for some lanes."""

Item = tuple[int, int, int, int]
"""First row, rows, slot of the first row, sequence."""


@dataclass(frozen=True)
class RowTiles:
    """groups: warpgroups that multiply. parts: of the columns of V, each of as many warps. n_positions: of a tile."""

    groups: int
    parts: int
    n_positions: int

    @property
    def n_rows(self) -> int:
        """Of a block's products: rows by heads of a KV head."""
        return self.groups * GROUP_ROWS // self.parts


def padded_columns(head_size: int) -> int:
    """Columns of a tile of values: what one instruction, or two warpgroups' instructions, can take."""
    return next(n for n in (64, 128, 256, 512) if head_size <= n)


def preferred_tiles(head_size: int, has_warpgroups: bool) -> RowTiles:
    """What registers hold: sums of the output, scores and shares. Two warpgroups that multiply have 232 a thread where
    one that loads leaves them its own; elsewhere a single one has 255."""
    parts = 1 if head_size <= 256 else 2
    if has_warpgroups:
        return RowTiles(2, parts, 128 if head_size <= 128 else 64)
    return RowTiles(1, parts, 64 if head_size <= 128 else 32)


def shared_bytes(kind: CacheKind, tiles: RowTiles, n_slots: int) -> int:
    """Queries, slots of the ring, beside codes the scales of keys and values, and two barriers a slot."""
    columns = padded_columns(kind.head_size)
    slot = tiles.n_positions * 2 * (columns + ceil_div(kind.rotated, 64) * 64)
    scales = tiles.n_positions * 8 if STORAGES[kind.storage] else 0
    return tiles.n_rows * columns * 2 + n_slots * (slot + scales + 16)


def plan_attention_rows(
    kind: CacheKind, n_heads: int, plan: CachePlan, card: Card, has_warpgroups: bool = True
) -> tuple[KernelSpec, int, int]:
    """(kernel, most rows an item, blocks an item) of a layer's attention. has_warpgroups: sm_90a.

    UnsupportedError where no kernel takes the shape, or where its tiles do not fit in shared memory.
    """
    e, j = kind.head_size, kind.n_kv_heads
    group = n_heads // j
    if e % 16 or e > 512:
        raise UnsupportedError(f"no attention kernel of rows for head size {e}")
    if kind.rotated % 32 or (kind.rotated and e % 32):
        raise UnsupportedError(f"no attention kernel of rows for head size {e} with {kind.rotated} lanes that turn")
    tiles = preferred_tiles(e, has_warpgroups)
    if group > tiles.n_rows:
        raise UnsupportedError(f"no attention kernel of rows for {group} query heads a KV head of head size {e}")
    room = card.multiprocessor_bytes - RESERVED_BYTES
    while tiles.n_positions > 16 and (
        shared_bytes(kind, tiles, LEAST_SLOTS) > room
        or (plan.page_size % tiles.n_positions and tiles.n_positions % plan.page_size)
    ):
        tiles = RowTiles(tiles.groups, tiles.parts, tiles.n_positions // 2)
    fitting = [n for n in range(LEAST_SLOTS, MOST_SLOTS + 1) if shared_bytes(kind, tiles, n) <= room]
    if not fitting or (plan.page_size % tiles.n_positions and tiles.n_positions % plan.page_size):
        raise UnsupportedError(
            f"no room for attention of rows with head size {e} in {room} bytes and pages of {plan.page_size}"
        )
    kernel = spec(
        "attention_rows",
        tiles.groups * 128 + LOADERS,
        shared_bytes(kind, tiles, fitting[-1]),
        STORAGE=STORAGES[kind.storage],
        ROTATED=kind.rotated,
        E=e,
        H=n_heads,
        J=j,
        WINDOW=kind.window or 0,
        PAGE=plan.page_size,
        TILE=tiles.n_positions,
        STAGES=fitting[-1],
        GROUPS=tiles.groups,
        PARTS=tiles.parts,
    )
    return kernel, tiles.n_rows // group, j


def attention_items(runs: Sequence[Item], rows_an_item: int) -> list[Item]:
    """Runs of rows with consecutive slots, cut into pieces that a block takes; the longest first, so that the last
    blocks of a card are short."""
    pieces = [
        (first_row + at, min(rows_an_item, n_rows - at), first_slot + at, sequence)
        for first_row, n_rows, first_slot, sequence in runs
        for at in range(0, n_rows, rows_an_item)
    ]
    return sorted(pieces, key=lambda piece: piece[1] + piece[2], reverse=True)
