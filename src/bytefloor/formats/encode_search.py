"""Scales for groups of weights, searched for: what a K-quant's rounding would leave is what is made small.

Everything here works on columns: x and its importances w are float32 [G, U], U groups of G weights each, so that sums
run over whole rows of memory. The error is sum w (x - value)^2. A rounding with some trial scale gives codes; for
those codes the best scale is a quotient of sums. The trial whose codes leave the least error wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SIGNED_TRIALS = tuple(0.1 * step for step in range(-9, 10))
"""Trial scales give the largest weight a code that is beyond the last one, or short of it, by so much."""


def total(columns: Tensor) -> Tensor:
    """Sums [U] of [G, U], G a power of two, by halves: the same bits whatever stands in the other columns."""
    while len(columns) > 1:
        half = len(columns) // 2
        columns = columns[:half] + columns[half:]
    return columns[0]


def fit_signed(x: Tensor, w: Tensor, levels: int, trials: Sequence[float] = SIGNED_TRIALS) -> Tensor:
    """Scales [U] for value = scale * code, code from -levels to levels - 1; 0 for a group of zeros.

    The weight of largest magnitude gets the code of largest magnitude, so a scale may be negative.
    """
    peak = x.gather(0, x.abs().argmax(dim=0, keepdim=True))
    # Beside a peak this small nothing is left that fp16 could hold.
    unit = torch.where(peak.abs() < 1e-30, 0.0, peak.reciprocal())
    wx, codes, scratch = w * x, torch.empty_like(x), torch.empty_like(x)
    best, scale = torch.zeros_like(peak[0]), torch.zeros_like(peak[0])
    for trial in trials:
        torch.mul(x, unit * -(levels + trial), out=codes).round_().clamp_(-levels, levels - 1)
        best, scale = _keep_better(best, scale, wx, w, codes, scratch)
    return scale


def fit_table(x: Tensor, w: Tensor, table: Tensor, trials: Sequence[float]) -> Tensor:
    """Scales [U] for value = scale * table[code], the table ascending whole numbers, the first of largest magnitude.

    trials: by how much the largest weight lies beyond that first value.
    """
    peak = x.gather(0, x.abs().argmax(dim=0, keepdim=True))
    unit = torch.where(peak.abs() < 1e-30, 0.0, peak.reciprocal())
    # Whole numbers have their midpoints at halves: the half steps below each one decide, and can be looked up.
    reach = 2 * int(-table[0]) + 2
    halves = torch.arange(-reach, reach + 1, device=x.device) / 2 + 0.25
    values_by_half = table[nearest(halves, table)]
    wx, scratch = w * x, torch.empty_like(x)
    best, scale = torch.zeros_like(peak[0]), torch.zeros_like(peak[0])
    for trial in trials:
        steps = torch.mul(x, unit * (2 * (table[0] + trial)), out=scratch).floor_().clamp_(-reach, reach).add_(reach)
        values = torch.index_select(values_by_half, 0, steps.int().view(-1)).view_as(x)
        best, scale = _keep_better(best, scale, wx, w, values, scratch)
    return scale


def nearest(x: Tensor, table: Tensor) -> Tensor:
    """int64 codes of the nearest values of an ascending table."""
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2)


def _keep_better(
    best: Tensor, scale: Tensor, wx: Tensor, w: Tensor, values: Tensor, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """What these unscaled values explain of sum w x^2 with the scale that is best for them, where it is more."""
    along = total(torch.mul(wx, values, out=scratch))
    square = total(torch.mul(w, values, out=scratch).mul_(values))
    found = along / square  # NaN where all are zero: no comparison with it holds
    explained = found * along
    is_better = explained > best
    return torch.where(is_better, explained, best), torch.where(is_better, found, scale)


def fit_ranged(x: Tensor, w: Tensor, n_steps: int, trials: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Scales and minimums [U], neither negative, for value = scale * code - minimum, code from 0 to n_steps.

    trials: how many steps more (or fewer) than n_steps the range of a group is cut into.
    """
    low = x.amin(dim=0).clamp_(max=0)
    span = x.amax(dim=0) - low
    unit = torch.where(span < 1e-30, 0.0, span.reciprocal())
    shifted, wx = x - low, w * x
    sum_w, sum_x, sum_xx = total(w), total(wx), total(wx * x)
    codes, scratch = torch.empty_like(x), torch.empty_like(x)
    best, scale, offset = torch.full_like(low, torch.inf), span / n_steps, low
    for trial in trials:
        torch.mul(shifted, unit * (n_steps + trial), out=codes).round_().clamp_(0, n_steps)
        along = total(torch.mul(wx, codes, out=scratch))
        sum_q = total(torch.mul(w, codes, out=scratch))
        sum_qq = total(scratch.mul_(codes))
        determinant = sum_w * sum_qq - sum_q * sum_q
        found = (sum_w * along - sum_x * sum_q) / determinant
        start = (sum_qq * sum_x - sum_q * along) / determinant
        is_above = start > 0  # no minimum can be negative: the scale alone then
        found = torch.where(is_above, along / sum_qq, found)
        start = torch.where(is_above, 0.0, start)
        error = sum_xx - found * along - start * sum_x
        # Codes that are all alike leave a determinant of rounding errors, and say nothing about two numbers.
        is_better = (error < best) & (determinant > 1e-5 * sum_w * sum_qq)
        best = torch.where(is_better, error, best)
        scale = torch.where(is_better, found, scale)
        offset = torch.where(is_better, start, offset)
    return scale, -offset


def fit_positive(x: Tensor, w: Tensor, n_steps: int) -> Tensor:
    """Scales [U] for value = scale * code, code from 0 to n_steps, of numbers that are not negative."""
    peak = x.amax(dim=0)
    unit = torch.where(peak < 1e-30, 0.0, peak.reciprocal())
    wx, codes, scratch = w * x, torch.empty_like(x), torch.empty_like(x)
    best, scale = torch.zeros_like(peak), torch.zeros_like(peak)
    for trial in (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9):
        torch.mul(x, unit * (n_steps + trial), out=codes).round_().clamp_(0, n_steps)
        best, scale = _keep_better(best, scale, wx, w, codes, scratch)
    return scale
