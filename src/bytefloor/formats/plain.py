"""Unquantised types: one part, ``values``, of any shape (norms are vectors)."""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.formats import checks, chunks
from bytefloor.formats.record import Parts, QuantFormat


def _copy(out: Tensor, values: Tensor) -> None:
    out.copy_(values)


def _plain(name: str, dtype: torch.dtype) -> QuantFormat:
    def decode(parts: Parts) -> Tensor:
        checks.require_names(name, parts, ("values",))
        values = parts["values"]
        checks.require_dtype(name, "values", values, (dtype,))
        out = torch.empty(1, values.numel(), device=values.device)
        return chunks.fill(name, out, 1, (values.reshape(-1, 1),), _copy).view(values.shape)

    def encode(weights: Tensor) -> dict[str, Tensor]:
        # A value that the narrower type rounds to infinity is refused, like one that was infinite before.
        values = checks.encodable(name, weights).to(dtype, copy=True)
        return {"values": checks.refuse_infinite(name, values, f"weights as {name}")}

    bits = 8 * dtype.itemsize
    return QuantFormat(name=name, block=1, bits_per_weight=bits, parts=("values",), decode=decode, encode=encode)


FORMATS = (_plain("F32", torch.float32), _plain("F16", torch.float16), _plain("BF16", torch.bfloat16))
