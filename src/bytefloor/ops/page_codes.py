"""Pages that are kept in codes as a whole: keys of 4 bits, values of 2 (``k4v2``).

The method is KVarN's (arXiv 2606.03458). A tile is what one head keeps of a page, [PAGE, E], lanes turned before
(``rotate.py``). It is divided by a factor for each position and one for each lane, again and again, until it has
deviation 1 along both; the factors of one of the axes are kept, those of the other end up in the scales of codes. A
key's codes have a scale and a zero for each lane (over the positions of the page), and positions have a factor; a
value's codes have a scale and a zero for each position (over its lanes), and lanes have a factor:

    K[t, e] = (code[t, e] * scale[e] + zero[e]) * factor[t]     code 0 .. 15
    V[t, e] = (code[t, e] * scale[t] + zero[t]) * factor[e]     code 0 .. 3

A page is bytes [..., 1, J, n]: of each head the codes of K, two a byte, those of V, four a byte (lower lanes in lower
bits), position after position; then in bf16 scale and zero of K's lanes, K's factors, V's factors, scale and zero of
V's positions. Nothing depends on anything outside the tile. All is worked out in float64: sums in another order move
next to no code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.errors import UnsupportedError

CODED = "k4v2"
"""The storage's name."""
K_BITS, V_BITS = 4, 2
ROUNDS = 8
"""How often both axes are brought to deviation 1, as the authors have it. A KL shows no difference to one round."""
ONE_VALUE = 1e-12
"""Of the sum of squares: a variance below it is what rounding leaves of none."""
LANES, POSITIONS = -1, -2


def n_page_bytes(page_size: int, head_size: int) -> int:
    """Of K and V of one head. UnsupportedError for heads whose codes do not fill bytes."""
    if head_size % 4:
        raise UnsupportedError(f"{CODED}: heads of {head_size} lanes, expected a multiple of 4: a byte has four codes")
    return sum(_sizes(page_size, head_size))


def _sizes(page_size: int, head_size: int) -> tuple[int, ...]:
    """Bytes of the parts, in order."""
    codes = (page_size * head_size * K_BITS // 8, page_size * head_size * V_BITS // 8)
    lanes, positions = 2 * head_size, 2 * page_size
    return (*codes, lanes, lanes, positions, lanes, positions, positions)


def encode(pages: Tensor) -> Tensor:
    """Bytes [..., 1, J, n] of values [..., 2, J, PAGE, E], K and V, that bf16 holds. A tile with one that is not
    finite is NaN as a whole."""
    k, v = pages.double().unbind(-4)
    k_codes, k_factor, k_scale, k_zero = _encode_tile(k, POSITIONS, K_BITS)
    v_codes, v_factor, v_scale, v_zero = _encode_tile(v, LANES, V_BITS)
    codes = [_squeeze(k_codes, K_BITS), _squeeze(v_codes, V_BITS)]
    scales = [part.flatten(-2).bfloat16() for part in (k_scale, k_zero, k_factor, v_factor, v_scale, v_zero)]
    return torch.cat([*codes, *(part.view(torch.uint8) for part in scales)], dim=-1).unsqueeze(-3)


def decode(data: Tensor, head_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., 2, J, PAGE, E] of bytes [..., 1, J, n]."""
    # Beside the codes there are three numbers of bf16 for each lane and each position.
    page_size = 8 * (data.shape[-1] - 6 * head_size) // ((K_BITS + V_BITS) * head_size + 8 * 6)
    parts = data.squeeze(-3).split(_sizes(page_size, head_size), dim=-1)
    k, v = (_spread(part, bits, head_size).to(dtype) for part, bits in zip(parts, (K_BITS, V_BITS), strict=False))
    k_scale, k_zero, k_factor, v_factor, v_scale, v_zero = (part.view(torch.bfloat16).to(dtype) for part in parts[2:])
    k = k.mul_(k_scale[..., None, :]).add_(k_zero[..., None, :]).mul_(k_factor[..., None])
    v = v.mul_(v_scale[..., None]).add_(v_zero[..., None]).mul_(v_factor[..., None, :])
    return torch.stack((k, v), dim=-4)


def _encode_tile(x: Tensor, over: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [..., PAGE, E] of tiles, and as they are stored a factor for each place along ``over``, a scale and a zero
    for each line that runs along it. Codes are chosen against what is stored."""
    largest = (1 << bits) - 1
    is_finite = x.isfinite().all(POSITIONS, keepdim=True).all(LANES, keepdim=True)
    x = torch.where(is_finite, x, 0)
    factor = _stored(_even_factor(x) if over == LANES else _even_factor(x.mT).mT)
    factor = torch.where(factor > 0, factor, 1)  # below what bf16 has there is nothing to divide
    even = x / factor
    low, high = even.amin(over, keepdim=True), even.amax(over, keepdim=True)
    zero, scale = _stored(low), _stored((high - low) / largest)
    codes = torch.where(scale > 0, (even - zero) / scale, 0).round().clamp(0, largest)
    return codes.to(torch.uint8), factor, torch.where(is_finite, scale, torch.nan), zero


def _even_factor(x: Tensor) -> Tensor:
    """What each column [..., 1, m] of x [..., n, m] is divided by, where columns and rows take turns to be brought to
    deviation 1. Sums over x and its squares, weighted, say all that this needs."""
    rows, columns = (x, x * x), (x.mT.contiguous(), (x * x).mT.contiguous())
    of_rows = torch.ones_like(x[..., :1])
    for _ in range(ROUNDS):
        of_columns = _weights(*columns, of_rows)
        of_rows = _weights(*rows, of_columns)
    return 1 / of_columns.mT


def _weights(x: Tensor, squares: Tensor, w: Tensor) -> Tensor:
    """1 / the deviation of each row of x [..., n, m] times w [..., m, 1], [..., n, 1]; 1 for rows of one value."""
    m, square_sums = x.shape[-1], squares @ (w * w)
    variance = (square_sums - (x @ w).square() / m) / (m - 1)
    return torch.where(variance > ONE_VALUE * square_sums, variance.rsqrt(), 1)


def _stored(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _squeeze(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., PAGE, E] -> [..., PAGE * E * bits / 8]: 8 / bits neighbours share a byte."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    together = (codes.unflatten(-1, (-1, len(shifts))) << shifts).sum(-1, dtype=torch.uint8)
    return together.flatten(-2)


def _spread(data: Tensor, bits: int, head_size: int) -> Tensor:
    """The way back: uint8 [..., PAGE, E]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return ((data[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2).unflatten(-1, (-1, head_size))
