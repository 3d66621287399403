"""What a prompt keeps: each formula once more in plain numpy, in float64; and the move, for all a page can hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bytefloor.ops.attention import gather_band, reader
from bytefloor.ops.cache_write import reference as cache_write
from bytefloor.ops.eviction import OBSERVED, SMOOTHED, kept_slots, move_to_front, smooth_votes
from bytefloor.ops.pages import codes_and_scales, page_shape
from cut_prompts import plain_votes


@pytest.mark.parametrize(("n_heads", "n_kv"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("n_slots", [33, 36, 90])
def test_votes_and_choice_are_the_formulas(n_heads: int, n_kv: int, n_slots: int) -> None:
    generator = torch.Generator().manual_seed(n_slots + n_heads)
    q = torch.randn(OBSERVED, n_heads, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(n_kv, n_slots, 8, generator=generator, dtype=torch.float64)
    expected = plain_votes(q.numpy(), keys.numpy(), 0.9)
    assert SMOOTHED == 7
    np.testing.assert_allclose(smooth_votes(q, keys, 0.9).numpy(), expected, rtol=1e-12)
    for n_kept in {33, 34, min(60, n_slots), n_slots}:
        found = kept_slots(q, keys, 0.9, n_kept)
        assert found.dtype == torch.int64
        for j in range(n_kv):
            best = sorted(range(n_slots - OBSERVED), key=lambda slot: (-expected[j, slot], slot))[: n_kept - OBSERVED]
            assert found[j].tolist() == [*sorted(best), *range(n_slots - OBSERVED, n_slots)]


def test_equals_are_kept_from_the_front() -> None:
    """All earlier slots look the same, so votes differ at the ends alone, where a mean has slots that are not there."""
    q, keys = torch.ones(OBSERVED, 2, 4), torch.ones(1, 80, 4)
    kept = kept_slots(q, keys, 0.5, OBSERVED + 5)
    assert kept[0, :5].tolist() == [3, 4, 5, 6, 7]


def test_heads_of_a_group_vote_together_and_others_do_not() -> None:
    """Slot 10 is what the heads of the first key/value head look for, slot 30 what those of the second do."""
    q, keys = torch.zeros(OBSERVED, 4, 4), torch.zeros(2, 70, 4)
    q[:, :2, 0] = q[:, 2:, 1] = 9.0
    keys[0, 10, 0] = keys[1, 30, 1] = 9.0
    keys[0, 30, 1] = keys[1, 10, 0] = 9.0
    kept = kept_slots(q, keys, 1.0, OBSERVED + 7)
    assert kept[0, :7].tolist() == [*range(7, 14)]
    assert kept[1, :7].tolist() == [*range(27, 34)]


def test_rows_see_nothing_behind_them() -> None:
    """A last key that would take all of every row's attention takes that of its own row alone."""
    generator = torch.Generator().manual_seed(5)
    q = torch.rand(OBSERVED, 1, 4, generator=generator, dtype=torch.float64) + 1
    keys = torch.rand(1, 50, 4, generator=generator, dtype=torch.float64)
    keys[0, -1] = 100.0
    without = smooth_votes(q[:-1], keys[:, :-1], 1.0)
    torch.testing.assert_close(smooth_votes(q, keys, 1.0), without, rtol=1e-12, atol=0)
    assert without.sum() > 5


PAGE, E, J, N = 4, 8, 2, 23
TABLE = torch.tensor([5, 2, 7, 1, 3, 6])


def filled(storage: str, rotated: int) -> Tensor:
    """Pages that hold N positions through TABLE, and NaN or its like wherever nothing was written."""
    shape, dtype = page_shape(storage, J, PAGE, E, rotated)
    dtype = dtype if storage in ("int8", "fp8") else torch.float32
    cache = torch.full((9, *shape), 0xFF if dtype == torch.uint8 else torch.nan, dtype=dtype)
    k, v = torch.randn(2, N, J, E, generator=torch.Generator().manual_seed(3))
    sequence = torch.zeros(N, dtype=torch.int64)
    cache_write(k, v, torch.arange(N), sequence, TABLE[None], cache, storage, rotated)
    return cache


@pytest.mark.parametrize(("storage", "rotated"), [("float32", 0), ("bf16", 0), ("bf16", 4), ("int8", 0), ("fp8", 0)])
@pytest.mark.parametrize("n_kept", [8, 9, N])
def test_what_is_moved_is_what_was_there_bit_for_bit(storage: str, rotated: int, n_kept: int) -> None:
    """Keys, values, lanes that turn, codes and scales alike; of each head its own slots; no other page is touched."""
    cache = filled(storage, rotated)
    before = cache.clone()
    generator = torch.Generator().manual_seed(n_kept)
    kept = torch.stack([torch.randperm(N, generator=generator)[:n_kept].sort().values for _ in range(J)])
    assert n_kept == N or not torch.equal(kept[0], kept[1])
    move_to_front(cache, TABLE, kept, E)

    def parts(pages: Tensor) -> tuple[Tensor, ...]:
        return codes_and_scales(pages, E) if pages.dtype == torch.uint8 else (pages,)

    for found, was in zip(parts(cache), parts(before), strict=True):
        for j in range(J):
            for to, slot in enumerate(kept[j].tolist()):
                here = found[TABLE[to // PAGE], :, j, to % PAGE]
                there = was[TABLE[slot // PAGE], :, j, slot % PAGE]
                assert torch.equal(here, there)
        others = [page for page in range(9) if page not in TABLE[: -(-n_kept // PAGE)]]
        assert torch.equal(found[others].view(torch.uint8), was[others].view(torch.uint8))


def test_keys_that_are_values_are_put_together_before_they_are_chosen_by() -> None:
    """As attention reads them: turning lanes as they are, all others as values times the norm's weight."""
    cache, k_norm = filled("bf16", 4), torch.rand(E) + 0.5
    keys, values = gather_band(cache, TABLE, 0, N, E, reader(torch.float32, E, "bf16", 4, k_norm))
    still = [2, 3, 6, 7]
    assert torch.equal(keys[..., still], values[..., still] * k_norm[still])
    assert not torch.equal(keys[..., :2], values[..., :2] * k_norm[:2])
