"""The other GGUF types: sizes are known, decoding is left to the ``gguf`` package.

Nothing here is a fast path: these types can be listed without the package, and decoded for inspection with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.formats import checks
from bytefloor.formats.record import Parts, QuantFormat

BLOCK = 256
BLOCK_BYTES = {
    "IQ1_S": 50,
    "IQ1_M": 56,
    "IQ2_XXS": 66,
    "IQ2_XS": 74,
    "IQ2_S": 82,
    "IQ3_XXS": 98,
    "IQ3_S": 110,
    "TQ1_0": 54,
    "TQ2_0": 66,
}
# The package's intermediates take tens of bytes a weight; this many weights at a time bounds them.
PIECE = 1 << 20


def _package(name: str) -> Any:
    try:
        import gguf
    except ImportError:
        raise UnsupportedError(f"{name}: decoding this type needs the gguf package: pip install gguf") from None
    return gguf


def _decode(parts: Parts, name: str) -> Tensor:
    checks.require_names(name, parts, ("blocks",))
    blocks = checks.matrix(name, parts, "blocks", (torch.uint8,))
    blocks_per_row = checks.whole(name, "blocks", "row bytes", blocks.shape[1], BLOCK_BYTES[name])
    gguf = _package(name)
    out = torch.empty(blocks.shape[0], blocks_per_row * BLOCK)
    step = max(1, PIECE // max(1, out.shape[1]))
    for start in range(0, out.shape[0], step):
        rows = blocks[start : start + step].cpu().numpy()
        try:
            values = gguf.quants.dequantize(rows, getattr(gguf.GGMLQuantizationType, name))
        except (AttributeError, NotImplementedError):
            raise UnsupportedError(
                f"{name}: the installed gguf package cannot decode it: pip install -U gguf"
            ) from None
        out[start : start + step] = torch.from_numpy(values)
    _refuse_bad_scales(name, out)
    return out.to(blocks.device)


def _refuse_bad_scales(name: str, out: Tensor) -> None:
    """All weights of these types are finite multiples of their block's scale."""
    for row, values in enumerate(out):
        if (values - values).any():
            group = int(torch.isfinite(values).logical_not().nonzero()[0]) // BLOCK
            raise FileError(f"{name}: scale is NaN or infinite at row {row}, group {group}")


FORMATS = tuple(
    QuantFormat(
        name=name,
        block=BLOCK,
        bits_per_weight=8 * n_bytes / BLOCK,
        parts=("blocks",),
        decode=partial(_decode, name=name),
        block_bytes=n_bytes,
    )
    for name, n_bytes in BLOCK_BYTES.items()
)
