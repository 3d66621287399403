"""MLX formats, against a reference that reads one bit at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats_reference import assert_same_bits, bit_stream, e4m3, e8m0, random_bytes, random_floats

from bytefloor import formats
from bytefloor.errors import FileError, NumericalError, ShapeError
from bytefloor.formats import affine, chunks

WIDTHS = [(bits, group) for bits in affine.BITS for group in affine.GROUPS]


def sample(bits: int, group: int, n_rows: int = 3, n_columns: int = 4096) -> dict[str, torch.Tensor]:
    n_groups = n_columns // group
    weight = random_bytes(bits * group, n_rows, n_columns * bits // 8).view(torch.uint32)
    index = torch.arange(n_rows * n_groups).view(n_rows, n_groups).float()
    scales = ((index * 37 % 251 + 1) / 64 * torch.where(index % 2 == 0, 1.0, -1.0)).bfloat16()
    biases = ((index * 53 % 241 - 120) / 128).bfloat16()
    scales[0, 0] = 0
    return {"weight": weight, "scales": scales, "biases": biases}


def reference(parts: dict[str, torch.Tensor], bits: int, group: int) -> np.ndarray:
    rows = []
    for row in range(parts["weight"].shape[0]):
        codes = bit_stream(bytes(parts["weight"][row].view(torch.uint8).tolist()), bits)
        scales, biases = (parts[key][row].float().tolist() for key in ("scales", "biases"))
        products = [np.float32(code * scales[i // group]) for i, code in enumerate(codes)]
        rows.append([np.float32(float(p) + biases[i // group]) for i, p in enumerate(products)])
    return np.array(rows, dtype=np.float32)


@pytest.mark.parametrize(("bits", "group"), WIDTHS)
def test_decode_equals_the_bit_by_bit_reference(bits, group):
    """K15: columns = words * 32 / bits; 3, 5 and 6-bit codes straddle words."""
    parts = sample(bits, group)
    assert parts["weight"].shape[1] * 32 // bits == 4096
    out = formats.get(f"affine-{bits}b-g{group}").decode(parts)
    assert_same_bits(out, reference(parts, bits, group))
    signed = {**parts, "weight": parts["weight"].view(torch.int32)}
    assert_same_bits(formats.get(f"affine-{bits}b-g{group}").decode(signed), out.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", affine.BITS)
def test_product_and_sum_are_each_rounded_to_float32(bits, dtype):
    """A fused multiply-add would differ: the float32 scales here fill their mantissas."""
    parts = sample(bits, 64, 2, 512)
    parts["scales"] = random_floats(1, 2, 8).to(dtype)
    parts["biases"] = random_floats(2, 2, 8).to(dtype)
    assert_same_bits(formats.get(f"affine-{bits}b-g64").decode(parts), reference(parts, bits, 64))


@pytest.mark.parametrize(("bits", "group"), WIDTHS)
def test_bits_per_weight_counts_codes_scales_and_biases(bits, group):
    record = formats.get(f"affine-{bits}b-g{group}")
    n_bytes = sum(part.numel() * part.element_size() for part in sample(bits, group).values())
    assert record.bits_per_weight == n_bytes * 8 / (3 * 4096)
    assert record.block == group


@pytest.mark.parametrize("key", ["scales", "biases"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_scales_and_biases_that_are_not_finite_are_refused_by_place(key, bad, monkeypatch):
    monkeypatch.setattr(chunks, "SMALL_PIECE", 256)
    parts = sample(5, 64)
    parts[key][1, 9] = parts[key][2, 0] = bad
    with pytest.raises(FileError, match=rf"affine-5b-g64: {'scale' if key == 'scales' else 'bias'} .*row 1, group 9$"):
        formats.get("affine-5b-g64").decode(parts)


def test_wrong_shapes_and_dtypes_are_refused_by_part():
    parts = sample(3, 64)
    decode = formats.get("affine-3b-g64").decode
    with pytest.raises(ShapeError, match="part weight: expected words a row to be a multiple of 6, found 383"):
        decode({**parts, "weight": parts["weight"].view(torch.int32)[:, :-1]})
    with pytest.raises(ShapeError, match=r"part scales: expected shape \[3, 64\], found \[3, 32\]"):
        decode({**parts, "scales": parts["scales"][:, :32]})
    with pytest.raises(ShapeError, match=r"part biases: expected shape \[3, 64\], found \[2, 64\]"):
        decode({**parts, "biases": parts["biases"][:2]})
    with pytest.raises(ShapeError, match="part weight: expected dtype"):
        decode({**parts, "weight": parts["weight"].view(torch.uint8)})
    with pytest.raises(ShapeError, match="part scales: expected dtype"):
        decode({**parts, "scales": parts["scales"].view(torch.uint8)})
    with pytest.raises(FileError, match="part biases is missing"):
        decode({key: parts[key] for key in ("weight", "scales")})


@pytest.mark.parametrize("bits", affine.BITS)
def test_decode_in_pieces_equals_decode_at_once(bits, monkeypatch):
    parts = sample(bits, 32)
    decode = formats.get(f"affine-{bits}b-g32").decode
    whole = decode(parts)
    monkeypatch.setattr(chunks, "CPU_PIECE", 32 * 100)
    monkeypatch.setattr(chunks, "_threads_for", lambda out: 2)
    assert_same_bits(decode(parts), whole.numpy())


@pytest.mark.parametrize("bits", affine.BITS)
def test_packing_is_the_inverse_of_unpacking(bits):
    packed = random_bytes(bits, 4, 24 * bits)
    codes = affine.unpack_codes(packed, bits)
    assert codes.tolist() == [bit_stream(bytes(row), bits) for row in packed.tolist()]
    assert torch.equal(affine.pack_codes(codes, bits), packed)


@pytest.mark.parametrize(("bits", "group"), WIDTHS)
def test_encode_chooses_codes_against_the_stored_scale_and_bias(bits, group):
    record = formats.get(f"affine-{bits}b-g{group}")
    weights = random_floats(bits, 3, 256) * 0.1
    weights[1, :group] = -0.75  # a group of equal values: scale 1, every code 0
    parts = record.encode(weights)
    groups = weights.view(3, -1, group)
    top, bottom = groups.amax(dim=2), groups.amin(dim=2)
    scales = ((top - bottom) / (2**bits - 1)).bfloat16()
    scales[1, 0] = 1
    assert torch.equal(parts["scales"], scales)
    assert torch.equal(parts["biases"], bottom.bfloat16())
    assert parts["weight"].dtype == torch.uint32
    assert parts["weight"].shape == (3, 256 * bits // 32)
    codes = affine.unpack_codes(parts["weight"].view(torch.uint8), bits).view(groups.shape)
    ideal = (groups - bottom.bfloat16().float()[..., None]) / scales.float()[..., None]
    assert torch.equal(codes.float(), ideal.round().clamp(0, 2**bits - 1))
    error = (record.decode(parts).view(groups.shape) - groups).abs().amax(dim=2)
    # Half a step, plus what rounding the two numbers to bf16 moves the ends of the range by.
    assert (error <= scales.float() / 2 + (top - bottom + bottom.abs()) / 128).all()


def test_encode_ties_go_to_the_even_code():
    weights = torch.zeros(1, 64)
    weights[0, :6] = torch.tensor([0.5, 1.5, 2.5, 3.5, 14.5, 15.0])
    parts = formats.get("affine-4b-g64").encode(weights)
    codes = affine.unpack_codes(parts["weight"].view(torch.uint8), 4)
    assert codes[0, :6].tolist() == [0, 2, 2, 4, 14, 15]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_encode_refuses_what_bf16_cannot_hold(bad):
    weights = random_floats(3, 3, 64)
    weights[2, 7], weights[2, 8] = bad, -bad
    with pytest.raises(NumericalError, match=r"affine-4b-g64: .*row 2"):
        formats.get("affine-4b-g64").encode(weights)


def mxfp8_sample() -> tuple[dict[str, torch.Tensor], np.ndarray]:
    codes = torch.arange(512).to(torch.uint8).view(2, 256)
    codes[(codes & 127) == 127] = 0x39
    scales = (torch.arange(16) * 11 + 40).to(torch.uint8).view(2, 8)
    numbers = [[e8m0(code) for code in row] for row in scales.tolist()]
    rows = [[e4m3(c) * numbers[r][i // 32] for i, c in enumerate(row)] for r, row in enumerate(codes.tolist())]
    return {"weight": codes.view(torch.uint32), "scales": scales}, np.array(rows, dtype=np.float32)


def test_mxfp8_is_e4m3_codes_times_an_e8m0_scale_per_32():
    """K08 too: U8 and F8_E8M0 scales are the same weights."""
    parts, expected = mxfp8_sample()
    assert_same_bits(formats.get("mlx-mxfp8").decode(parts), expected)
    typed = {**parts, "scales": parts["scales"].view(torch.float8_e8m0fnu)}
    assert_same_bits(formats.get("mlx-mxfp8").decode(typed), expected)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_mxfp8_codes_that_mean_nan_are_refused_by_place(code):
    parts, _ = mxfp8_sample()
    parts["weight"].view(torch.uint8)[1, 70] = code
    with pytest.raises(FileError, match=r"mlx-mxfp8: code .*row 1, column 70$"):
        formats.get("mlx-mxfp8").decode(parts)


def test_mxfp8_scale_code_255_is_refused_by_place():
    """K07: E8M0 255 is NaN."""
    parts, _ = mxfp8_sample()
    parts["scales"][1, 3] = 255
    with pytest.raises(FileError, match=r"mlx-mxfp8: scale .*row 1, group 3$"):
        formats.get("mlx-mxfp8").decode(parts)


def test_modes_have_no_biases():
    parts, _ = mxfp8_sample()
    with pytest.raises(FileError, match="unexpected part biases"):
        formats.get("mlx-mxfp8").decode({**parts, "biases": torch.zeros(2, 8)})
    with pytest.raises(ShapeError, match="part scales: expected shape"):
        formats.get("mlx-mxfp8").decode({**parts, "scales": parts["scales"][:, :4]})
