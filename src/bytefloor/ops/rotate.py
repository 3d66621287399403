"""rotate: turns the lanes of each head by a Hadamard matrix, which spreads a large lane over many.

x float32 [T, H, E] -> the same shape: each run of n lanes times the matrix of Sylvester's construction over sqrt(n), n
the largest power of two that divides E (64 of 64, 16 of 80, 32 of 96). It is symmetric and orthonormal: turning twice
gives x back, and products of a query with a key that are both turned are those of before.
Exact but for the order of sums.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def n_turned(head_size: int) -> int:
    """Lanes that are turned together: the largest power of two that divides the head."""
    return head_size & -head_size


@lru_cache(maxsize=16)
def _matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n, n]; a constant, made once."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / n**0.5).to(device=device, dtype=dtype)


def reference(x: Tensor) -> Tensor:
    """Blocks of lanes, one matrix for all."""
    n = n_turned(x.shape[-1])
    return (x.unflatten(-1, (-1, n)) @ _matrix(n, x.dtype, x.device)).flatten(-2)


OP = Op(
    name="rotate",
    operands=(Operand("x", ("T", "H", "E")),),
    outputs=(Operand("out", ("T", "H", "E")),),
    reference=reference,
    flops=lambda sizes: 2 * sizes["T"] * sizes["H"] * sizes["E"] * n_turned(sizes["E"]),
    cases=(Case({"T": 3, "H": 2, "E": 16}), Case({"T": 2, "H": 1, "E": 24})),
)
