"""Row tiles: how activations that enter a product of many rows lie in memory, for the tensor cores.

x [T, K] is stored as bf16 [Kp / 64, P / 8, 8, 64]: Kp is K rounded up to 64, columns beyond K are zero; P, the pitch,
is T filled up to a multiple of 8 or more, rows beyond T hold anything. An atom of 8 rows by 64 columns is 1024 bytes,
128 a row, as wgmma takes an operand whose columns lie together, with its 128-byte swizzle: the 16-byte chunk c of row
r stands at place c ^ (r % 8) of its row.

Columns are permuted within each group of 32: stored column 16 s + 8 h + 2 t + j (s, h, j in 0..1, t in 0..3) is
element 8 t + 4 s + 2 h + j. So the eight elements that lane t of four has of a group of weights (``stream.cuh``) are
its parts of two tensor core steps of 16 columns, s = 0 and 1, and weights need no shuffling. ``row_tiles.cuh`` writes
the same addresses once more, for kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.errors import ShapeError

COLUMNS = 64
ROWS = 8
"""Of an atom."""
CHUNK = 8
"""Elements of 16 bytes."""


def pitch_of(n_rows: int) -> int:
    """The least pitch that holds so many rows."""
    return -(-n_rows // ROWS) * ROWS


def tiles_shape(k: int, pitch: int) -> tuple[int, int, int, int]:
    """Shape of the tiles, in bf16, of K columns and ``pitch`` rows. ShapeError if the pitch is no multiple of 8."""
    if pitch % ROWS:
        raise ShapeError(f"row tiles: a pitch of {pitch} rows is not a multiple of {ROWS}")
    return -(-k // COLUMNS), pitch // ROWS, ROWS, COLUMNS


def to_row_tiles(x: Tensor, pitch: int) -> Tensor:
    """x [T, K] -> bf16 [Kp / 64, pitch / 8, 8, 64], zero beyond T and K. ShapeError if the pitch does not hold T."""
    n_rows, k = x.shape
    shape = tiles_shape(k, pitch)
    if pitch < n_rows:
        raise ShapeError(f"row tiles: {n_rows} rows do not fit in a pitch of {pitch}")
    whole = torch.nn.functional.pad(x.to(torch.bfloat16), (0, shape[0] * COLUMNS - k, 0, pitch - n_rows))
    # [rows / 8, row, columns / 64, group, t, s, h, j]; the last three of a chunk's place are group, s, h.
    elements = whole.view(shape[1], ROWS, shape[0], 2, 4, 2, 2, 2)
    chunks = elements.permute(2, 0, 1, 3, 5, 6, 4, 7).reshape(*shape[:3], ROWS, CHUNK)
    return _swizzled(chunks).view(shape)


def from_row_tiles(tiles: Tensor, n_rows: int, k: int) -> Tensor:
    """Float32 [T, K] of bf16 tiles [Kp / 64, pitch / 8, 8, 64]."""
    n_columns, n_atoms = tiles.shape[:2]
    chunks = _swizzled(tiles.reshape(n_columns, n_atoms, ROWS, ROWS, CHUNK))
    elements = chunks.view(n_columns, n_atoms, ROWS, 2, 2, 2, 4, 2).permute(1, 2, 0, 3, 6, 4, 5, 7)
    return elements.reshape(n_atoms * ROWS, n_columns * COLUMNS)[:n_rows, :k].float()


def _swizzled(chunks: Tensor) -> Tensor:
    """Chunk c of row r to place c ^ r, which undoes itself. chunks [..., 8 rows, 8, 8 elements]."""
    rows = torch.arange(ROWS, device=chunks.device)
    return chunks[..., rows[:, None], rows ^ rows[:, None], :]
