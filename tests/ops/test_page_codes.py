"""Pages in codes of 4 and 2 bits, tile by tile, against the same in plain steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bytefloor.errors import UnsupportedError
from bytefloor.model.step import CacheKind
from bytefloor.ops.page_codes import decode, encode, n_page_bytes
from bytefloor.ops.pages import page_shape, randomise, values_of
from bytefloor.ops.rotate import reference as rotate
from plain_tiles import KEYS, VALUES, code_tile, code_values

SHAPES = [(64, 64), (64, 80), (64, 96), (64, 256), (8, 8)]


def uneven(page: int, e: int, j: int = 2, seed: int = 1) -> torch.Tensor:
    """[2, J, PAGE, E] as bf16 holds it: lanes with means and sizes of their own, positions of sizes 0.01 to 100."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, j, page, e, generator=generator, dtype=torch.float64)
    lanes = 1 + 3 * torch.rand(2, j, 1, e, generator=generator)
    sizes = 10 ** (4 * torch.rand(2, j, page, 1, generator=generator) - 2)
    return ((x * lanes + 2 * torch.randn(2, j, 1, e, generator=generator)) * sizes).bfloat16()


@pytest.mark.parametrize(("page", "e"), SHAPES)
def test_codes_are_those_of_the_plain_steps(page: int, e: int) -> None:
    held = uneven(page, e)
    data = encode(held)
    assert data.shape == (1, 2, n_page_bytes(page, e))
    assert torch.equal(decode(data, e, torch.float64), code_values(held.double()))


@pytest.mark.parametrize(("page", "e"), SHAPES)
def test_bytes_lie_where_the_header_says(page: int, e: int) -> None:
    held = uneven(page, e)
    raw = encode(held)[0, 1].numpy()
    k, v = (code_tile(held[half, 1].double().numpy(), recipe) for half, recipe in ((0, KEYS), (1, VALUES)))
    at = 0
    for tile, bits in ((k, 4), (v, 2)):
        per = 8 // bits
        for t in range(page):
            for byte in range(e // per):
                places = range(per * byte, per * byte + per)
                expected = sum(int(tile.codes[t, lane]) << (bits * i) for i, lane in enumerate(places))
                assert raw[at] == expected
                at += 1
    for part in (k.scale, k.zero, k.factor, v.factor, v.scale, v.zero):
        stored = raw[at : at + 2 * part.size].view(np.uint16)
        assert (stored == torch.from_numpy(part.ravel()).bfloat16().view(torch.int16).numpy().view(np.uint16)).all()
        at += 2 * part.size
    assert at == len(raw)


def test_a_value_is_at_most_half_a_code_off() -> None:
    """And what bf16 leaves of scale and zero: at the largest code as many times the scale's."""
    held = uneven(64, 64, j=1).double()
    found = decode(encode(held), 64, torch.float64)
    for half, recipe in enumerate((KEYS, VALUES)):
        tile = code_tile(held[half, 0].numpy(), recipe)
        size = np.abs(tile.zero) + np.abs(tile.scale) * (2**recipe.bits - 1)
        bound = (np.abs(tile.scale) / 2 + size * 2.0**-8) * np.abs(tile.factor)
        error = (found - held)[half, 0].abs().numpy()
        assert (error <= bound).all()
        assert (error > bound / 4).any()


def test_being_even_is_what_saves_a_quiet_position() -> None:
    """A lane's scale serves all positions: without factors a quiet one would get the same code everywhere."""
    held = torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(1)).double()
    held[:, :, 5] /= 1000
    error = (decode(encode(held), 64, torch.float64) - held)[0, 0, 5].norm() / held[0, 0, 5].norm()
    plain = code_tile(held[0, 0].numpy(), type(KEYS)(4, 0, rounds=0)).values[5] - held[0, 0, 5].numpy()
    assert error < 0.2
    assert np.linalg.norm(plain) > 10 * float(held[0, 0, 5].norm())


def test_the_unit_does_not_matter() -> None:
    """Codes of a tile are those of any power of two times it, from the smallest cache to the largest."""
    held = uneven(64, 64).float() / 64
    n_codes = 64 * 64 * 6 // 8
    for factor in (2.0**-40, 2.0**40):
        assert torch.equal(encode(held * factor)[..., :n_codes], encode(held)[..., :n_codes])


def test_zeros_and_tiles_of_one_value_stay() -> None:
    held = torch.zeros(2, 2, 64, 64)
    held[0, 1] = 3.0
    held[1, 0] = -2.0
    assert torch.equal(decode(encode(held), 64), held)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("half", [0, 1])
def test_what_is_not_finite_makes_its_tile_nan(bad: float, half: int) -> None:
    """Of that head, K or V; the others are what they would be without it."""
    held = uneven(64, 64, j=3).float()
    clean = decode(encode(held), 64)
    held[half, 1, 9, 5] = bad
    found = decode(encode(held), 64)
    assert bool(found[half, 1].isnan().all())
    clean[half, 1] = found[half, 1]
    torch.testing.assert_close(found, clean, rtol=0, atol=0, equal_nan=True)


def test_the_largest_and_the_smallest_values_of_bf16_are_kept() -> None:
    """3e38 and 1e-40: neither infinity nor a division by nothing."""
    for size in (3e38, 1e-40, 1e-42):
        held = (torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(1)).clamp(-1, 1) * size).bfloat16()
        found = decode(encode(held), 64, torch.float64)
        assert bool(found.isfinite().all())
        assert float((found - held.double()).abs().max()) < max(size, 1e-40)


def test_pages_are_bytes_and_no_more() -> None:
    """3 bits a value, and three numbers of bf16 for each lane and each position."""
    shape, dtype = page_shape("k4v2", 3, 64, 128)
    assert (shape, dtype) == ((1, 3, 64 * 128 * 6 // 8 + 6 * (128 + 64)), torch.uint8)
    kind = CacheKind("kind", 3, 128, None, "k4v2")
    assert kind.page_bytes(64) == math.prod(shape)
    assert kind.head_bytes == math.prod(shape) // 3 // 64
    assert CacheKind("kind", 3, 128, None, "bf16").page_bytes(64) / kind.page_bytes(64) > 4.4


def test_heads_whose_codes_fill_no_bytes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="heads of 70 lanes, expected a multiple of 4"):
        n_page_bytes(64, 70)


def test_random_pages_are_finite() -> None:
    shape, dtype = page_shape("k4v2", 2, 64, 80)
    pool = torch.full((2, 3, *shape), 0xFF, dtype=dtype)
    randomise(pool, 80, "k4v2", torch.Generator().manual_seed(1))
    assert bool(values_of(pool, 80, "k4v2").isfinite().all())
    assert float(values_of(pool, 80, "k4v2").std()) > 0.5


@pytest.mark.parametrize(("e", "n"), [(64, 64), (80, 16), (96, 32), (512, 512)])
def test_turning_keeps_products_and_spreads_a_lane_over_its_block(e: int, n: int) -> None:
    q, k = torch.randn(2, 5, 2, e, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1))
    assert torch.allclose(rotate(rotate(q)), q)
    lane = torch.zeros(1, 1, e, dtype=torch.float64)
    lane[..., e - 1] = 1
    assert torch.allclose(rotate(lane).abs(), torch.where(torch.arange(e) < e - n, 0, n**-0.5).double())
