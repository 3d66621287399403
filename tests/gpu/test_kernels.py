"""Each kernel against a float64 reference over the same rounded inputs; outputs are NaN before it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bytefloor.engine.kernels import spec
from bytefloor.formats import get, lookups, stream
from bytefloor.model.fuse import FusedProduct
from bytefloor.model.step import OpCall
from bytefloor.ops import OPS
from bytefloor.ops.round_to import round_to
from device_kernels import (
    form_of,
    fused_product,
    handed,
    launch,
    norm_call,
    random_parts,
    relative_error,
    run_product,
    step_state,
    taken,
)

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
LEGACY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16")
AFFINE = [f"affine-{bits}b-g{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
TIGHT = 2e-5


@pytest.mark.parametrize("k", [256, 1024])
@pytest.mark.parametrize("name", [*K_QUANTS, *LEGACY])
def test_packing_is_undone_bit_for_bit(name: str, k: int) -> None:
    n = 48
    parts = random_parts(name, n, k, 1)
    form = stream.choose(name, n, k)
    packed = form.pack(parts)
    assert packed.numel() == form.n_bytes(n, k)
    out = torch.full((n, k), float("nan"), device="cuda")
    launch(spec("unpack", 256, FORM=form.name, K=k), (64, 1), packed, None, 0, 1, n, out)
    expected = get(name).decode(parts)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
    rows = torch.tensor([47, 3, 3, 20], device="cuda")
    launch(spec("unpack", 256, FORM=form.name, K=k), (64, 1), packed, rows, 0, 0, 4, out)
    assert torch.equal(out[:4].view(torch.int32), expected[rows].view(torch.int32))
    launch(spec("unpack", 256, FORM=form.name, K=k), (64, 1), packed, None, 1, 2, 24, out)
    assert torch.equal(out[:24].view(torch.int32), expected[1::2].view(torch.int32))


@pytest.mark.parametrize("k", [64, 128, 576, 640])
@pytest.mark.parametrize("name", LEGACY)
def test_narrow_rows_are_packed_and_undone(name: str, k: int) -> None:
    test_packing_is_undone_bit_for_bit(name, k)


@pytest.mark.parametrize("k", [32, 96, 1008])
@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_rows_of_no_whole_record_are_filled_up(name: str, k: int) -> None:
    """Packed, undone and multiplied; normed over the columns that there are."""
    test_packing_is_undone_bit_for_bit(name, k)
    test_product_equals_float64(name, 320, k)
    check_norms(name, k, has_post_norm=True, has_scalar=True)


@pytest.mark.parametrize(("n", "k"), [(48, 1024), (3840, 3840), (272, 15360)])
@pytest.mark.parametrize("name", [*AFFINE, "Q2_K", "Q3_K", "FP8-E4M3-row", "mlx-mxfp8", *lookups.NAMES])
def test_products_and_values_of_other_formats(name: str, n: int, k: int) -> None:
    x = torch.randn(k, device="cuda")
    found, dense, _ = run_product(fused_product(1), [(name, n)], k, x)
    assert relative_error(found, dense @ round_to(x, "int16_g32").double()) < TIGHT
    parts, form = random_parts(name, n, k, 0), form_of(name, n, k)
    out = torch.full((n, k), float("nan"), device="cuda")
    launch(spec("unpack", 256, FORM=form.name, K=k), (64, 1), form.pack(parts), None, 0, 1, n, out)
    assert torch.equal(out.double(), dense)


@pytest.mark.parametrize(("n", "k"), [(16, 256), (48, 1024), (8192, 512), (3840, 4096), (272, 15360)])
@pytest.mark.parametrize("name", [*K_QUANTS, *LEGACY])
def test_product_equals_float64(name: str, n: int, k: int) -> None:
    """Every form, from one tile in one block to tiles shared between blocks."""
    x = torch.randn(k, device="cuda")
    found, dense, _ = run_product(fused_product(1), [(name, n)], k, x)
    assert relative_error(found, dense @ round_to(x, "int16_g32").double()) < TIGHT


@pytest.mark.parametrize("name", [*K_QUANTS, "Q4_1", "Q5_1", "Q4_0", "Q5_0"])
def test_large_activations_keep_their_sums(name: str) -> None:
    """K01: blocks of 3000.0, whose sum no float16 holds, times types with minimums and offsets."""
    x = torch.full((512,), 3000.0, device="cuda")
    found, dense, _ = run_product(fused_product(1), [(name, 64)], 512, x)
    assert relative_error(found, dense @ x.double()) < TIGHT


def test_nan_activations_stay_nan() -> None:
    """N06: one NaN must reach the logits; codes of zero would hide it."""
    x = torch.randn(512, device="cuda")
    x[77] = float("nan")
    found, _, _ = run_product(fused_product(1), [("Q4_K", 64)], 512, x)
    assert bool(found.isnan().all())
    norm, planes = torch.randn(512, device="cuda"), torch.randn(2, 512, device="cuda")
    planes[1, 300] = float("nan")
    fused = fused_product(1, norm=norm_call(), has_delta=True)
    found, _, _ = run_product(fused, [("Q6_K", 64)], 512, torch.randn(512, device="cuda"), delta=planes, norm=norm)
    assert bool(found.isnan().all())
    glu = OpCall(OPS["glu"], "test", {}, {"activation": "silu"}, None, {})
    found, _, _ = run_product(fused_product(1, glu=glu), [("Q6_K", 128)], 512, x)
    assert bool(found.isnan().all())


@pytest.mark.parametrize("largest", [3e37, 1.2e38, 3e38])
def test_the_largest_activations_are_multiplied_or_seen(largest: float) -> None:
    """N06: the fast division by more than 2^126 gives 0. Sums beyond float32 are to be seen as such."""
    x = torch.zeros(512, device="cuda")
    x[77] = largest
    found, dense, _ = run_product(fused_product(1), [("BF16", 64)], 512, x)
    expected = dense @ x.double()
    is_finite = expected.float().isfinite()
    assert relative_error(found[is_finite], expected[is_finite]) < TIGHT
    assert not bool(found[~is_finite].isfinite().any())


def test_all_zero_activations_give_zero() -> None:
    found, _, _ = run_product(fused_product(1), [("Q4_K", 64)], 512, torch.zeros(512, device="cuda"))
    assert not found.any()


@pytest.mark.parametrize("n_multiprocessors", [7, 132])
def test_segments_of_different_formats_in_one_launch(n_multiprocessors: int) -> None:
    """G16: q and k in Q4_K beside v in Q6_K, and the borders anywhere in a block's run."""
    x = torch.randn(1024, device="cuda")
    found, dense, _ = run_product(
        fused_product(3), [("Q4_K", 512), ("Q5_K", 80), ("Q6_K", 96)], 1024, x, n_multiprocessors
    )
    assert relative_error(found, dense @ round_to(x, "int16_g32").double()) < TIGHT


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt()


