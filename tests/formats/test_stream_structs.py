"""The CUDA structs of ops/stream.cuh, compiled for the CPU: what a warp makes of a record, without a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from bytefloor.engine.kernels import FORMS, SOURCES
from bytefloor.formats import finite, get, lookups, stream

WARP = Path(__file__).resolve().parent.parent / "warp"
AFFINE = tuple(f"affine-{bits}b-g{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128))
NVFP4 = ("NVFP4", "NVFP4-modelopt", "NVFP4-compressed-tensors", "mlx-nvfp4")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
FP8 = ("FP8-E4M3-row", "FP8-E4M3-tensor", "FP8-E4M3-128x128", "mlx-mxfp8")
NAMES = (*K_QUANTS, *FP8, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", *lookups.NAMES, *AFFINE)
COLUMNS = (64, 128, 256, 512)
"""One, two and four steps a record, and two records."""


def scales_of(name: str) -> torch.dtype | None:
    """Both types of 16 bits have their turn."""
    return (torch.float16 if "g64" in name else torch.bfloat16) if name in AFFINE else None


def forms_of(name: str) -> dict[int, stream.StreamForm]:
    return {k: stream.choose(name, 16, k, scales_of(name)) for k in COLUMNS if k % get(name).block == 0}


def symbol(form: stream.StreamForm) -> str:
    return re.sub(r"\W", "_", form.name)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every form's dot, value, fragments and multiples, over the text that the GPU's compiler gets."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("warp")
    text = "".join((SOURCES / header).read_text() for header in (*FORMS, "stream_tokens.cuh", "stream_records.cuh"))
    assert '#include "tensor_core.cuh"\n' in text
    text = text.replace('#include "fragments.cuh"\n', (SOURCES / "fragments.cuh").read_text())
    for include in ('#include "tensor_core.cuh"\n', "#include <cuda_fp16.h>\n", "#pragma once\n"):
        text = text.replace(include, "")
    (folder / "stream_text.cuh").write_text(text)
    names = {symbol(form): form.name for name in NAMES for form in forms_of(name).values()}
    (folder / "forms.inc").write_text("".join(f"FORM({key}, {value})\n" for key, value in names.items()))
    command = ["g++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", "-I", str(folder)]
    target = folder / "warp.so"
    subprocess.run([*command, str(WARP / "warp.cpp"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def random_parts(name: str, k: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    record = get(name)
    if name in AFFINE:
        words = torch.randint(
            -(2**31), 2**31, (16, round(k * (record.bits_per_weight - 32 / record.block)) // 32), generator=generator
        )
        scales, biases = (torch.randn(16, k // record.block, generator=generator).to(scales_of(name)) for _ in range(2))
        return {"weight": words.to(torch.int32), "scales": scales, "biases": biases}
    if name in FP8:
        return random_bytes(name, k, generator)
    if name in lookups.NAMES and record.block_bytes is None:
        return random_pairs(name, k, generator)
    if record.block_bytes is None:
        values = torch.randn(16, k, generator=generator)
        return {"values": values.to(torch.bfloat16 if name == "BF16" else torch.float16)}
    blocks = torch.randint(0, 256, (16, k // record.block, record.block_bytes), generator=generator, dtype=torch.uint8)
    if name in ("MXFP4", "NVFP4"):
        # Scale codes that mean NaN are refused when a file is read.
        blocks[..., : 1 if name == "MXFP4" else 4] %= 127
        scale = {"scale": torch.tensor([0.37])} if name == "NVFP4" else {}
        return {"blocks": blocks.flatten(1), **scale}
    for offset in finite.SCALE_OFFSETS[name]:
        scale = torch.randn(16, k // record.block, 1, generator=generator).half()
        blocks[..., offset : offset + 2] = scale.view(torch.uint8)
    return {"blocks": blocks.flatten(1)}


def random_bytes(name: str, k: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Every E4M3 code but those that mean NaN; scales as the format has them."""
    codes = torch.randint(0, 127, (16, k), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (16, k), generator=generator, dtype=torch.uint8) << 7
    if name == "mlx-mxfp8":
        scales = torch.randint(0, 200, (16, k // 32), generator=generator, dtype=torch.uint8)
        return {"weight": codes.view(torch.uint32), "scales": scales}
    shape = {"FP8-E4M3-row": (16, 1), "FP8-E4M3-tensor": (), "FP8-E4M3-128x128": (1, -(-k // 128))}[name]
    return {get(name).parts[0]: codes, get(name).parts[1]: torch.randn(shape, generator=generator)}


def as_packed(name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scales that serve several rows are repeated for each before they are packed."""
    if name not in FP8 or name == "mlx-mxfp8":
        return parts
    key = get(name).parts[1]
    by_row = parts[key] if name == "FP8-E4M3-row" else parts[key].reshape(1, -1).expand(16, -1)
    return {**parts, key: by_row}


def random_pairs(name: str, k: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    record = get(name)
    codes, scales = record.parts
    packed = torch.randint(0, 256, (16, k // 2), generator=generator, dtype=torch.uint8)
    if name.startswith("mlx"):
        packed = packed.view(torch.uint32)
    if name.startswith("FP4"):
        found = torch.randn(16, k // 128, generator=generator)
    else:
        found = torch.randint(0, 127, (16, k // record.block), generator=generator, dtype=torch.uint8)
    whole = {key: torch.tensor([0.37]) for key in record.optional_parts}
    return {codes: packed, scales: found, **whole}


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


CASES = [(name, k) for name in NAMES for k in forms_of(name)]


@pytest.mark.parametrize(("name", "k"), CASES)
def test_every_value_is_that_of_the_format(library: ctypes.CDLL, name: str, k: int) -> None:
    form, parts = forms_of(name)[k], random_parts(name, k)
    packed = form.pack(as_packed(name, parts)).numpy()[0]
    found = np.empty((len(packed), 16, form.columns), np.float32)
    for record, out in zip(packed, found, strict=True):
        assert library[f"values_{symbol(form)}"](pointer(record), pointer(out)) == form.columns
    expected = get(name).decode(parts).numpy()
    assert np.array_equal(np.concatenate(list(found), axis=1).view(np.int32), expected.view(np.int32))


SPLIT = ("Q3_K", "Q6_K", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "FP4-E2M1-g128", *NVFP4)
"""Of these a scale is two bf16 numbers. Affine codes with scales of bf16 are rounded once, where value() rounds too."""


def owned_by_lanes(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of what fragments() gives, [step, group, lane, k16 step s, fragment i, element of a pair]."""
    step, group, lane, s, i, j = np.indices((columns // 64, 2, 32, 2, 4, 2))
    return lane // 4 + 8 * (i % 2), 64 * step + 32 * group + 8 * (lane % 4) + 4 * s + 2 * (i // 2) + j


@pytest.mark.parametrize(("name", "k"), CASES)
def test_fragments_are_the_values_in_bf16(library: ctypes.CDLL, name: str, k: int) -> None:
    """Each lane has its own sixteen weights in the order of tensor cores; few are the neighbour of the nearest bf16."""
    form, parts = forms_of(name)[k], random_parts(name, k)
    rows, columns = owned_by_lanes(form.columns)
    dense = get(name).decode(parts).float()
    found = np.empty((16, dense.shape[1]), np.uint16)
    for i, record in enumerate(form.pack(as_packed(name, parts)).numpy()[0]):
        words = np.empty(rows.shape, np.uint16)
        library[f"fragments_{symbol(form)}"](pointer(record), pointer(words))
        found[rows, i * form.columns + columns] = words
    got = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).double()
    nearest = dense.bfloat16().double()
    is_rounded_otherwise = name in SPLIT or scales_of(name) == torch.bfloat16
    assert (got != nearest).double().mean() <= (0.002 if is_rounded_otherwise else 0)
    ulp = torch.exp2((torch.frexp(nearest).exponent.clamp(min=-125) - 8).double())
    assert ((got - nearest).abs() <= ulp).all()


MULTIPLES = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
MIDDLES = {"Q4_K": 8, "Q5_K": 16}
"""Codes at which a multiple is what the minimum leaves, of forms that have minimums."""


def multiples_of(
    library: ctypes.CDLL, name: str, k: int, parts: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 [16, k] of weights as products of few rows have them, unit times multiple, and of those of the format."""
    form = forms_of(name)[k]
    rows, columns = owned_by_lanes(form.columns)
    found = np.empty((16, k))
    for i, record in enumerate(form.pack(as_packed(name, parts)).numpy()[0]):
        units, words = np.empty((8, 4, 2), np.float32), np.empty(rows.shape, np.uint16)
        assert library[f"multiples_{symbol(form)}"](pointer(record), pointer(units), pointer(words))
        assert (units == units[:, :1]).all()  # the four lanes of a row agree
        multiples = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).double().numpy()
        found[rows, i * form.columns + columns] = multiples * units[:, 0].T.reshape(16)[rows]
    return torch.from_numpy(found), get(name).decode(parts).double()


def with_codes(name: str, parts: dict[str, torch.Tensor], code: int) -> torch.Tensor:
    """Float64 [16, k] of Q4_K or Q5_K with one code everywhere."""
    blocks = parts["blocks"].clone().view(16, -1, get(name).block_bytes)
    blocks[..., -128:] = (code & 15) * 17
    blocks[..., 16:-128] = 255 * (code >> 4)
    return get(name).decode({"blocks": blocks.flatten(1)}).double()


def with_scales(name: str, d: float, dmin: float, sc: torch.Tensor, mn: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random codes of Q4_K or Q5_K under d, dmin and 6-bit scales and minimums [16, k / 256, 8]."""
    parts = random_parts(name, 256 * sc.shape[1])
    blocks = parts["blocks"].view(16, sc.shape[1], -1)
    blocks[..., :4] = torch.tensor([d, dmin], dtype=torch.float16).view(torch.uint8)
    sc, mn = sc.to(torch.uint8), mn.to(torch.uint8)
    blocks[..., 4:8] = sc[..., :4] | sc[..., 4:] >> 4 << 6
    blocks[..., 8:12] = mn[..., :4] | mn[..., 4:] >> 4 << 6
    blocks[..., 12:16] = sc[..., 4:] & 15 | (mn[..., 4:] & 15) << 4
    return parts


def cost(found: torch.Tensor, values: torch.Tensor) -> float:
    """Root mean square of errors, over that of the values in bf16."""
    return float(((found - values).square().mean() / (values.bfloat16().double() - values).square().mean()).sqrt())


@pytest.mark.parametrize(("name", "k"), [(name, k) for name in MULTIPLES for k in (256, 512)])
def test_multiples_of_units_are_the_values(library: ctypes.CDLL, name: str, k: int) -> None:
    """Rounded once; what a minimum leaves of the middle code, once or twice before. Any bytes: d and dmin have nothing
    to do with each other."""
    parts = random_parts(name, k)
    found, values = multiples_of(library, name, k, parts)
    most = 1.01 * 2.0**-8 * values.abs()
    if name in MIDDLES:
        left, minimum = (with_codes(name, parts, code).abs() for code in (MIDDLES[name], 0))
        most += 1.01 * 2.0**-7 * left + 2.0**-16 * minimum
    assert ((found - values).abs() <= most).all()
    assert cost(found, values) < (3**0.5 if name in MIDDLES else 1.1)


@pytest.mark.parametrize("name", list(MIDDLES))
def test_minimums_as_quantised_cost_no_more_than_bf16(library: ctypes.CDLL, name: str) -> None:
    """Weights on both sides of zero: a minimum is about half of what codes reach."""
    generator = torch.Generator().manual_seed(1)
    sc = torch.randint(20, 64, (16, 2, 8), generator=generator)
    middle = (MIDDLES[name] - 0.5) * (0.8 + 0.4 * torch.rand(sc.shape, generator=generator))
    d, dmin = 0.00271, 0.00271 * 1.13 * MIDDLES[name]
    parts = with_scales(name, d, dmin, sc, (sc * middle * d / dmin).round())
    assert cost(*multiples_of(library, name, 512, parts)) < 1.1


ENDS = ((0.0, 0.37), (0.0, -65504.0), (6e-8, 65504.0), (-65504.0, 6e-8), (0.0, 0.0), (0.5, 0.0))


@pytest.mark.parametrize(("d", "dmin"), ENDS)
@pytest.mark.parametrize("name", list(MIDDLES))
def test_scales_at_their_ends_leave_multiples_finite(library: ctypes.CDLL, name: str, d: float, dmin: float) -> None:
    """A row of constant groups has d = 0, and where dmin is 0 too its weights are exactly 0."""
    sc, mn = (torch.arange(16 * 8).view(16, 1, 8) * factor % 64 for factor in (1, 5))
    found, values = multiples_of(library, name, 256, with_scales(name, d, dmin, sc, mn))
    assert ((found - values).abs() <= 2.0**-7 * values.abs().amax()).all()
    assert d or ((found - values).abs() <= 2.0**-8 * values.abs()).all()


def random_activations(k: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values float64 [k], codes int8 [k / 32, 2, 32], scales float32 [k / 32, 4]) of one token."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-32512, 32513, k)
    scale = generator.random(k // 32).astype(np.float32)
    high = (codes + 128) >> 8
    planes = np.stack((high, codes - 256 * high)).astype(np.int8).reshape(2, -1, 32)
    halves = codes.reshape(-1, 2, 16).sum(2)
    sums = np.stack((np.ones_like(halves[:, 0]), halves[:, 0], halves[:, 1], halves.sum(1)), axis=1)
    scales = np.ascontiguousarray((sums * scale[:, None]).astype(np.float32))
    return codes * np.repeat(scale, 32).astype(np.float64), np.ascontiguousarray(planes.transpose(1, 0, 2)), scales


@pytest.mark.parametrize(("name", "k"), CASES)
def test_a_warps_dot_products_are_right(library: ctypes.CDLL, name: str, k: int) -> None:
    """Four lanes together have rows g and g + 8; the sums of codes serve minimums and offsets."""
    form, parts = forms_of(name)[k], random_parts(name, k)
    x, codes, scales = random_activations(k, k)
    rows = np.zeros(16)
    for i, record in enumerate(form.pack(as_packed(name, parts)).numpy()[0]):
        out = np.empty((8, 4, 2), np.float32)
        dot = library[f"dot_{symbol(form)}"]
        n_bytes = dot(pointer(record), pointer(codes), pointer(scales), i * form.columns, pointer(out))
        assert n_bytes == form.record_bytes
        rows += out.astype(np.float64).sum(1).T.reshape(16)
    dense = get(name).decode(parts).double().numpy()
    error = np.abs(rows - dense @ x) / (np.abs(dense) @ np.abs(x))
    assert error.max() < 2e-6


@pytest.mark.parametrize(("name", "k"), CASES)
def test_eight_tokens_get_the_bits_that_each_gets_alone(library: ctypes.CDLL, name: str, k: int) -> None:
    """K05: lanes of one token are added by pairs, (0 + 1) + (2 + 3), as the kernel of one row adds them."""
    form = forms_of(name)[k]
    tokens = [random_activations(k, seed) for seed in range(8)]
    codes = np.ascontiguousarray(np.stack([t[1] for t in tokens], axis=1))
    scales = np.ascontiguousarray(np.stack([t[2] for t in tokens], axis=1))
    for i, record in enumerate(form.pack(as_packed(name, random_parts(name, k))).numpy()[0]):
        together = np.empty((8, 4, 2, 2), np.float32)  # g, token of a quad, quad, row
        library[f"tokens_{symbol(form)}"](
            pointer(record), pointer(codes), pointer(scales), i * form.columns, pointer(together)
        )
        for token, (_, own_codes, own_scales) in enumerate(tokens):
            out = np.empty((8, 4, 2), np.float32)
            dot = library[f"dot_{symbol(form)}"]
            dot(pointer(record), pointer(own_codes), pointer(own_scales), i * form.columns, pointer(out))
            alone = (out[:, 0] + out[:, 1]) + (out[:, 2] + out[:, 3])
            found = together[:, token % 4, token // 4]
            assert np.array_equal(found.view(np.int32), alone.view(np.int32))
