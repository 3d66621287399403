"""select: one slice along the middle axis, out = x[:, index]. x float32 [T, L, P]; out [T, P]. Exact.

Per-layer embeddings are made for all L layers at once; each layer takes its own slice.
"""

from __future__ import annotations

from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(x: Tensor, index: int) -> Tensor:
    """The slice."""
    return x[:, index]


OP = Op(
    name="select",
    operands=(Operand("x", ("T", "L", "P")),),
    outputs=(Operand("out", ("T", "P")),),
    attributes=("index",),
    reference=reference,
    cases=(Case({"T": 2, "L": 3, "P": 8}, {"index": 1}),),
)
