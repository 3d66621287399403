"""view: the same numbers under another shape; [T, N] <-> [T, H, E]. Moves nothing: executors alias the buffer."""

from __future__ import annotations

from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``shape`` is that of one row; the leading axis stays."""
    return x.reshape(x.shape[0], *shape)


OP = Op(
    name="view",
    operands=(Operand("x", ("...", "D")),),
    outputs=(),
    attributes=("shape",),
    reference=reference,
    cases=(Case({"T": 2, "D": 48}, {"shape": (4, 12)}),),
)
