"""add: out = a + b, the residual connection. a, b, out float32, any one shape. Exact: one rounding an element."""

from __future__ import annotations

from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(a: Tensor, b: Tensor) -> Tensor:
    """The sum."""
    return a + b


OP = Op(
    name="add",
    operands=(Operand("a", ("...", "D")), Operand("b", ("...", "D"))),
    outputs=(Operand("out", ("...", "D")),),
    reference=reference,
    cases=(Case({"T": 2, "D": 48}),),
)
