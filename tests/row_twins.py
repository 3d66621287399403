"""Python twins of the small kernels of a prompt chunk: they get the kernels' arguments, and write what those would.

Written from the references of the plain ops. Pointers are tensors, whose storage may go on behind them; tiles are a
buffer of bytes or bf16 that may be longer than needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bytefloor.engine.launches import STORAGES
from bytefloor.ops import OPS
from bytefloor.ops.pages import page_shape
from bytefloor.ops.row_tiles import from_row_tiles, tiles_shape, to_row_tiles

ACTIVATIONS = {1: "silu", 2: "gelu_tanh"}


def planes_of(y: Tensor, n_planes: int, plane_stride: int, n_rows: int, stride: int, n: int) -> Tensor:
    """The sum of planes of rows, [n_rows, n], in order."""
    planes = y.as_strided((n_planes, n_rows, n), (plane_stride, stride, 1))
    total = planes[0].clone()
    for plane in planes[1:]:
        total += plane
    return total


def write_tiles(tiles: Tensor, x: Tensor, pitch: int) -> None:
    """Rows x [T, K] into row tiles, whose other rows stay what they are."""
    n_rows, k = x.shape
    shape = tiles_shape(k, pitch)
    found = tiles.view(-1).view(torch.bfloat16)[: math.prod(shape)].view(shape)
    at = torch.arange(n_rows, device=x.device)
    found[:, at // 8, at % 8] = to_row_tiles(x, pitch)[:, at // 8, at % 8]


def read_tiles(tiles: Tensor, n_rows: int, k: int, pitch: int) -> Tensor:
    """Rows [n_rows, k] of row tiles."""
    shape = tiles_shape(k, pitch)
    return from_row_tiles(tiles.view(-1).view(torch.bfloat16)[: math.prod(shape)].view(shape), n_rows, k)


class RowTwins:
    """A mixin of TwinKernel, which has the constants, and what packed matrices decode to."""

    n: Callable[[str], int]
    f: Callable[[str], float]
    matrix: Callable[[Tensor], Tensor]

    def norm_rows(
        self, rows: Tensor | None, x: Tensor, delta: Tensor | None, n_planes: int, plane_stride: int,
        post_weight: Tensor | None, norm_weight: Tensor | None, scalar: Tensor | None, tiles: Tensor, n_rows: int,
        pitch: int,
    ) -> None:  # fmt: skip
        k, eps, rms_norm = self.n("K"), self.f("EPS"), OPS["rms_norm"].reference
        at = torch.arange(n_rows, device=x.device) if rows is None else rows[:n_rows].long()
        n_all = int(at.max()) + 1
        residual = x.as_strided((n_all, k), (k, 1))
        v = residual[at]
        if self.n("HAS_DELTA"):
            assert delta is not None
            d = planes_of(delta, n_planes, plane_stride, n_all, k, k)[at]
            v = v + (rms_norm(d, eps, post_weight) if self.n("POST_NORM") else d)
        if self.n("SCALAR"):
            v = v * scalar
        if rows is None and (self.n("HAS_DELTA") or self.n("SCALAR")):
            residual.copy_(v)
        write_tiles(tiles, rms_norm(v, eps, norm_weight) if self.n("NORM") else v, pitch)

    def glu_rows(
        self, y: Tensor, n_planes: int, plane_stride: int, factor: Tensor, factor_stride: int, factor_offset: int,
        tiles: Tensor, n_rows: int, pitch: int,
    ) -> None:  # fmt: skip
        n = self.n("N")
        gate = planes_of(y, n_planes, plane_stride, n_rows, n, n)
        up = factor.as_strided((n_rows, n), (factor_stride, 1), factor.storage_offset() + factor_offset)
        write_tiles(tiles, OPS["glu"].reference(gate, up, ACTIVATIONS[self.n("GLU")]), pitch)

    def heads_rows(
        self, q: Tensor, q_stride: int, q_planes: int, q_plane_stride: int, k: Tensor | None, k_stride: int,
        k_planes: int, k_plane_stride: int, v: Tensor | None, v_stride: int, v_planes: int, v_plane_stride: int,
        q_weight: Tensor | None, k_weight: Tensor | None, frequencies: Tensor | None, positions: Tensor,
        slots: Tensor, sequence: Tensor, cache: Tensor, table: Tensor, n_table: int, q_out: Tensor, n_rows: int,
    ) -> None:  # fmt: skip
        e, n_heads, j, rotated = self.n("E"), self.n("H"), self.n("J"), self.n("ROTATED")
        storage = {number: name for name, number in STORAGES.items()}[self.n("STORAGE")]
        at = torch.nonzero(sequence[:n_rows] >= 0)[:, 0]

        def heads(y: Tensor, planes: int, plane_stride: int, stride: int, n: int) -> Tensor:
            return planes_of(y, planes, plane_stride, n_rows, stride, n * e)[at].unflatten(-1, (n, e))

        found = self._turned_rows(
            heads(q, q_planes, q_plane_stride, q_stride, n_heads), q_weight, frequencies, positions[at]
        )
        if rotated:
            assert k_weight is not None
            stands = torch.arange(e, device=q.device) % (e // 2) >= rotated // 2
            found = torch.where(stands, found * k_weight, found)
        found = found * (self.f("SCALE") * math.log2(math.e))
        q_out.view(-1)[: n_rows * n_heads * e].view(n_rows, n_heads, e)[at] = found.to(torch.bfloat16)
        if not self.n("OWNS_KV"):
            return
        shape, dtype = page_shape(storage, j, self.n("PAGE"), e, rotated)
        assert (cache.shape[1:], cache.dtype) == (shape, dtype)
        assert k is not None
        keys = values = heads(k, k_planes, k_plane_stride, k_stride, j)
        if not self.n("V_FROM_K"):
            assert v is not None
            values = heads(v, v_planes, v_plane_stride, v_stride, j)
        keys = self._turned_rows(keys, k_weight, frequencies, positions[at])
        if self.n("V_NORM"):
            values = OPS["rms_norm"].reference(values, self.f("EPS"))
        rows_of_table = table.view(-1, n_table).long()
        OPS["cache_write"].reference(
            keys, values, slots[at].long(), sequence[at].long(), rows_of_table, cache, storage, rotated
        )

    def _turned_rows(
        self, heads: Tensor, weight: Tensor | None, frequencies: Tensor | None, positions: Tensor
    ) -> Tensor:
        """Heads [T, n, E] with their norm, turned by their rows' positions."""
        if self.n("QK_NORM"):
            heads = OPS["rms_norm"].reference(heads, self.f("EPS"), weight)
        if self.n("ROPE"):
            assert frequencies is not None
            style = {1: "split", 2: "interleaved"}[self.n("ROPE")]
            heads = OPS["rope"].reference(heads, positions.long(), style, frequencies.tolist())
        return heads

    def product_rows(
        self, tiles: Tensor, w0: Tensor, w1: Tensor | None, w2: Tensor | None, n0: int, n1: int, n2: int, out: Tensor,
        n_rows: int, pitch: int, stride: int, steps: int, splits: int, adds: int,
    ) -> None:  # fmt: skip
        """Parts of K but the first are zero: their sum is what counts."""
        pairs = [(w, n) for w, n in ((w0, n0), (w1, n1), (w2, n2)) if w is not None]
        weight = torch.cat([self.matrix(w)[:n] for w, n in pairs])
        x = read_tiles(tiles, n_rows, weight.shape[1], pitch)
        y = x @ weight.to(torch.bfloat16).float().T
        if self.n("GLU"):
            write_tiles(out, OPS["glu"].reference(y[:, 0::2], y[:, 1::2], ACTIVATIONS[self.n("GLU")]), stride)
            return
        planes = out.as_strided((splits, n_rows, y.shape[1]), (n_rows * stride, stride, 1))
        assert not adds or splits == 1
        if not adds:
            planes.zero_()
        planes[0] += y
