"""FP4 formats of safetensors files, against a reference that decodes one code at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats_reference import assert_same_bits, e2m1, e4m3, e8m0, float32, pairs, random_bytes, random_floats

from bytefloor import formats
from bytefloor.errors import FileError, NumericalError, ShapeError
from bytefloor.formats import chunks

# name: weight part, scale part, group, kind of scale
PAIRED = {
    "FP4-E2M1-g128": ("weight", "weight_scale", 128, "float32"),
    "NVFP4-modelopt": ("weight", "weight_scale", 16, "e4m3"),
    "NVFP4-compressed-tensors": ("weight_packed", "weight_scale", 16, "e4m3"),
    "MXFP4-modelopt": ("weight", "weight_scale", 32, "e8m0"),
    "MXFP4-compressed-tensors": ("weight_packed", "weight_scale", 32, "e8m0"),
    "mlx-mxfp4": ("weight", "scales", 32, "e8m0"),
    "mlx-nvfp4": ("weight", "scales", 16, "e4m3"),
}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
N, K = 6, 512


def scales_of(kind: str, n_rows: int, n_groups: int) -> tuple[torch.Tensor, list[list[float]]]:
    """Scales no two neighbours of which are equal, along rows or columns, as stored and as numbers."""
    index = torch.arange(n_rows * n_groups).view(n_rows, n_groups)
    if kind == "float32":
        scales = (index + 1).float() / 7 * torch.where(index % 3 == 0, -1.0, 1e-3)
        return scales, scales.tolist()
    if kind == "e8m0":
        codes = (index * 5 % 253).to(torch.uint8)
        return codes, [[e8m0(c) for c in row] for row in codes.tolist()]
    codes = (index * 3 % 254).to(torch.uint8)
    codes[codes == 0x7F] = 0x3A
    return codes, [[e4m3(c) for c in row] for row in codes.tolist()]


def sample(name: str) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Parts with every byte value among the codes, and what they mean."""
    weight_key, scale_key, group, kind = PAIRED[name]
    packed = random_bytes(1, N, K // 2)
    packed[0] = torch.arange(256)
    stored, numbers = scales_of(kind, N, K // group)
    weight = packed.view(torch.uint32) if name.startswith("mlx") else packed
    return {weight_key: weight, scale_key: stored}, pairs(packed, numbers, group)


@pytest.mark.parametrize("name", PAIRED)
def test_decode_equals_the_code_by_code_reference(name):
    """K06, the other order: neighbouring columns share a byte, the low nibble is the even one."""
    parts, expected = sample(name)
    assert_same_bits(formats.get(name).decode(parts), expected)


@pytest.mark.parametrize("name", [name for name, facts in PAIRED.items() if facts[3] in DTYPES])
def test_scale_codes_typed_u8_and_typed_as_floats_are_the_same_weights(name):
    """K08: U8 scales are codes, not integers."""
    parts, expected = sample(name)
    _, scale_key, _, kind = PAIRED[name]
    assert parts[scale_key].dtype == torch.uint8
    typed = {**parts, scale_key: parts[scale_key].view(DTYPES[kind])}
    assert_same_bits(formats.get(name).decode(typed), expected)


@pytest.mark.parametrize("code", [0, 1, 126, 127, 128, 254])
@pytest.mark.parametrize("name", [name for name, facts in PAIRED.items() if facts[3] == "e8m0"])
def test_e8m0_scale_is_two_to_the_code_minus_127(name, code):
    """K07: 127 is 1.0, and 0 is 2^-127, a subnormal and not zero."""
    weight_key, scale_key, _, _ = PAIRED[name]
    packed = torch.full((1, 16), 0x21, dtype=torch.uint8)
    packed = packed.view(torch.int32) if name.startswith("mlx") else packed
    out = formats.get(name).decode({weight_key: packed, scale_key: torch.tensor([[code]], dtype=torch.uint8)})
    assert out[0, 1] == e8m0(code) != 0
    assert_same_bits(out, np.array([[0.5 * e8m0(code), e8m0(code)] * 16], dtype=np.float32))


BAD_CODES = [(n, c) for n, f in PAIRED.items() for c in {"e8m0": [255], "e4m3": [0x7F, 0xFF]}.get(f[3], [])]


@pytest.mark.parametrize(("name", "code"), BAD_CODES)
@pytest.mark.parametrize("is_typed", [False, True])
def test_scale_codes_that_mean_nan_are_refused_by_place(name, code, is_typed, monkeypatch):
    """K07: E8M0 255; E4M3 0x7F and 0xFF."""
    monkeypatch.setattr(chunks, "SMALL_PIECE", 128)
    parts, _ = sample(name)
    scale_key, kind = PAIRED[name][1], PAIRED[name][3]
    for row, group in ((4, 3), (4, 5), (5, 0)):
        parts[scale_key][row, group] = code
    if is_typed:
        parts[scale_key] = parts[scale_key].view(DTYPES[kind])
    with pytest.raises(FileError, match=rf"^{name}: .*row 4, group 3$"):
        formats.get(name).decode(parts)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_float_scales_that_are_nan_or_infinite_are_refused_by_place(bad):
    parts, _ = sample("FP4-E2M1-g128")
    parts["weight_scale"][2, 3] = bad
    with pytest.raises(FileError, match=r"FP4-E2M1-g128: scale .*row 2, group 3$"):
        formats.get("FP4-E2M1-g128").decode(parts)


@pytest.mark.parametrize("value", [0.01, 3.0, 1.0 / 448, -2.5])
def test_nvfp4_per_tensor_scale_multiplies_in_modelopt_files_and_is_one_when_absent(value):
    """K09: dropped, it leaves weights too large by its inverse."""
    parts, plain = sample("NVFP4-modelopt")
    decode = formats.get("NVFP4-modelopt").decode
    scale = torch.tensor(value)
    packed, codes = parts["weight"], parts["weight_scale"].tolist()
    expected = pairs(packed, [[e4m3(c) for c in row] for row in codes], 16, float(scale))
    assert_same_bits(decode({**parts, "weight_scale_2": scale}), expected)
    assert_same_bits(decode({**parts, "weight_scale_2": scale.view(1)}), expected)
    assert_same_bits(decode({**parts, "weight_scale_2": torch.tensor(1.0)}), plain)
    assert_same_bits(decode(parts), plain)


@pytest.mark.parametrize("divisor", [100.0, 3.0, 1344.0, 0.37, 2688.0 / 0.7])
def test_nvfp4_divisor_and_multiplier_hold_the_same_weights(divisor):
    """K11: compressed-tensors divides by its global scale, ModelOpt multiplies."""
    parts, plain = sample("NVFP4-modelopt")
    stored = torch.tensor(divisor)
    multiplied = formats.get("NVFP4-modelopt").decode({**parts, "weight_scale_2": 1 / stored})
    renamed = {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"]}
    divided = formats.get("NVFP4-compressed-tensors").decode({**renamed, "weight_global_scale": stored})
    assert_same_bits(divided, multiplied.numpy())
    torch.testing.assert_close(divided, torch.from_numpy(plain) / divisor, rtol=2e-7, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_nvfp4_divisor_that_cannot_divide_is_refused(bad):
    parts, _ = sample("NVFP4-compressed-tensors")
    with pytest.raises(FileError, match="weight_global_scale is"):
        formats.get("NVFP4-compressed-tensors").decode({**parts, "weight_global_scale": torch.tensor(bad)})


def test_nvfp4_scale_of_the_other_convention_is_refused_not_ignored():
    parts, _ = sample("NVFP4-modelopt")
    with pytest.raises(FileError, match="unexpected part weight_global_scale"):
        formats.get("NVFP4-modelopt").decode({**parts, "weight_global_scale": torch.tensor(2.0)})


@pytest.mark.parametrize("name", PAIRED)
def test_wrong_shapes_and_dtypes_are_refused_by_part(name):
    parts, _ = sample(name)
    weight_key, scale_key, group, _ = PAIRED[name]
    decode = formats.get(name).decode
    with pytest.raises(ShapeError, match=rf"part {scale_key}: expected shape \[6, {K // group}\], found \[5, "):
        decode({**parts, scale_key: parts[scale_key][:5]})
    with pytest.raises(ShapeError, match=rf"part {scale_key}: expected shape"):
        decode({**parts, scale_key: parts[scale_key][:, :-1]})
    with pytest.raises(ShapeError, match=rf"part {scale_key}: expected dtype .*int64"):
        decode({**parts, scale_key: parts[scale_key].long()})
    with pytest.raises(ShapeError, match=rf"part {weight_key}: expected dtype .*float32"):
        decode({**parts, weight_key: torch.zeros(N, K // 2)})
    with pytest.raises(ShapeError, match=rf"part {weight_key}: expected .* multiple of"):
        decode({**parts, weight_key: parts[weight_key][:, :-1]})
    with pytest.raises(FileError, match=rf"part {scale_key} is missing"):
        decode({weight_key: parts[weight_key]})


@pytest.mark.parametrize("name", PAIRED)
def test_decode_in_pieces_equals_decode_at_once(name, monkeypatch):
    parts, expected = sample(name)
    monkeypatch.setattr(chunks, "CPU_PIECE", 384)
    monkeypatch.setattr(chunks, "_threads_for", lambda out: 2)
    assert_same_bits(formats.get(name).decode(parts), expected)


def test_swizzled_scales_change_the_weights():
    """Our test scales tell a permuted scale array from a plain one; equal exponents would hide it."""
    for name in PAIRED:
        parts, expected = sample(name)
        scale_key = PAIRED[name][1]
        permuted = {**parts, scale_key: parts[scale_key].roll(1, dims=1).contiguous()}
        assert (formats.get(name).decode(permuted).numpy() != expected).any()


def encode_g128(values: list[float], largest: float = 6.0) -> tuple[list[int], float]:
    """Codes of these values in a group whose largest magnitude is given; the scale is largest / 6."""
    row = torch.zeros(1, 128)
    row[0, : len(values)] = torch.tensor(values)
    row[0, -1] = largest
    parts = formats.get("FP4-E2M1-g128").encode(row)
    codes = [nibble for byte in parts["weight"][0].tolist() for nibble in (byte & 15, byte >> 4)]
    return codes[: len(values)], float(parts["weight_scale"])


def test_fp4_ties_go_to_the_larger_magnitude():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert encode_g128(ties) == ([1, 2, 3, 4, 5, 6, 7], 1.0)
    assert encode_g128([-tie for tie in ties]) == ([9, 10, 11, 12, 13, 14, 15], 1.0)
    below = [float(np.nextafter(np.float32(tie), np.float32(0))) for tie in ties]
    assert encode_g128(below) == ([0, 1, 2, 3, 4, 5, 6], 1.0)


def test_fp4_small_negative_becomes_code_8():
    assert encode_g128([-0.1, -1e-30, 0.1, 0.0]) == ([8, 8, 0, 0], 1.0)


def test_fp4_scale_is_absmax_over_6_and_1_for_a_group_of_zeros():
    weights = random_floats(5, 4, 256)
    weights[1, 128:] = 0
    parts = formats.get("FP4-E2M1-g128").encode(weights)
    largest = weights.view(4, 2, 128).abs().amax(dim=2)
    expected = largest / 6
    expected[1, 1] = 1.0
    assert_same_bits(parts["weight_scale"], expected.numpy())
    assert not parts["weight"][1, 64:].any()
    assert parts["weight"].dtype == torch.uint8
    assert parts["weight"].shape == (4, 128)


def test_fp4_encode_then_decode_is_nearest_and_stable():
    encode, decode = formats.get("FP4-E2M1-g128").encode, formats.get("FP4-E2M1-g128").decode
    weights = random_floats(6, 8, 384)
    parts = encode(weights)
    decoded = decode(parts)
    scale = parts["weight_scale"].repeat_interleave(128, dim=1)
    table = torch.tensor([e2m1(code) for code in range(16)])
    nearest = (weights[..., None] - table * scale[..., None]).abs().amin(dim=-1)
    torch.testing.assert_close((weights - decoded).abs(), nearest, rtol=1e-5, atol=1e-6)
    again = encode(decoded)
    assert torch.equal(again["weight"], parts["weight"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_fp4_encode_refuses_what_is_not_finite(bad):
    weights = random_floats(7, 3, 128)
    weights[2, 5] = bad
    with pytest.raises(NumericalError, match=r"FP4-E2M1-g128: .*row 2"):
        formats.get("FP4-E2M1-g128").encode(weights)


def test_fp4_encode_refuses_columns_that_do_not_fill_groups():
    with pytest.raises(ShapeError, match="multiple of 128, found 192"):
        formats.get("FP4-E2M1-g128").encode(torch.zeros(2, 192))


def test_reference_float32_rounds_and_overflows_as_ieee():
    assert float32(1e39) == float("inf")
    assert float32(0.1) == float(np.float32(0.1))
