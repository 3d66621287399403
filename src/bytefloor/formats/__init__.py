"""Weight formats: what stored bytes mean.

Every format is a ``QuantFormat`` record in ``FORMATS``, under the name users know it by. Names of GGUF types are those
of GGUF (``MXFP4`` and ``NVFP4`` are its blocks); the same numbers in safetensors go by their container
(``NVFP4-modelopt``, ``MXFP4-compressed-tensors``, ``mlx-mxfp4``); MLX's integers are ``affine-<bits>b-g<group>``.

Dimensions: N rows (produced) by K columns (reduced), outermost first, whatever order a file lists them in; G columns
share a scale; U units (blocks, groups or rows) are decoded at once. A decoded tensor is float32 [N, K], contiguous,
in memory of its own, on the device of its parts, and each weight is the exact value its format defines, rounded
where the format rounds. A group is counted along its row, in errors too.

record: the QuantFormat record. chunks: walking large tensors. checks: refusing wrong parts. minifloat: E2M1, E4M3 and
E8M0 numbers. finite: which rows hold NaN or infinity. blocks: GGUF blocks; plain, legacy, kquants, iquants, ggml: its
types. affine: MLX. fp4, fp8: the rest.
encode_search: scales that fit a group; encode_kquants, encode_lookups, encode_legacy: encoders that search for them.
"""

from __future__ import annotations

from difflib import get_close_matches

from bytefloor.errors import UnsupportedError
from bytefloor.formats import affine, fp4, fp8, ggml, iquants, kquants, legacy, plain
from bytefloor.formats.record import Parts, QuantFormat

__all__ = ["FORMATS", "Parts", "QuantFormat", "get"]

FORMATS: dict[str, QuantFormat] = {
    record.name: record
    for module in (plain, legacy, kquants, iquants, ggml, fp4, affine, fp8)
    for record in module.FORMATS
}


def get(name: str) -> QuantFormat:
    """The format of that name, or UnsupportedError listing the names nearest to it."""
    if name in FORMATS:
        return FORMATS[name]
    spellings = {known.lower(): known for known in FORMATS}
    near = [spellings[match] for match in get_close_matches(name.lower(), spellings, n=4, cutoff=0.5)]
    advice = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(FORMATS)}"
    raise UnsupportedError(f"weight format {name} is not supported; {advice}")
