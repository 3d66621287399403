"""rope: rotates pairs of lanes by position times frequency.

x float32 [T, H, E]; positions int64 [T]; inverse_frequencies: E/2 numbers, radians a position, 0 where a pair stays.
``split`` pairs lane i with i + E/2; ``interleaved`` pairs 2i with 2i + 1 (llama-family GGUF files store rows so).
(a, b) -> (a cos - b sin, b cos + a sin). Angles are taken in float64: at position 100,000 a float32 angle is off by
0.004 rad. Every frequency rule (llama3, linear, proportional) is a table of numbers by the time it is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


@lru_cache(maxsize=64)
def _as_tensor(inverse_frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    """A table is a constant of the model and used in every layer: it is moved to the device once."""
    return torch.tensor(inverse_frequencies, dtype=torch.float64, device=device)


def reference(x: Tensor, positions: Tensor, style: str, inverse_frequencies: Sequence[float]) -> Tensor:
    """Rotate each pair; one table row a token serves all heads."""
    frequencies = _as_tensor(tuple(inverse_frequencies), x.device)
    angles = (positions.to(torch.float64)[:, None] * frequencies)[:, None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if style == "split":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


OP = Op(
    name="rope",
    operands=(Operand("x", ("T", "H", "E")), Operand("positions", ("T",), "int64")),
    outputs=(Operand("out", ("T", "H", "E")),),
    attributes=("style", "inverse_frequencies"),
    reference=reference,
    cases=(
        Case({"T": 3, "H": 2, "E": 8}, {"style": "split", "inverse_frequencies": (1.0, 0.1, 0.01, 0.0)}),
        Case({"T": 2, "H": 1, "E": 4}, {"style": "interleaved", "inverse_frequencies": (1.0, 0.01)}),
    ),
)
