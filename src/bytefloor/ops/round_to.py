"""round_to: what an activation becomes when a product takes it in a narrower type.

x float32 [..., K] -> the same values after a trip through ``to``: ``bf16``; ``int8_g32`` and ``int16_g32``, codes in
groups of 32 along K with scale absmax / 127 or absmax / 32512 (the largest code that is 256 times one signed byte plus
another, with room for rounding); ``int8`` and ``fp8`` (E4M3), codes with one bf16 scale for all of K, which is what a
cache keeps of a head; ``float32``, which changes nothing. The list says where rounding happens, so that the
reference can run with it and without it, and the difference is what it costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.errors import UnsupportedError
from bytefloor.ops.op import Case, Op, Operand

GROUP = 32
LARGEST_CODE = {"int8_g32": 127, "int16_g32": 32512}
LARGEST_OF_ALL = {"int8": 127, "fp8": 448}
"""Codes of a row with one scale: whole numbers, and E4M3."""


def round_to(x: Tensor, to: str) -> Tensor:
    """Values of x that survive the narrower type, in x's own dtype."""
    if to == "float32":
        return x
    if to == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    if to in LARGEST_CODE:
        return _round_codes(x, LARGEST_CODE[to])
    if to in LARGEST_OF_ALL:
        codes, scale = code_row(x, to)
        return codes * scale[..., None]
    known = ", ".join(("float32", "bf16", *LARGEST_CODE, *LARGEST_OF_ALL))
    raise UnsupportedError(f"round_to: {to} is no rounding of this version ({known})")


def _round_codes(x: Tensor, largest: int) -> Tensor:
    """A last group shorter than 32 is padded with zeros: they do not move its maximum."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    scale = padded.abs().amax(dim=-1, keepdim=True) / largest
    codes = torch.where(scale > 0, padded / scale, 0).round()
    return (codes * scale).flatten(-2)[..., :width]


def code_row(x: Tensor, to: str) -> tuple[Tensor, Tensor]:
    """(values of the codes [..., K], scales [...]) of rows with one scale each, both in x's dtype.

    Codes are chosen against the scale as it is stored, which may be smaller than the largest value asks for. A row that
    is not finite has codes of zero and a scale of NaN.
    """
    largest = LARGEST_OF_ALL[to]
    scale = (x.abs().amax(dim=-1, keepdim=True) / largest).to(torch.bfloat16).to(x.dtype)
    scale = torch.where(scale.isinf(), torch.nan, scale)
    scaled = torch.where(scale > 0, x / scale, 0).clamp(-largest, largest)
    codes = scaled.round() if to == "int8" else scaled.to(torch.float8_e4m3fn).to(x.dtype)
    return codes, scale[..., 0]


OP = Op(
    name="round_to",
    operands=(Operand("x", ("...", "K")),),
    outputs=(Operand("out", ("...", "K")),),
    attributes=("to",),
    reference=round_to,
    is_rounding=True,
    cases=(
        Case({"T": 3, "K": 64}, {"to": "int8_g32"}),
        Case({"T": 3, "K": 64}, {"to": "int16_g32"}),
        Case({"T": 2, "K": 40}, {"to": "bf16"}),
        Case({"T": 3, "K": 64}, {"to": "int8"}),
        Case({"T": 3, "K": 64}, {"to": "fp8"}),
    ),
)
