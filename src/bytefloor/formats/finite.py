"""Which rows of a stored matrix decode to finite numbers, without decoding where the bytes alone can tell.

A block of a GGUF type decodes to products of small codes and its fp16 scales, which float32 cannot overflow: a row is
finite exactly when its scales are. Only formats that are decoded (MLX affine, FP4, MX and NVFP4) wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.formats.record import Parts, QuantFormat

SCALE_OFFSETS: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block's fp16 scales stand."""
PLAIN = ("F32", "F16", "BF16")
_HALF_EXPONENT = 0x7C
"""All ones in the upper byte of an fp16 number that is NaN or infinite, and in no other."""


def finite_rows(record: QuantFormat, parts: Parts) -> Tensor:
    """bool [N], on the device of the parts. Other formats are decoded, which refuses broken scales by itself."""
    if record.name in PLAIN:
        return torch.isfinite(parts["values"]).all(dim=1)
    if record.name.startswith("FP8"):
        codes, scales = (
            parts["weight"].view(torch.uint8),
            parts[record.parts[1]].float().reshape(len(parts["weight"]), -1),
        )
        return (codes & 0x7F).ne(0x7F).all(dim=1) & torch.isfinite(scales).all(dim=1)
    if record.name not in SCALE_OFFSETS:
        return torch.isfinite(record.decode(parts)).all(dim=1)
    stored = parts["blocks"]
    upper = [offset + 1 for offset in SCALE_OFFSETS[record.name]]
    blocks = stored.unflatten(1, (-1, record.block_bytes or stored.shape[1]))
    is_bad = [(blocks[..., at] & _HALF_EXPONENT) == _HALF_EXPONENT for at in upper]
    return torch.stack(is_bad).any(dim=2).any(dim=0).logical_not()
