"""Encoders of the GGUF types with scales of scales: Q2_K Q3_K Q4_K Q5_K Q6_K.

A group's scale (and minimum) is searched for with each weight counted by its importance; the scales of a block are
then rounded to codes themselves, with a scale that is searched for in the same way, and the codes of the weights are
chosen against the scales as stored. Without importances from outside large weights count more, as is usual for these
types: they move outputs more, and columns with large weights tend to see large activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bytefloor.errors import NumericalError
from bytefloor.formats import checks, chunks
from bytefloor.formats.encode_search import fit_positive, fit_ranged, fit_signed, total

BLOCK = 256
PIECE_BYTES = 1 << 15
"""Of the result at a time, so that the dozen float arrays of a search stay in a core's cache."""
LARGEST = 1e9
"""Weights that no type here can hold; below it no sum of a search overflows float32."""
Pack = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Layout(NamedTuple):
    """What an encoder needs to know: bytes of a block, the offsets of its fp16 scales, x and w [U, 256] -> bytes."""

    block_bytes: int
    halves: tuple[int, ...]
    pack: Pack


def encode(weights: Tensor, importance: Tensor | None = None, *, name: str) -> dict[str, Tensor]:
    """float32 [N, K] -> blocks uint8 [N, bytes]. importance: float32 [K], how much a column's squared error counts.

    Raises ShapeError where K is no multiple of 256, NumericalError for what is not finite or too large for fp16 scales.
    """
    layout = LAYOUTS[name]
    values = checks.encodable(name, weights, BLOCK)
    return {"blocks": encode_blocks(name, values, importance, BLOCK, layout, _own_importance(name))}


