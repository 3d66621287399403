"""gather_rows: out[r] = x[rows[r]], the rows that want logits. x float32 [T, D]; rows int64 [R]; out [R, D]. Exact."""

from __future__ import annotations

from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(x: Tensor, rows: Tensor) -> Tensor:
    """The rows."""
    return x[rows]


OP = Op(
    name="gather_rows",
    operands=(Operand("x", ("T", "D")), Operand("rows", ("R",), "int64")),
    outputs=(Operand("out", ("R", "D")),),
    reference=reference,
    cases=(Case({"T": 5, "R": 2, "D": 16}),),
)
