"""Encoders of Q4_0 Q4_1 Q5_0 Q5_1 for columns of known importance: scales are searched for, where the formats' own
tool, and ``legacy`` with it, takes those that the extremes of a block give."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bytefloor.formats import checks
from bytefloor.formats.encode_kquants import Layout, columns_of, encode_blocks, rows_of
from bytefloor.formats.encode_lookups import weigh
from bytefloor.formats.encode_search import fit_ranged, fit_signed

BLOCK = 32
_RANGED_TRIALS = tuple(step / 10 for step in range(-9, 10))


def encode_weighted(weights: Tensor, importance: Tensor, *, name: str) -> dict[str, Tensor]:
    """float32 [N, K] and importances [K] -> blocks. K must be a multiple of 32."""
    values = checks.encodable(name, weights, BLOCK)
    return {"blocks": encode_blocks(name, values, importance, BLOCK, LAYOUTS[name], weigh)}


def _pack_signed(x: Tensor, w: Tensor, levels: int) -> tuple[Tensor, ...]:
    columns = columns_of(x, BLOCK)
    half = fit_signed(columns, columns_of(w, BLOCK), levels).half()
    scale = half.float()[None]
    codes = torch.where(scale == 0, 0.0, columns / scale).round_().clamp_(-levels, levels - 1).add_(levels)
    return half[:, None], *pack_codes(rows_of(codes, BLOCK).to(torch.uint8), levels == 16)


def _pack_ranged(x: Tensor, w: Tensor, n_steps: int) -> tuple[Tensor, ...]:
    columns = columns_of(x, BLOCK)
    scale, minimum = (part.half() for part in fit_ranged(columns, columns_of(w, BLOCK), n_steps, _RANGED_TRIALS))
    step, start = scale.float()[None], minimum.float()[None]
    codes = torch.where(step == 0, 0.0, (columns + start) / step).round_().clamp_(0, n_steps)
    return scale[:, None], -minimum[:, None], *pack_codes(rows_of(codes, BLOCK).to(torch.uint8), n_steps == 31)


def pack_codes(codes: Tensor, has_fifth: bool) -> tuple[Tensor, ...]:
    """uint8 [U, 32] of 4 or 5 bits -> the fifth bits [U, 4], where there are any, and nibbles [U, 16]."""
    low, high = (codes & 15).view(-1, 2, 16).unbind(1)
    nibbles = low | high << 4
    if not has_fifth:
        return (nibbles,)
    places = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=codes.device)
    return ((codes >> 4).view(-1, 4, 8) * places).sum(dim=2, dtype=torch.uint8), nibbles


LAYOUTS = {
    "Q4_0": Layout(18, (0,), partial(_pack_signed, levels=8)),
    "Q4_1": Layout(20, (0, 2), partial(_pack_ranged, n_steps=15)),
    "Q5_0": Layout(22, (0,), partial(_pack_signed, levels=16)),
    "Q5_1": Layout(24, (0, 2), partial(_pack_ranged, n_steps=31)),
}
