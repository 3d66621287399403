"""FP8 weights, plain types and the registry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats_reference import assert_same_bits, e4m3, float32, random_bytes, random_floats

from bytefloor import formats
from bytefloor.errors import FileError, NumericalError, ShapeError, UnsupportedError
from bytefloor.formats import chunks

TILES = "FP8-E4M3-128x128"


def codes_sample(n_rows: int, n_columns: int) -> torch.Tensor:
    """Every finite code, in random order."""
    codes = random_bytes(n_rows + n_columns, n_rows, n_columns)
    codes.view(-1)[:256] = torch.arange(256).to(torch.uint8)[: codes.numel()]
    codes[(codes & 0x7F) == 0x7F] = 0x41
    return codes


def reference(codes: torch.Tensor, scale_at) -> np.ndarray:
    rows = [[float32(e4m3(c) * scale_at(n, k)) for k, c in enumerate(row)] for n, row in enumerate(codes.tolist())]
    return np.array(rows, dtype=np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_vector", [False, True])
def test_row_scales_multiply_their_row(dtype, is_vector):
    codes, scales = codes_sample(9, 70), (random_floats(1, 9, 1) * 0.01).to(dtype)
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scales[:, 0] if is_vector else scales}
    expected = reference(codes, lambda n, k: float(scales[n, 0]))
    assert_same_bits(formats.get("FP8-E4M3-row").decode(parts), expected)
    assert_same_bits(formats.get("FP8-E4M3-row").decode({**parts, "weight": codes}), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensor_scale_multiplies_every_weight(shape):
    codes, scale = codes_sample(4, 70), torch.tensor(0.0123)
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scale.reshape(shape)}
    assert_same_bits(formats.get("FP8-E4M3-tensor").decode(parts), reference(codes, lambda n, k: float(scale)))


@pytest.mark.parametrize(("n_rows", "n_columns"), [(256, 256), (130, 300), (1, 128), (129, 5), (128, 127)])
def test_tile_scales_multiply_their_tile_and_edge_tiles_may_be_cut(n_rows, n_columns):
    codes = codes_sample(n_rows, n_columns)
    scales = random_floats(2, -(-n_rows // 128), -(-n_columns // 128)) * 0.01
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales}
    out = formats.get(TILES).decode(parts)
    numbers = scales.tolist()
    assert_same_bits(out, reference(codes, lambda n, k: numbers[n // 128][k // 128]))


def test_decode_in_pieces_equals_decode_at_once(monkeypatch):
    codes = codes_sample(300, 200)
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": random_floats(2, 3, 2)}
    whole = formats.get(TILES).decode(parts)
    monkeypatch.setattr(chunks, "CPU_PIECE", 7 * 200)
    monkeypatch.setattr(chunks, "_threads_for", lambda out: 2)
    assert_same_bits(formats.get(TILES).decode(parts), whole.numpy())


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize(
    ("name", "scale_key", "shape"),
    [
        ("FP8-E4M3-row", "weight_scale", (200, 1)),
        ("FP8-E4M3-tensor", "weight_scale", ()),
        (TILES, "weight_scale_inv", (2, 3)),
    ],
)
def test_codes_that_mean_nan_are_refused_by_place(name, scale_key, shape, code, monkeypatch):
    monkeypatch.setattr(chunks, "SMALL_PIECE", 300 * 7)
    codes = codes_sample(200, 300)
    codes[150, 222] = codes[151, 3] = code
    with pytest.raises(FileError, match=rf"^{name}: code .*row 150, column 222$"):
        formats.get(name).decode({"weight": codes.view(torch.float8_e4m3fn), scale_key: torch.ones(shape)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused_by_place(bad):
    weight = codes_sample(200, 300).view(torch.float8_e4m3fn)
    row, tile = torch.ones(200, 1), torch.ones(2, 3)
    row[140] = tile[1, 2] = bad
    with pytest.raises(FileError, match=r"FP8-E4M3-row: scale .*row 140, group 0"):
        formats.get("FP8-E4M3-row").decode({"weight": weight, "weight_scale": row})
    with pytest.raises(FileError, match=r"weight_scale_inv .*row 1, group 2"):
        formats.get(TILES).decode({"weight": weight, "weight_scale_inv": tile})
    with pytest.raises(FileError, match=r"weight_scale is (nan|inf)"):
        formats.get("FP8-E4M3-tensor").decode({"weight": weight, "weight_scale": torch.tensor(bad)})


def test_wrong_shapes_and_dtypes_are_refused_by_part():
    weight = codes_sample(200, 300).view(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match=r"part weight_scale: expected shape \[200, 1\] or \[200\], found \[300\]"):
        formats.get("FP8-E4M3-row").decode({"weight": weight, "weight_scale": torch.ones(300)})
    with pytest.raises(ShapeError, match=r"part weight_scale: expected one value, found shape \[200, 1\]"):
        formats.get("FP8-E4M3-tensor").decode({"weight": weight, "weight_scale": torch.ones(200, 1)})
    with pytest.raises(ShapeError, match=r"part weight_scale_inv: expected shape \[2, 3\], found \[3, 2\]"):
        formats.get(TILES).decode({"weight": weight, "weight_scale_inv": torch.ones(3, 2)})
    with pytest.raises(ShapeError, match="part weight: expected dtype"):
        formats.get(TILES).decode({"weight": weight.view(torch.int8), "weight_scale_inv": torch.ones(2, 3)})
    with pytest.raises(FileError, match="part weight_scale is missing"):
        formats.get("FP8-E4M3-tensor").decode({"weight": weight})


def nearest_e4m3(value: float) -> float:
    """By search over all codes; a tie goes to the even code."""
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    return e4m3(min(codes, key=lambda code: (abs(e4m3(code) - value), code & 1)))


@pytest.mark.parametrize("name", ["FP8-E4M3-row", "FP8-E4M3-tensor"])
def test_encode_scales_by_absmax_over_448_and_takes_the_nearest_code(name):
    weights = random_floats(4, 3, 40) * torch.tensor([[1.0], [1e-4], [0.0]])
    parts = formats.get(name).encode(weights)
    largest = weights.abs().amax(dim=1, keepdim=True) if name.endswith("row") else weights.abs().amax()
    scale = torch.where(largest == 0, 1.0, largest / 448)
    assert_same_bits(parts["weight_scale"], scale.numpy())
    scaled = weights / scale
    expected = [[nearest_e4m3(value) for value in row] for row in scaled.tolist()]
    assert parts["weight"].dtype == torch.float8_e4m3fn
    assert parts["weight"].float().tolist() == expected
    decoded = formats.get(name).decode(parts)
    again = formats.get(name).encode(decoded)
    assert torch.equal(again["weight"].view(torch.uint8), parts["weight"].view(torch.uint8))


@pytest.mark.parametrize("name", ["FP8-E4M3-row", "FP8-E4M3-tensor", "F32", "F16", "BF16"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_encode_refuses_what_is_not_finite(name, bad):
    weights = random_floats(4, 3, 40)
    weights[1, 2] = bad
    with pytest.raises(NumericalError, match=rf"{name}: .*row 1"):
        formats.get(name).encode(weights)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_decode_to_the_gguf_packages_bits_and_encode_to_its_bytes(name):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    weights = random_floats(8, 50, 96) * torch.logspace(-9, 4, 50)[:, None]
    weights[0, :4] = torch.tensor([0.0, -0.0, 1e-40, -1e-8])
    values = formats.get(name).encode(weights)["values"]
    raw = gguf.quants.quantize(weights.numpy(), kind)
    assert values.view(torch.uint8).numpy().tobytes() == raw.tobytes()
    expected = gguf.quants.dequantize(raw.view(np.uint8), kind)
    assert_same_bits(formats.get(name).decode({"values": values}), expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_keep_vectors_and_return_memory_of_their_own(name):
    values = formats.get(name).encode(torch.arange(12.0).view(3, 4))["values"]
    out = formats.get(name).decode({"values": values})
    out.zero_()
    assert values.float().flatten().tolist() == list(range(12))
    assert formats.get(name).decode({"values": values[1]}).tolist() == [4, 5, 6, 7]
    with pytest.raises(ShapeError, match="part values: expected dtype"):
        formats.get(name).decode({"values": values.double()})


@pytest.mark.parametrize(("name", "beyond"), [("F16", 65520.0), ("BF16", 3.4e38)])
def test_encode_refuses_values_that_the_type_would_make_infinite(name, beyond):
    weights = torch.ones(2, 3)
    weights[1, 1] = beyond
    with pytest.raises(NumericalError, match=rf"{name}: .*row 1"):
        formats.get(name).encode(weights)


def test_encode_takes_float32_matrices_only():
    with pytest.raises(ShapeError, match=r"weights: expected dtype torch\.float32, found torch\.float16"):
        formats.get("F16").encode(torch.ones(2, 3).half())
    with pytest.raises(ShapeError, match="weights: expected 2 dimensions"):
        formats.get("Q8_0").encode(torch.ones(64))


def test_every_format_is_listed_under_its_own_name():
    assert all(name == record.name for name, record in formats.FORMATS.items())
    assert len(formats.FORMATS) == sum(
        len(module.FORMATS)
        for module in (
            formats.plain,
            formats.legacy,
            formats.kquants,
            formats.iquants,
            formats.ggml,
            formats.fp4,
            formats.affine,
            formats.fp8,
        )
    )


@pytest.mark.parametrize(
    ("wrong", "near"), [("q4k", "Q4_K"), ("NVFP4-model-opt", "NVFP4-modelopt"), ("affine-4b-g63", "affine-4b-g64")]
)
def test_unknown_name_is_refused_with_names_near_it(wrong, near):
    with pytest.raises(UnsupportedError, match=rf"{wrong} is not supported; did you mean .*{near}"):
        formats.get(wrong)
    assert formats.get(near).name == near


def test_name_near_nothing_is_refused_with_all_names():
    with pytest.raises(UnsupportedError, match="GPTQ-special is not supported"):
        formats.get("GPTQ-special")
