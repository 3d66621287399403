"""Stream forms on the CPU: sizes, and the place of every code, read back by a slow reference."""

from __future__ import annotations

import pytest
import torch

from bytefloor.errors import UnsupportedError
from bytefloor.formats import get, stream

FORMATS = ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16")


def random_parts(name: str, n: int, k: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    record = get(name)
    if record.block_bytes is None:
        values = torch.randn(n, k, generator=generator)
        return {"values": values.to(torch.bfloat16 if name == "BF16" else torch.float16)}
    size = (n, k // record.block * record.block_bytes)
    return {"blocks": torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)}


@pytest.mark.parametrize(("name", "k"), [(name, 512) for name in FORMATS] + [(name, 576) for name in FORMATS[3:]])
def test_packed_bytes_are_what_the_form_says(name: str, k: int) -> None:
    form = stream.choose(name, 48, k)
    packed = form.pack(random_parts(name, 48, k))
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, k // form.columns, form.record_bytes)
    assert form.record_bytes % 16 == 0
    assert packed.numel() == form.n_bytes(48, k)


def low_codes(packed: torch.Tensor, row: int, column: int, columns: int) -> int:
    """The low four bits of a code: record by tile and column, step of 64, lane of row and eight, word and nibble."""
    record = packed[row // 16, column // columns]
    inner = column % columns
    step, group, lane, element = inner // 64, inner % 64 // 32, 4 * (row % 8) + inner % 32 // 8, inner % 8
    word = 2 * group + row % 16 // 8
    byte = int(record[(step * 32 + lane) * 16 + word * 4 + element % 4])
    return byte >> 4 if element >= 4 else byte & 15


@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "Q4_1"])
def test_every_code_stands_where_the_kernel_looks(name: str) -> None:
    n, k = 32, 512
    parts = random_parts(name, n, k)
    form = stream.choose(name, n, k)
    packed = form.pack(parts)
    block, block_bytes = get(name).block, get(name).block_bytes
    assert block_bytes is not None
    for row, column in [
        (0, 0),
        (0, 1),
        (1, 31),
        (5, 32),
        (15, 63),
        (16, 64),
        (17, 200),
        (31, 255),
        (30, 256),
        (31, 511),
    ]:
        stored = parts["blocks"][row, column // block * block_bytes :][:block_bytes]
        inside = column % block
        if name == "Q4_K":
            chunk, high = inside // 64, inside % 64 // 32
            byte = int(stored[16 + chunk * 32 + inside % 32])
        else:
            high, head = inside // 16, 2 if name == "Q4_0" else 4
            byte = int(stored[head + inside % 16])
        assert low_codes(packed, row, column, form.columns) == (byte >> 4 if high else byte & 15)


def test_no_byte_is_lost_or_invented() -> None:
    """Packing only moves bits: the number of ones stays, scales of Q4_K aside, which become bytes of their own."""
    for name in ("Q6_K", "Q5_0", "Q8_0"):
        parts = random_parts(name, 32, 512)
        packed = stream.choose(name, 32, 512).pack(parts)
        ones = [sum(bin(byte).count("1") for byte in t.flatten().tolist()) for t in (parts["blocks"], packed)]
        assert ones[0] == ones[1]


@pytest.mark.parametrize("k", [32, 96, 1000])
@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_plain_values_are_filled_up_with_columns_of_zeros(name: str, k: int) -> None:
    """The per-layer inputs of a small E model are 32 wide."""
    parts = random_parts(name, 32, k)
    form, whole = stream.choose(name, 32, k), -(-k // 64) * 64
    filled = torch.zeros(32, whole, dtype=parts["values"].dtype)
    filled[:, :k] = parts["values"]
    assert torch.equal(form.pack(parts), form.pack({"values": filled}))
    assert form.pack(parts).numel() == form.n_bytes(32, k) == form.n_bytes(32, whole)


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="IQ3_S has no stream form"):
        stream.choose("IQ3_S", 16, 256)
    with pytest.raises(UnsupportedError, match="20 rows are not a multiple of 16"):
        stream.choose("Q4_K", 20, 256)
    with pytest.raises(UnsupportedError, match="96 columns are not a multiple of 64"):
        stream.choose("Q8_0", 16, 96)
