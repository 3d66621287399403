"""The sampler's cuts as torch operations of fixed shape: what a CUDA graph can hold.

Nothing here looks at a value on the host. Candidates are float64 values and their ids, one array each; what a cut takes
away becomes -inf and keeps its place. No value is -0: a radix sort would put it behind 0, which it equals.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64
"""Numbers whose maximum stands for them. As many groups, or candidates, are sorted by one block of threads."""


def descending(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values sorted, and where each stood; equal ones stay in order."""
    found = torch.sort(values, descending=True, stable=True)
    return found.values, found.indices


def highest(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n highest values, descending, and their places; the lower place among equals.

    values [N], N a multiple of GROUP. Few of many: those n lie in the n groups whose maxima come first, maxima in the
    same order, as every group before another holds only lower places. So two short sorts do instead of a long one.
    """
    if n > GROUP or values.shape[0] <= GROUP * GROUP:
        found, order = descending(values)
        return found[:n], order[:n]
    rows = values.view(-1, GROUP)
    _, order = descending(rows.amax(1))
    groups = order[:n].sort().values
    found, order = descending(rows.index_select(0, groups).flatten())
    order = order[:n]
    return found[:n], groups.index_select(0, order // GROUP) * GROUP + order % GROUP


def log_softmax(values: Tensor) -> Tensor:
    """Natural logarithms of the probabilities, in the order of operations of the host's."""
    shifted = values - values.amax(0, keepdim=True)
    return shifted - shifted.exp().sum(0, keepdim=True).log()


def cut_typical(values: Tensor, mass: float) -> None:
    """Keeps the smallest set of this mass whose surprise is nearest to the entropy. values: in the order of ids."""
    log_p = log_softmax(values)
    p = log_p.exp()
    entropy = -(p * log_p).masked_fill(p == 0, 0.0).sum(0, keepdim=True)
    _, order = descending(-(-log_p - entropy).abs())
    running = p.index_select(0, order).cumsum(0)
    is_past = torch.zeros_like(values, dtype=torch.bool)
    is_past.scatter_(0, order[1:], running[:-1] >= running[-1:].clamp(max=mass))
    values.masked_fill_(is_past, -torch.inf)


def cut_top_p(values: Tensor, mass: float) -> None:
    """Keeps the smallest set of this mass, highest first. values descend."""
    running = (values - values[:1]).exp().cumsum(0)
    values[1:].masked_fill_(running[:-1] >= running[-1:] * mass, -torch.inf)


def cut_below(values: Tensor, log_share: float) -> None:
    """min-p: keeps all with at least a share of the largest probability. values descend."""
    values.masked_fill_(values < values[:1] + log_share, -torch.inf)


def cut_top_choices(values: Tensor, ids: Tensor, threshold: float, is_on: Tensor) -> None:
    """XTC: of those with this probability or more only the least probable stays, the lowest id among equals.

    is_on: bool [1], whether it acts at all.
    """
    p = log_softmax(values).exp()
    is_top = (p >= threshold) & (p > 0)
    least = p.masked_fill(~is_top, torch.inf).amin(0, keepdim=True)
    stays = ids.masked_fill(~(is_top & (p == least)), torch.iinfo(torch.int64).max).amin(0, keepdim=True)
    values.masked_fill_(is_top & (ids != stays) & is_on, -torch.inf)


def cut_surprising(values: Tensor, bits: Tensor, ln_2: Tensor) -> None:
    """Mirostat 2: keeps all whose surprise -log2 p is at most ``bits``, and the first, the best one. values descend."""
    is_kept = log_softmax(values) / ln_2 >= -bits
    is_kept[:1].fill_(True)
    values.masked_fill_(~is_kept, -torch.inf)
