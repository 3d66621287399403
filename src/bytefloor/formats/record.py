"""The record that says what a weight format's bytes mean.

A stored weight is a matrix of N rows (produced) by K columns (reduced), kept as one or more named arrays, its *parts*:
GGUF block types have one part, ``blocks`` (uint8 [N, row bytes]); plain types have ``values`` (their own dtype
[N, K]); formats from safetensors have what their files have (``weight``, ``scales``, ``biases``, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Parts = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class QuantFormat:
    """All facts of one weight format. Adding a format is adding one of these to its module's FORMATS.

    name: as users know it outside (``Q4_K``, ``NVFP4``, ``affine-4b-g64``).
    block: weights along K that one unit of the layout holds; K must be a multiple of it.
    bits_per_weight: stored bits a weight, scales of blocks and groups included (per-row, per-tensor and 128x128
        scales are not: their share vanishes with size; the true file size of a tensor is StoredTensor.n_bytes).
    parts: names of the arrays; those that may be absent come in ``optional_parts``.
    block_bytes: bytes of one GGUF block; None for formats that are not blocks of bytes.
    decode: parts -> float32 [N, K], exactly the value the format defines, on the device where the parts are.
        Raises FileError for scale codes that mean NaN.
    encode: float32 [N, K] -> parts, by the rounding that the format's own tool uses; None where there is no encoder.
    encode_weighted: the same with importances float32 [K], how much a column's squared error counts; None where they
        change nothing.
    """

    name: str
    block: int
    bits_per_weight: float
    parts: tuple[str, ...]
    decode: Callable[[Parts], Tensor]
    optional_parts: tuple[str, ...] = ()
    block_bytes: int | None = None
    encode: Callable[[Tensor], dict[str, Tensor]] | None = None
    encode_weighted: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None
