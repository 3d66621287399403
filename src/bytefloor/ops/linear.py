"""linear: the product of activations with a weight matrix, y = x W^T.

x float32 [T, K]; weight [N, K] as stored; y float32 [T, N].
Approximate: sums of K products in at least float32. A kernel sums a row in an order that the number of rows does not
change; the torch reference may not: on a CPU the last bits differ between 1 row and 9.
Moves the stored weight once, whatever T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """A matrix product in the weight's dtype; the result comes back in the dtype of x."""
    return torch.nn.functional.linear(x.to(weight.dtype), weight).to(x.dtype)


OP = Op(
    name="linear",
    operands=(Operand("x", ("T", "K")), Operand("weight", ("N", "K"))),
    outputs=(Operand("y", ("T", "N")),),
    reference=reference,
    flops=lambda sizes: 2 * sizes["T"] * sizes["N"] * sizes["K"],
    is_exact=False,
    error_budget=1e-10,
    cases=(Case({"T": 1, "N": 48, "K": 64}), Case({"T": 5, "N": 32, "K": 96})),
)
