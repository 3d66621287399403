"""soft_cap: out = cap * tanh(x / cap), which keeps logits within (-cap, cap). x, out float32 [R, V]. Exact."""

from __future__ import annotations

from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(x: Tensor, cap: float) -> Tensor:
    """The formula, in the dtype of x."""
    return (x / cap).tanh() * cap


OP = Op(
    name="soft_cap",
    operands=(Operand("x", ("R", "V")),),
    outputs=(Operand("out", ("R", "V")),),
    attributes=("cap",),
    reference=reference,
    cases=(Case({"R": 2, "V": 48}, {"cap": 30.0}),),
)
