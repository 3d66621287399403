"""Attention of many rows: the kernel's twin, and random batches over a poisoned cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.launches import STORAGES, Card
from bytefloor.engine.plan_rows import attention_items, plan_attention_rows
from bytefloor.model.step import CacheKind
from bytefloor.ops import attention
from bytefloor.ops.cache_write import page_ids
from bytefloor.ops.pages import page_shape, turning_lanes, write_rows
from bytefloor.ops.row_tiles import from_row_tiles, pitch_of, tiles_shape, to_row_tiles

H200 = Card(132)
STORAGE_NAMES = {number: name for name, number in STORAGES.items()}
ERROR_OF_LARGEST = 2**-8 + 2**-10
"""Of the largest |v| that a row may see. Shares add up to one and each is rounded to bf16, 2^-9 of itself at most, and
so is the output, which is no larger than that |v|: 2^-8. A quarter of it is left for float32 scores, sums and
exponentials. Of codes shares are rounded times their scale, which is no different."""


def expected_rows(
    q: Tensor, cache: Tensor, table: Tensor, item: Sequence[int], window: int | None, storage: str, rotated: int
) -> Tensor:
    """[rows, H, E] in the precision of q [T, H, E]: scores are exponents of two."""
    first_row, n_rows, first_slot, sequence = item
    slots = torch.arange(first_slot, first_slot + n_rows, device=q.device)
    ones = torch.ones(q.shape[-1], dtype=q.dtype, device=q.device) if rotated else None
    return attention.reference(
        q[first_row : first_row + n_rows], slots, torch.full_like(slots, sequence), table.long(), cache, math.log(2),
        window, storage, rotated, ones,
    )  # fmt: skip


class FlashTwin:
    """A mixin of TwinKernel, which has the constants."""

    n: Callable[[str], int]

    def attention_rows(
        self, q: Tensor, cache: Tensor, table: Tensor, n_table: int, items: Tensor, out: Tensor, pitch: int
    ) -> None:
        """bf16 queries in, row tiles out, float32 between. Buffers may go on behind what is needed."""
        n_heads, e, storage = self.n("H"), self.n("E"), STORAGE_NAMES[self.n("STORAGE")]
        shape = tiles_shape(n_heads * e, pitch)
        tiles = out.view(-1).view(torch.bfloat16)[: math.prod(shape)].view(shape)
        queries = q.view(-1)[: q.numel() // (n_heads * e) * (n_heads * e)].view(-1, n_heads, e).float()
        tables = table.view(-1)[: table.numel() // n_table * n_table].view(-1, n_table)
        for item in items.view(-1, 4).tolist():
            first_row, n_rows = item[:2]
            if n_rows <= 0:
                continue
            rows = expected_rows(queries, cache, tables, item, self.n("WINDOW") or None, storage, self.n("ROTATED"))
            above = first_row % 8  # where a row stands in its tile depends on this
            whole = to_row_tiles(torch.nn.functional.pad(rows.flatten(1), (0, 0, above, 0)), pitch_of(above + n_rows))
            at = torch.arange(n_rows, device=out.device)
            to, of = first_row + at, above + at
            tiles[:, to // 8, to % 8] = whole[:, of // 8, of % 8]


class RowsBatch:
    """Random rows of several sequences, and a cache that is poisoned but for the slots that they see.

    runs: rows and slot of the first, of each sequence.
    """

    def __init__(
        self, e: int, n_heads: int, j: int, window: int | None, storage: str, rotated: int,
        runs: Sequence[tuple[int, int]], device: str = "cuda", capacity: int = 2048, chunk: int = 384,
        has_warpgroups: bool = True, card: Card = H200, spread: float = 4.0,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device).manual_seed(e * 1000 + len(runs) + runs[0][1])
        self.e, self.n_heads, self.j, self.window, self.storage, self.rotated = e, n_heads, j, window, storage, rotated
        plan, kind = CachePlan(capacity, chunk), CacheKind("kind", j, e, window, storage, rotated)
        self.kernel, self.rows_an_item, self.grid_y = plan_attention_rows(kind, n_heads, plan, card, has_warpgroups)
        self.n_table = plan.n_table(kind)
        ids = torch.randperm(len(runs) * self.n_table, generator=torch.Generator().manual_seed(e)) + 1
        self.table = ids.view(len(runs), self.n_table).to(device, torch.int32)
        shape, dtype = page_shape(storage, j, plan.page_size, e, rotated)
        self.cache = torch.empty(len(ids) + 1, *shape, dtype=dtype, device=device)
        self.cache.view(torch.uint8).fill_(0xFF)
        n_rows = [n for n, _ in runs]
        first_rows = [sum(n_rows[:i]) for i in range(len(runs))]
        self.runs = [(first, n, slot, i) for i, (first, (n, slot)) in enumerate(zip(first_rows, runs, strict=True))]
        self.largest = torch.zeros(sum(n_rows), device=device)  # |v| that a row may see
        for first_row, n, first_slot, sequence in self.runs:
            start = 0 if window is None else max(0, first_slot - window + 1)
            slots = torch.arange(start, first_slot + n, device=device)
            kv = torch.randn(2, len(slots), j, e, generator=generator, device=device)
            if storage != "bf16":  # largest values of rows differ, as those of a model's do
                kv *= 0.25 + torch.rand(2, len(slots), j, 1, generator=generator, device=device)
            self.largest[first_row : first_row + n] = kv[1].abs().max()
            pages = page_ids(slots, self.table[sequence].long().expand(len(slots), -1), plan.page_size)
            offsets = slots % plan.page_size
            if rotated:
                kept = torch.cat((kv[1], turning_lanes(kv[0], rotated)), -1)
                self.cache[pages, 0, :, offsets] = kept.bfloat16()
            elif storage == "bf16":
                self.cache[pages, 0, :, offsets], self.cache[pages, 1, :, offsets] = kv.bfloat16()
            else:
                for half in range(2):
                    write_rows(self.cache, half, pages, offsets, kv[half], storage)
        self.q = torch.randn(sum(n_rows), n_heads, e, generator=generator, device=device) * (spread / math.sqrt(e))
        self.q = self.q.bfloat16()
        items = attention_items(self.runs, self.rows_an_item)
        self.items = torch.tensor(items, dtype=torch.int32, device=device)
        self.pitch = pitch_of(sum(n_rows)) + 8
        shape = tiles_shape(n_heads * e, self.pitch)
        self.out = torch.full(shape, math.nan, dtype=torch.bfloat16, device=device)

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.items), self.grid_y

    @property
    def arguments(self) -> tuple:
        return self.q, self.cache, self.table, self.n_table, self.items, self.out, self.pitch

    def expected(self) -> Tensor:
        """float64 [T, H, E]."""
        rows = [
            expected_rows(self.q.double(), self.cache, self.table, run, self.window, self.storage, self.rotated)
            for run in self.runs
        ]
        return torch.cat(rows)

    def check(self) -> None:
        """Every output against float64, within the derived bound; what is beyond rows and columns."""
        n_rows, k = len(self.q), self.n_heads * self.e
        found = from_row_tiles(self.out, self.pitch, ceil_div(k, 64) * 64)
        assert bool(found[n_rows:].isnan().all()), "rows beyond the last were written"
        found = found[:n_rows]
        assert not found[:, k:].any(), "columns beyond the last are not zero"
        error = (found[:, :k].double() - self.expected().flatten(1)).abs() / self.largest[:, None]
        worst = error.nan_to_num(math.inf).amax(dim=1)
        row = int(worst.argmax())
        run = next(run for run in reversed(self.runs) if run[0] <= row)
        assert float(worst[row]) <= ERROR_OF_LARGEST, f"{float(worst[row])} of the largest value in row {row} of {run}"
