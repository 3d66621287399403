"""embed: rows of a table, times a constant.

out[t] = table[tokens[t]] * scale
tokens int64 [T]; table [V, D] as stored; out float32 [T, D].
Exact: one multiplication an element. Moves T rows of the table, not the table.
"""

from __future__ import annotations

from torch import Tensor

from bytefloor.ops.op import Case, Op, Operand


def reference(tokens: Tensor, table: Tensor, scale: float) -> Tensor:
    """Rows of a tensor, or of anything indexed by row ids that gives float rows (a table left in the file)."""
    return table[tokens] * scale


OP = Op(
    name="embed",
    operands=(Operand("tokens", ("T",), "int64"), Operand("table", ("V", "D"))),
    outputs=(Operand("out", ("T", "D")),),
    attributes=("scale",),
    reference=reference,
    weight_bytes=lambda sizes, stored_bytes: sizes["T"] * (stored_bytes // sizes["V"]),
    flops=lambda sizes: sizes["T"] * sizes["D"],
    cases=(Case({"T": 3, "V": 7, "D": 32}, {"scale": 1.0}), Case({"T": 1, "V": 5, "D": 96}, {"scale": 9.797959})),
)
