"""Encoders of two GGUF types whose codes stand for values of a table: IQ4_NL and MXFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.formats import checks, minifloat
from bytefloor.formats.encode_kquants import Layout, columns_of, encode_blocks, rows_of
from bytefloor.formats.encode_search import fit_table, nearest

BLOCK = 32
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TRIALS = tuple(float(step) for step in range(-7, 8))
_SCALE_BIAS = 127 - 2
"""E8M0 code of a block whose largest magnitude is in [1, 2): 4 to 8 times its scale, E2M1 reaching to 6."""


def encode_iq4_nl(weights: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
    """float32 [N, K] -> blocks; scales searched for as those of K-quants are. K must be a multiple of 32."""
    values = checks.encodable("IQ4_NL", weights, BLOCK)
    layout = Layout(18, (0,), _pack_iq4_nl)
    return {"blocks": encode_blocks("IQ4_NL", values, importance, BLOCK, layout, weigh)}


def weigh(x: Tensor, importance: Tensor | None) -> Tensor:
    """Importances [U, 32] of weights in blocks of 32: x^2 where nothing else is known."""
    square = x.square()
    if importance is None:
        return square
    # The mean magnitude, not the mean square: one outlier among 32 must not make the others count as much as itself.
    return importance * (x.abs().mean(dim=1, keepdim=True).square() + square).sqrt_()


def _pack_iq4_nl(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=x.device)
    columns = columns_of(x, BLOCK)
    half = fit_table(columns, columns_of(w, BLOCK), table, _TRIALS).half()
    scale = half.float()[None]
    codes = nearest(torch.where(scale == 0, 0.0, columns / scale), table).to(torch.uint8)
    low, high = rows_of(codes, BLOCK).view(-1, 2, 16).unbind(1)
    return half[:, None], low | high << 4


def encode_mxfp4(weights: Tensor) -> dict[str, Tensor]:
    """float32 [N, K] -> blocks, byte for byte those of the gguf package: a tie goes to the smaller magnitude."""
    groups = checks.encodable("MXFP4", weights, BLOCK).view(-1, BLOCK)
    largest = groups.abs().amax(dim=1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 1
    codes = torch.where(largest > 0, exponent + _SCALE_BIAS, 0).clamp_(0, 254)
    scales = torch.ldexp(torch.ones_like(largest), codes - 127)
    magnitudes = torch.tensor(minifloat.E2M1[:8], device=groups.device)
    found = nearest(groups.abs() / scales, magnitudes).to(torch.uint8)
    found |= ((groups < 0) & (found > 0)).to(torch.uint8) << 3  # code 8, another zero, is never written
    low, high = found.view(-1, 2, 16).unbind(1)
    blocks = torch.cat((codes.to(torch.uint8), low | high << 4), dim=1)
    return {"blocks": blocks.view(weights.shape[0], -1)}
