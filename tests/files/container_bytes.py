"""Model files put together by hand, byte by byte, so that a test can spoil any one of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0, TYPE_Q4_K, TYPE_NVFP4 = 0, 1, 2, 8, 12, 40


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def u32(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def u16(key: str, value: int) -> bytes:
    return pair(key, U16, struct.pack("<H", value))


def string(key: str, value: str | bytes) -> bytes:
    return pair(key, STRING, text(value))


def array(key: str, kind: int, count: int, raw: bytes) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, count) + raw)


def entry(name: str | bytes, dims: tuple[int, ...], kind: int, offset: int, n_dims: int | None = None) -> bytes:
    """A line of the tensor table; ``dims`` as stored, innermost first."""
    count = len(dims) if n_dims is None else n_dims
    return (
        text(name) + struct.pack("<I", count) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
    )


def gguf_bytes(
    pairs: list[bytes] | None = None,
    entries: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_pairs: int | None = None,
    n_entries: int | None = None,
    alignment: int = 32,
) -> bytes:
    pairs, entries = pairs or [], entries or []
    counts = (len(entries) if n_entries is None else n_entries, len(pairs) if n_pairs is None else n_pairs)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(entries)
    if data:
        head += bytes(-len(head) % alignment)
    return head + data


def two_tensors(**changes: object) -> bytes:
    """A good small file: q.weight F32 [2, 8] and b.weight F32 [8], 96 bytes of data."""
    numbers = struct.pack("<24f", *range(24))
    good = {
        "pairs": [string("general.architecture", "llama")],
        "entries": [entry("q.weight", (8, 2), TYPE_F32, 0), entry("b.weight", (8,), TYPE_F32, 64)],
        "data": numbers,
    }
    return gguf_bytes(**{**good, **changes})  # type: ignore[arg-type]


def safetensors_bytes(header: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int32: "I32",
    torch.uint32: "U32", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.int64: "I64",
}  # fmt: skip


def safetensors_of(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    header: dict = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        data += raw
    return safetensors_bytes(header, data)


def model_directory(path: Path, tensors: dict[str, torch.Tensor], config: dict | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(safetensors_of(tensors))
    (path / "config.json").write_text(json.dumps(config or {}))
    return path
