"""rms_norm: x / sqrt(mean(x^2) + eps), times a weight where there is one.

x [..., D], weight [D] or absent (Gemma 4's V norm), out [..., D], all float32.
Exact; the mean is accumulated in at least float32. The weight is applied raw: a file whose norms mean (1 + w) is
adjusted when it is loaded, so no op knows of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """The formula, in the dtype of x."""
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


OP = Op(
    name="rms_norm",
    operands=(Operand("x", ("...", "D")), Operand("weight", ("D",), is_optional=True)),
    outputs=(Operand("out", ("...", "D")),),
    attributes=("eps",),
    reference=reference,
    cases=(Case({"T": 3, "D": 64}, {"eps": 1e-6}), Case({"T": 1, "D": 576}, {"eps": 1e-5})),
)
