"""Products of many rows, every form and rows around a tile's edges, against float64 over the same roundings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.launches import Card
from bytefloor.engine.row_products import FEW_ROWS, RowProduct, pad_rows
from bytefloor.formats import get, stream
from bytefloor.ops import OPS
from bytefloor.ops.row_tiles import from_row_tiles, to_row_tiles
from device_kernels import launch, random_parts
from gpu.test_tokens import FORMATS

EDGES = (1, 17, 31, 32, 33, 63, 65, 127, 129, 255, 257, 511, 512, 513)
BOUND = 2.0**-11
"""Of the sum of absolute products: float32 sums give 1e-6. A weight near the border of two bf16 numbers may become
either, and where a group has eight values under one scale they are many at once."""
BOUND_OF_MULTIPLES = 2.0**-9
"""Of tiles of few rows, where a form has multiples of a unit: these are rounded in place of the weights, which then all
differ from what they are compared with, as much as rounding does: by 1.4e-3 at the most, of 400 rows of 512 columns."""
MULTIPLES = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
NAN = float("nan")


def matrix(name: str, n: int, k: int, seed: int = 1) -> tuple[stream.StreamForm, Tensor, Tensor]:
    """(form, packed, float64 [n, k] of the weights as bf16)."""
    padded = ceil_div(n, 16) * 16
    parts = random_parts(name, padded, k, seed)
    scales = parts["scales"].dtype if name.startswith("affine") else None
    form = stream.choose(name, padded, k, scales)
    values = get(name).decode(parts)[:n].to("cuda").to(torch.bfloat16).double()
    return form, form.pack(_by_rows(name, parts, padded)), values


def _by_rows(name: str, parts: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """Scales of a tensor or of bands of rows as every row's own, as the engine packs them."""
    from bytefloor.engine.packed import _for_each_row

    return {key: _for_each_row(key, part, n) for key, part in parts.items()}


