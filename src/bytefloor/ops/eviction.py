"""eviction: which positions of a prompt a layer without a window keeps of each key/value head, and their move to the
front of its pages.

The last W rows of the prompt choose (SnapKV, arXiv 2404.14469). q float32 [W, H, E]: their queries, as attention gets
them; keys float32 [J, S, E]: of all S slots of the prompt, those rows' own last.

    share[i, h, s] = softmax over s <= S - W + i of scale q[i, h] . keys[h // (H / J), s]
    votes[j, s]    = sum of share[i, h, s] over all i and the query heads h of j, for s < S - W
    smooth[j, s]   = (votes[j, s - 3] + .. + votes[j, s + 3]) / 7; votes of slots that there are none of are 0

Kept are the ``n_kept - W`` slots with the largest smooth[j], the lower one first among equals, and the last W. Each
head has its own, and all have as many, in ascending order: keys have been turned by their positions before they were
cached, so that a slot need not be one. Approximate as attention is, up to the choice, which is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.ops import pages as layout

OBSERVED = 32
"""Rows that choose: W."""
SMOOTHED = 7
"""Slots that a mean is taken over: what stands beside a word that is attended to belongs to it."""


def smooth_votes(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[J, S - W] of q [W, H, E] and keys [J, S, E]."""
    n_rows, n_slots = q.shape[0], keys.shape[1]
    grouped = q.unflatten(1, (keys.shape[0], -1)).permute(1, 2, 0, 3)
    scores = grouped @ keys[:, None].transpose(-1, -2) * scale
    last_visible = torch.arange(n_slots - n_rows, n_slots, device=q.device)
    is_hidden = torch.arange(n_slots, device=q.device) > last_visible[:, None]
    shares = scores.masked_fill_(is_hidden, float("-inf")).softmax(-1)
    votes = shares[..., : n_slots - n_rows].sum((1, 2))
    return torch.nn.functional.avg_pool1d(votes[None], SMOOTHED, stride=1, padding=SMOOTHED // 2)[0]


def kept_slots(q: Tensor, keys: Tensor, scale: float, n_kept: int) -> Tensor:
    """int64 [J, n_kept], each row ascending. q [W, H, E], keys [J, S, E]; W < n_kept <= S."""
    n_rows, n_slots = q.shape[0], keys.shape[1]
    order = smooth_votes(q, keys, scale).sort(dim=-1, descending=True, stable=True).indices
    best = order[:, : n_kept - n_rows].sort(-1).values
    last = torch.arange(n_slots - n_rows, n_slots, device=q.device).expand(best.shape[0], -1)
    return torch.cat((best, last), dim=-1)


def move_to_front(cache: Tensor, table: Tensor, kept: Tensor, head_size: int) -> None:
    """Slot kept[j, i] of head j becomes slot i, as it is: no value is rounded again. All else is left.

    cache: a layer's pages, of floats or of codes with their scales; table int64 [n_table]: the sequence's pages, none
    of them twice; kept int64 [J, N].
    """
    page_size = layout.page_size_of(cache, head_size)
    heads = torch.arange(kept.shape[0], device=kept.device)[:, None]
    front = torch.arange(kept.shape[1], device=kept.device)
    parts = layout.codes_and_scales(cache, head_size) if layout.holds_codes(cache) else (cache,)
    for part in parts:
        # Read as a whole before anything is written: a page may give and take.
        moved = part[table[kept // page_size], :, heads, kept % page_size]
        part[table[front // page_size], :, heads, front % page_size] = moved