def encode_blocks(
    name: str,
    values: Tensor,
    importance: Tensor | None,
    block: int,
    layout: Layout,
    weigh: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """The blocks of float32 [N, K], a piece at a time. weigh: x [U, block] and importances or None -> w."""
    n_rows, n_columns = values.shape
    _refuse_rows(name, (values.abs() > LARGEST).any(dim=1))
    table = None
    if importance is not None:
        checks.require_shape(name, "importance", importance, (n_columns,))
        table = importance.to(device=values.device, dtype=torch.float32).view(-1, block)
    places = torch.arange(n_columns // block, device=values.device).repeat(n_rows)

    def unpack(out: Tensor, x: Tensor, place: Tensor) -> None:
        w = weigh(x, None if table is None else table[place])
        torch.cat([part.view(torch.uint8).view(len(x), -1) for part in layout.pack(x, w)], dim=1, out=out)

    out = torch.empty(n_rows, n_columns // block * layout.block_bytes, dtype=torch.uint8, device=values.device)
    chunks.fill(name, out, layout.block_bytes, (values.view(-1, block), places), unpack, PIECE_BYTES)
    _refuse_overflow(name, out, layout)
    return out


def _refuse_overflow(name: str, out: Tensor, layout: Layout) -> None:
    blocks = out.view(len(out), -1, layout.block_bytes)
    for offset in layout.halves:
        _refuse_rows(name, ((blocks[..., offset + 1] & 0x7C) == 0x7C).any(dim=1))


def _refuse_rows(name: str, is_bad: Tensor) -> None:
    if is_bad.any():
        row = int(is_bad.nonzero()[0, 0])
        raise NumericalError(f"{name}: a scale as fp16 cannot be stored: NaN or infinite in row {row}")


def _own_importance(name: str) -> Callable[[Tensor, Tensor | None], Tensor]:
    return partial(_weigh, kind=name)


def _weigh(x: Tensor, importance: Tensor | None, kind: str) -> Tensor:
    if importance is not None:
        if kind == "Q6_K":
            return importance
        spread = 2 * x.square().mean(dim=1, keepdim=True)
        return importance * (spread + x.square()).sqrt_()
    magnitude = x.abs()
    if kind in ("Q3_K", "Q6_K"):
        return magnitude * (4 * x.square().mean(dim=1, keepdim=True) + x.square()).sqrt_()
    groups = magnitude.view(-1, 16 if kind == "Q2_K" else 32)
    # In Q2_K next to nothing, but zeros beside one large weight must count for something.
    share = 1 / 16 if kind == "Q2_K" else 1.0
    return (groups + share * groups.square().mean(dim=1, keepdim=True).sqrt_()).view_as(x)


def columns_of(blocks: Tensor, group: int) -> Tensor:
    """[U, block] -> [group, U * block / group], contiguous: a group is a column, those of a block side by side."""
    return blocks.reshape(-1, group).t().contiguous()


def rows_of(columns: Tensor, block: int) -> Tensor:
    """The inverse of columns_of."""
    return columns.t().reshape(-1, block)


def _half(scale: Tensor) -> tuple[Tensor, Tensor]:
    """A scale as fp16, and as the float32 that this means."""
    half = scale.half()
    return half, half.float()


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, x / scale)


# --- types with minimums: value = d sc code - dmin mn


class _Ranged(NamedTuple):
    """d, dmin as fp16 [U, 1]; codes of scales and minimums uint8 [U, groups]; codes of weights uint8 [U, 256]."""

    d: Tensor
    dmin: Tensor
    scales: Tensor
    minimums: Tensor
    codes: Tensor


def _ranged(x: Tensor, w: Tensor, group: int, n_steps: int, n_scale_steps: int, trials: range) -> _Ranged:
    columns, weights = columns_of(x, group), columns_of(w, group)
    scale, minimum = fit_ranged(columns, weights, n_steps, [trial / 10 for trial in trials])
    by_block = total(weights).view(len(x), -1)
    dmin, minimums = _scale_codes(minimum.view(len(x), -1), by_block, n_scale_steps)
    columns = columns + (dmin.float() * minimums).view(1, -1)
    # What rounding did to the minimum the scale can partly make good.
    codes = _divide(columns, scale[None]).round_().clamp_(0, n_steps)
    along, square = total(weights * codes * columns), total(weights * codes * codes)
    scale = torch.where(square == 0, scale, along / square).clamp_(min=0)
    d, scales = _scale_codes(scale.view(len(x), -1), square.view(len(x), -1), n_scale_steps)
    step = (d.float() * scales).view(1, -1)
    codes = _divide(columns, step).round_().clamp_(0, n_steps)
    return _Ranged(d, dmin, scales.to(torch.uint8), minimums.to(torch.uint8), rows_of(codes, BLOCK).to(torch.uint8))


def _scale_codes(scales: Tensor, weights: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
    """A scale for non-negative scales [U, groups] as fp16 [U, 1], and their codes as float32."""
    found = fit_positive(scales.t().contiguous(), weights.t().contiguous(), n_steps)
    half, whole = _half(found[:, None])
    return half, _divide(scales, whole).round_().clamp_(0, n_steps)


def _pack_six_bits(scales: Tensor, minimums: Tensor) -> Tensor:
    """12 bytes from eight 6-bit scales and eight 6-bit minimums; kquants says where each bit lies."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minimums[:, :4] | minimums[:, 4:] >> 4 << 6
    return torch.cat((first, second, scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4), dim=1)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Four chunks of 32 bytes: low nibbles are one group, high nibbles the next."""
    low, high = (codes & 15).view(-1, 4, 2, 32).unbind(2)
    return low | high << 4


def _pack_crumbs(codes: Tensor) -> Tensor:
    """64 bytes of 2-bit codes: field i of byte j of half h is element 128 h + 32 i + j."""
    fields = (codes & 3).view(-1, 2, 4, 32)
    return fields[:, :, 0] | fields[:, :, 1] << 2 | fields[:, :, 2] << 4 | fields[:, :, 3] << 6


def _pack_bits(bits: Tensor) -> Tensor:
    """32 bytes: bit g of byte j is element 32 g + j."""
    planes = bits.view(-1, 8, 32)
    packed = planes[:, 0].clone()
    for i in range(1, 8):
        packed |= planes[:, i] << i
    return packed


def _pack_q2_k(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    found = _ranged(x, w, 16, 3, 15, range(-7, 10))
    return found.scales | found.minimums << 4, _pack_crumbs(found.codes).contiguous(), found.d, found.dmin


def _pack_q4_k(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    found = _ranged(x, w, 32, 15, 63, range(-9, 10))
    return found.d, found.dmin, _pack_six_bits(found.scales, found.minimums), _pack_nibbles(found.codes)


def _pack_q5_k(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    found = _ranged(x, w, 32, 31, 63, range(-9, 10))
    scales = _pack_six_bits(found.scales, found.minimums)
    return found.d, found.dmin, scales, _pack_bits(found.codes >> 4), _pack_nibbles(found.codes)


# --- types without: value = d sc code, the scales signed


def _signed(x: Tensor, w: Tensor, levels: int, scale_levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """d as fp16 [U, 1], scale codes int8 [U, 16], codes uint8 [U, 256] with ``levels`` added."""
    columns, weights = columns_of(x, 16), columns_of(w, 16)
    scale = fit_signed(columns, weights, levels).view(len(x), 16)
    by_block = total(weights).view(len(x), 16)
    half, d = _half(fit_signed(scale.t().contiguous(), by_block.t().contiguous(), scale_levels)[:, None])
    scales = _divide(scale, d).round_().clamp_(-scale_levels, scale_levels - 1)
    codes = _divide(columns, (d * scales).view(1, -1)).round_().clamp_(-levels, levels - 1).add_(levels)
    return half, scales.to(torch.int8), rows_of(codes, BLOCK).to(torch.uint8)


def _pack_q3_k(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    d, scales, codes = _signed(x, w, 4, 32)
    six = (scales + 32).view(torch.uint8)
    low = six[:, :8] & 15 | (six[:, 8:] & 15) << 4
    high = (six >> 4).view(-1, 4, 4)
    top = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    return _pack_bits(codes >> 2), _pack_crumbs(codes).contiguous(), low, top, d


def _pack_q6_k(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    d, scales, codes = _signed(x, w, 32, 128)
    low, high = (codes & 15).view(-1, 2, 2, 64).unbind(2)
    return (low | high << 4).contiguous(), _pack_crumbs(codes >> 4).contiguous(), scales, d


LAYOUTS = {
    "Q2_K": Layout(84, (80, 82), _pack_q2_k),
    "Q3_K": Layout(110, (108,), _pack_q3_k),
    "Q4_K": Layout(144, (0, 2), _pack_q4_k),
    "Q5_K": Layout(176, (0, 2), _pack_q5_k),
    "Q6_K": Layout(210, (208,), _pack_q6_k),
}