def run(
    weights: Sequence[tuple[stream.StreamForm, Tensor]],
    sizes: Sequence[int],
    x: Tensor,
    splits: int,
    activation: str | None,
    onto: Tensor | None = None,
) -> Tensor:
    """Float32 [T, N] of rows x [T, K]: outputs beyond them must stay NaN. onto: what outputs are added to."""
    n_rows, k = x.shape
    pitch, card = pad_rows(n_rows), Card(torch.cuda.get_device_properties(0).multi_processor_count)
    product = RowProduct(tuple(form for form, _ in weights), tuple(sizes), k, activation)
    kernel = product.kernel(pitch, card)
    tiles = to_row_tiles(x, pitch)
    # What padding holds must not matter.
    at = torch.arange(n_rows, pitch, device="cuda")
    tiles[:, at // 8, at % 8] = NAN
    n, missing = sum(sizes), 3 - len(sizes)
    packed = [tensor for _, tensor in weights]
    common = (tiles, *packed, *[None] * missing, *sizes, *[0] * missing)
    grid, steps = (product.n_blocks(splits, pitch, card), 1), ceil_div(k, 64)
    if activation:
        out = torch.full((ceil_div(n // 2, 64), pitch // 8, 8, 64), NAN, device="cuda", dtype=torch.bfloat16)
        launch(kernel, grid, *common, out, n_rows, pitch, pitch, steps, 1, False)
        rows = from_row_tiles(out, pitch, ceil_div(n // 2, 64) * 64)
        assert not bool(rows[:n_rows, n // 2 :].any())
        return rows[:n_rows, : n // 2]
    out = torch.full((splits, n_rows, n + 8), NAN, device="cuda")
    if onto is not None:
        out[0, :, :n] = onto
    launch(kernel, grid, *common, out, n_rows, pitch, n + 8, steps, splits, onto is not None)
    assert bool(out[:, :, n:].isnan().all())
    return out[:, :, :n].sum(0)


def bound_of(names: Sequence[str], n_rows: int) -> float:
    """For the columns of these formats."""
    return BOUND_OF_MULTIPLES if n_rows <= FEW_ROWS and set(names) & set(MULTIPLES) else BOUND


def check(found: Tensor, x: Tensor, weight: Tensor, *names: str) -> None:
    rounded = x.to(torch.bfloat16).double()
    expected, most = rounded @ weight.T, rounded.abs() @ weight.abs().T
    assert bool(found.isfinite().all())
    assert float(((found.double() - expected).abs() / (most + 1e-30)).max()) < bound_of(names, len(x))


@pytest.mark.parametrize("name", FORMATS)
def test_every_form_at_the_edges_of_tiles(name: str) -> None:
    for n, k in ((400, 1024), (48, 512)):
        form, packed, weight = matrix(name, n, k)
        for n_rows in EDGES if n == 400 else (40, 300):
            x = torch.randn(n_rows, k, device="cuda") * 10.0 ** torch.randint(-3, 4, (n_rows, 1), device="cuda")
            check(run([(form, packed)], [n], x, 1, None), x, weight, name)


@pytest.mark.parametrize("splits", [2, 3, 5, 8])
def test_columns_in_parts(splits: int) -> None:
    form, packed, weight = matrix("Q4_K", 272, 4096)
    for n_rows in (20, 100, 260):
        x = torch.randn(n_rows, 4096, device="cuda")
        check(run([(form, packed)], [272], x, splits, None), x, weight, "Q4_K")


def test_outputs_that_are_added_to_what_is_there() -> None:
    form, packed, _ = matrix("Q4_K", 272, 1024)
    for n_rows in (20, 100, 260):
        x, onto = torch.randn(n_rows, 1024, device="cuda"), torch.randn(n_rows, 272, device="cuda") * 100
        alone = run([(form, packed)], [272], x, 1, None)
        assert torch.equal(run([(form, packed)], [272], x, 1, None, onto), onto + alone)


@pytest.mark.parametrize("k", [576, 640, 1152, 2560, 5376])
def test_columns_that_are_no_whole_tiles_of_four(k: int) -> None:
    for name in ("Q4_0", "Q8_0", "BF16"):
        form, packed, weight = matrix(name, 320, k)
        x = torch.randn(70, k, device="cuda")
        check(run([(form, packed)], [320], x, 1, None), x, weight, name)


def test_matrices_of_different_forms_side_by_side() -> None:
    sizes = (512, 80, 96)
    for names in (("Q4_K", "Q5_K", "Q6_K"), ("Q4_K", "BF16", "Q8_0")):
        found = [matrix(name, n, 1024, seed=n) for name, n in zip(names, sizes, strict=True)]
        weight = torch.cat([values for _, _, values in found])
        for n_rows, splits in ((33, 2), (300, 1)):
            x = torch.randn(n_rows, 1024, device="cuda")
            check(run([(form, packed) for form, packed, _ in found], sizes, x, splits, None), x, weight, *names)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "affine-4b-g64"])
def test_gates(name: str, activation: str) -> None:
    n_gates = 328  # no whole tiles: neither of 128 rows nor of 64 outputs
    form, packed, weight = matrix(name, 2 * n_gates, 1024)
    for n_rows in (19, 63, 129, 257):
        x = torch.randn(n_rows, 1024, device="cuda") / 16
        found = run([(form, packed)], [2 * n_gates], x, 1, activation).double()
        rounded = x.to(torch.bfloat16).double()
        (gate, up), (gate_error, up_error) = (
            (rows[:, 0::2], rows[:, 1::2])
            for rows in (rounded @ weight.T, bound_of([name], n_rows) * (rounded.abs() @ weight.abs().T))
        )
        expected = OPS["glu"].reference(gate, up, activation)
        ones = torch.ones_like(gate)
        # bf16 keeps eight bits; slopes of either activation stay below 1.13.
        error = 2.0**-8 * expected.abs() + 1.13 * gate_error * up.abs()
        error += OPS["glu"].reference(gate, ones, activation).abs() * up_error + 1e-6 * expected.abs().max()
        assert bool(((found - expected).abs() <= error).all())


def test_a_row_that_is_not_finite_stays_alone() -> None:
    form, packed, _ = matrix("Q4_K", 256, 1024)
    x = torch.randn(70, 1024, device="cuda")
    clean = run([(form, packed)], [256], x, 1, None)
    x[3, 77], x[69] = NAN, float("inf")
    found = run([(form, packed)], [256], x, 1, None)
    others = [i for i in range(70) if i not in (3, 69)]
    assert bool(found[3].isnan().all())
    assert not bool(found[69].isfinite().any())
    assert torch.equal(found[others], clean[others])


def test_two_runs_give_the_same_bits() -> None:
    form, packed, _ = matrix("Q6_K", 1024, 2048)
    x = torch.randn(300, 2048, device="cuda") * 1e6  # beyond what float16 holds
    first = run([(form, packed)], [1024], x, 2, None)
    assert bool(first.isfinite().all())
    assert all(torch.equal(first, run([(form, packed)], [1024], x, 2, None)) for _ in range(5))
