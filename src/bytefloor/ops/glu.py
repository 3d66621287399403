"""glu: act(gate) * up, the gated linear unit.

gate, up float32 [T, F]; activation ``silu`` or ``gelu_tanh`` (the tanh form of GELU); out float32 [T, F].
Exact, in float32: a float16 tanh form shifts answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The formula, in the dtype of gate."""
    return ACTIVATIONS[activation](gate) * up


OP = Op(
    name="glu",
    operands=(Operand("gate", ("T", "F")), Operand("up", ("T", "F"))),
    outputs=(Operand("out", ("T", "F")),),
    attributes=("activation",),
    reference=reference,
    cases=(Case({"T": 2, "F": 48}, {"activation": "silu"}), Case({"T": 3, "F": 32}, {"activation": "gelu_tanh"})),
)