@pytest.mark.parametrize("has_scalar", [False, True])
@pytest.mark.parametrize("has_post_norm", [False, True])
@pytest.mark.parametrize("k", [512, 3840])
def test_norms_before_a_product(k: int, has_post_norm: bool, has_scalar: bool) -> None:
    """The residual takes up the last block's planes, is written once, and is normed for the product."""
    check_norms("Q4_K", k, has_post_norm, has_scalar)


def check_norms(name: str, k: int, has_post_norm: bool, has_scalar: bool) -> None:
    x, planes = torch.randn(k, device="cuda"), torch.randn(3, k, device="cuda")
    post, norm = torch.randn(k, device="cuda"), torch.randn(k, device="cuda")
    scalar = torch.tensor([0.37], device="cuda")
    fused = fused_product(1, norm=norm_call(), has_delta=True)
    fused = FusedProduct(
        **{**vars(fused), "post_norm": norm_call() if has_post_norm else None, "scalar": scalar if has_scalar else None}
    )
    found, dense, x_out = run_product(fused, [(name, 320)], k, x, delta=planes, post=post, norm=norm, scalar=scalar)
    delta = planes.double().sum(0)
    residual = x.double() + (rms(delta) * post.double() if has_post_norm else delta)
    residual = residual * scalar.double() if has_scalar else residual
    assert relative_error(x_out, residual) < TIGHT
    h = rms(residual) * norm.double()
    # A value at the border of two codes may take either: float32 sums decide it.
    assert relative_error(found, dense @ round_to(h, "int16_g32")) < 2e-5


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("n_multiprocessors", [1, 3, 5, 132])
@pytest.mark.parametrize("n", [64, 192, 1024])
def test_glu_of_gate_and_up_rows_by_turns(n: int, n_multiprocessors: int, activation: str) -> None:
    x = torch.randn(512, device="cuda")
    glu = OpCall(OPS["glu"], "test", {}, {"activation": activation}, None, {})
    found, dense, _ = run_product(fused_product(1, glu=glu), [("Q6_K", n)], 512, x, n_multiprocessors)
    y = dense @ round_to(x, "int16_g32").double()
    assert relative_error(found, OPS["glu"].reference(y[0::2], y[1::2], activation)) < TIGHT


