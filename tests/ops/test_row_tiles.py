"""Row tiles: the layout in Python against its formula, element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bytefloor.errors import ShapeError
from bytefloor.ops.row_tiles import from_row_tiles, pitch_of, tiles_shape, to_row_tiles


def plain_bytes(x: Tensor, pitch: int) -> Tensor:
    """int16 [..]: every element of rows and filled-up columns where the formula says."""
    n_rows, k = x.shape
    n_columns = -(-k // 64) * 64
    out = torch.zeros(n_columns * pitch, dtype=torch.int16)
    bits = x.to(torch.bfloat16).view(torch.int16)
    for row in range(n_rows):
        for column in range(n_columns):
            s, h, t, j = column % 32 // 16, column % 16 // 8, column % 8 // 2, column % 2
            element = column // 32 * 32 + 8 * t + 4 * s + 2 * h + j
            chunk = column % 64 // 8
            atom = (column // 64) * (pitch // 8) + row // 8
            byte = atom * 1024 + row % 8 * 128 + (chunk ^ row % 8) * 16 + column % 8 * 2
            if element < k:
                out[byte // 2] = bits[row, element]
    return out


@pytest.mark.parametrize(("n_rows", "k", "pitch"), [(1, 32, 8), (8, 64, 8), (9, 96, 16), (17, 200, 32), (3, 576, 24)])
def test_every_element_lies_where_the_formula_says(n_rows: int, k: int, pitch: int) -> None:
    x = torch.randn(n_rows, k, generator=torch.Generator().manual_seed(k))
    tiles = to_row_tiles(x, pitch)
    assert tiles.shape == tiles_shape(k, pitch)
    assert torch.equal(tiles.contiguous().view(-1).view(torch.int16), plain_bytes(x, pitch))
    assert torch.equal(from_row_tiles(tiles, n_rows, k), x.to(torch.bfloat16).float())


def test_a_word_has_the_neighbours_that_a_tensor_core_lane_takes() -> None:
    """Word t of chunk 4 n + 2 s + h of a row are elements 8 t + 4 s + 2 h and the next, of group n."""
    row = torch.arange(64.0)[None].expand(8, 64)
    words = to_row_tiles(row, 8)[0, 0].float().view(8, 8, 4, 2)
    for r in range(8):
        for n, s, h, t in torch.cartesian_prod(*(torch.arange(i) for i in (2, 2, 2, 4))).tolist():
            first = 32 * n + 8 * t + 4 * s + 2 * h
            assert words[r, (4 * n + 2 * s + h) ^ r, t].tolist() == [first, first + 1]


def test_rows_that_do_not_fit_are_refused() -> None:
    assert [pitch_of(n) for n in (1, 8, 9)] == [8, 8, 16]
    with pytest.raises(ShapeError, match="9 rows do not fit in a pitch of 8"):
        to_row_tiles(torch.zeros(9, 64), 8)
    with pytest.raises(ShapeError, match="a pitch of 12 rows is not a multiple of 8"):
        to_row_tiles(torch.zeros(9, 64), 12)
