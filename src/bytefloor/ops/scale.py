"""scale: out = x * factor * weight. x, out float32 [..., D]; factor a constant; weight [1] or absent, a learned scalar.

Exact. Gemma 4 multiplies the whole residual by a scalar after each layer; per-layer embeddings use the constant form.
"""

from __future__ import annotations

from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(x: Tensor, factor: float, weight: Tensor | None = None) -> Tensor:
    """The product."""
    scaled = x if factor == 1.0 else x * factor
    return scaled if weight is None else scaled * weight


OP = Op(
    name="scale",
    operands=(Operand("x", ("...", "D")), Operand("weight", ("1",), is_optional=True)),
    outputs=(Operand("out", ("...", "D")),),
    attributes=("factor",),
    reference=reference,
    cases=(Case({"T": 2, "D": 48}, {"factor": 0.5}),),
)