@pytest.mark.parametrize("has_post_norm", [False, True])
def test_a_gate_times_per_layer_inputs(has_post_norm: bool) -> None:
    """The residual takes up the last block's planes, and goes into the gate as it is."""
    k, x, planes = 640, torch.randn(640, device="cuda"), torch.randn(2, 640, device="cuda")
    post, factor = torch.randn(k, device="cuda"), torch.randn(256, device="cuda")
    glu = OpCall(OPS["glu"], "test", {}, {"activation": "gelu_tanh"}, None, {})
    select = OpCall(OPS["select"], "test", {}, {"index": 0}, None, {})
    fused = fused_product(1, has_delta=True, glu=glu, factor=select, post_norm=norm_call() if has_post_norm else None)
    found, dense, x_out = run_product(fused, [("Q8_0", 256)], k, x, delta=planes, post=post, factor=factor)
    delta = planes.double().sum(0)
    residual = x.double() + (rms(delta) * post.double() if has_post_norm else delta)
    assert relative_error(x_out, residual) < TIGHT
    y = dense @ round_to(residual, "int16_g32")
    assert relative_error(found, OPS["glu"].reference(y, factor.double(), "gelu_tanh")) < 2e-5


@pytest.mark.parametrize(("n_layers", "width", "kind"), [(3, 256, "Q4_K"), (42, 256, "Q6_K"), (9, 64, "Q8_0")])
def test_per_layer_inputs_equal_float64(n_layers: int, width: int, kind: str) -> None:
    parts, form = random_parts(kind, 48, n_layers * width, 5), stream.choose(kind, 48, n_layers * width)
    projected, weight = torch.randn(2, n_layers * width, device="cuda"), torch.randn(width, device="cuda")
    kernel = spec(
        "per_layer", 256, FORM=form.name, L=n_layers, P=width, V=48, PLANES=2, EPS=1e-6, PROJECTED_SCALE=0.1,
        OWN_SCALE=16.0, SCALE=0.5**0.5,
    )  # fmt: skip
    out = torch.full((n_layers * width,), float("nan"), device="cuda")
    launch(kernel, (-(-n_layers // 8), 1), handed(projected), weight, form.pack(parts), step_state(41), out)
    own = get(kind).decode(parts)[41].double().view(n_layers, width) * 16
    rows = projected.double().sum(0).view(n_layers, width) * 0.1
    expected = (rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() + own) * 0.5**0.5
    assert relative_error(taken(out).view(n_layers, width), expected) < TIGHT


def run_logits(values: Tensor, banned: list[int], cap: float) -> tuple[Tensor, int]:
    v = values.shape[-1]
    kernel = spec("logits", 256, V=v, ROWS=v, PLANES=values.shape[0], CAP=float(cap), BLOCKS=8, HISTORY=9)
    out = torch.full((v,), float("nan"), device="cuda")
    mask = torch.zeros(v, dtype=torch.uint8, device="cuda")
    mask[banned] = 1
    state, history = step_state(7, 3), torch.zeros(9, dtype=torch.int32, device="cuda")
    bests, counter = torch.zeros(16, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    launch(kernel, (8, 1), handed(values), mask, out, bests, counter, state, history)
    assert state[1:].tolist() == [4, 2, 0]
    assert history[3].item() == state[0].item()
    return out, int(state[0])


def test_best_token_is_the_lowest_of_equals_and_never_a_banned_one() -> None:
    values = torch.randn(2, 5000, device="cuda")
    values[0, [17, 900, 4999]] = 50.0
    values[1, [17, 900, 4999]] = 0.0
    logits, token = run_logits(values, [], 0.0)
    assert torch.equal(logits, taken(handed(values)).sum(0))
    assert token == 17
    assert run_logits(values, [17], 0.0)[1] == 900
    capped, _ = run_logits(values, [], 30.0)
    expected = (values.double().sum(0) / 30).tanh() * 30
    assert relative_error(capped, expected) < TIGHT


def test_nan_logits_are_reported_not_sampled() -> None:
    """N06"""
    values = torch.randn(1, 5000, device="cuda")
    values[0, 4321] = float("nan")
    assert run_logits(values, [], 0.0)[1] == -1
