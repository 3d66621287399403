"""Each kernel against a float64 reference over the same rounded inputs; outputs are NaN before it runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.kernels import spec
from bytefloor.engine.launches import Card, plan_attention
from bytefloor.formats import get, lookups, stream
from bytefloor.model.fuse import FusedAttention, FusedProduct
from bytefloor.model.step import CacheKind, CacheLayer, OpCall
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
SPLIT = 5e-5
"""Queries and shares are split in two bf16: 16 bits, of scores that are tens."""


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


ATTENTION_CASES = [
    # head size, query heads, kv heads, window, position, V from K, RoPE
    *[(e, 4, 2, None, 70, False, "split") for e in (64, 80, 96, 128, 256, 512)],
    *[(64, h, 1, None, 33, False, "interleaved") for h in (1, 2, 3, 5, 7, 8, 16)],
    *[(128, 8, 2, None, p, False, "split") for p in (0, 1, 31, 32, 62, 63, 64, 65, 127, 128, 190, 191, 192, 383, 700)],
    *[(256, 4, 2, 100, p, False, "split") for p in (0, 98, 99, 100, 127, 128, 163, 164, 500, 640)],
    *[(256, 4, 2, 300, p, False, "split") for p in (191, 192, 223, 224, 298, 299, 300, 319, 320, 511, 512, 640)],
    *[(512, 16, 1, None, p, True, "split") for p in (175, 191, 192, 207)],
    (512, 16, 1, None, 300, True, "split"),
    (256, 2, 1, 16, 77, False, None),
]
LONG_CASES = [(e, 4, 2, None, 9001, False, "split") for e in (64, 128, 256, 512)] + [
    (128, 4, 2, 5000, 9001, False, "split"),
    (256, 16, 8, 1024, 9001, False, "split"),
    (512, 16, 1, None, 9001, True, "split"),
    (64, 9, 3, None, 4000, False, "interleaved"),
]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_equals_float64(case: tuple) -> None:
    """S02, N02, N04, R08: tile and window edges, ring wrap, every head size and group; NaN outside the live band."""
    check_attention(*case)


@pytest.mark.parametrize("n_multiprocessors", [4, 132])
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_attention_over_several_tiles_a_run_equals_float64(case: tuple, n_multiprocessors: int) -> None:
    """F03: many runs and few, so that each goes over many tiles, the maximum moving from tile to tile."""
    check_attention(*case, capacity=16384, n_multiprocessors=n_multiprocessors)


def check_attention(
    e: int,
    n_heads: int,
    j: int,
    window: int | None,
    position: int,
    has_v_from_k: bool,
    style: str | None,
    capacity: int = 1024,
    n_multiprocessors: int = 132,
) -> None:
    generator = torch.Generator("cuda").manual_seed(position * 1000 + e)
    plan = CachePlan(capacity, chunk=64)
    kind = CacheKind("kind", j, e, window, "bf16")
    frequencies = tuple(0.0 if i % 5 == 4 else 10000.0 ** (-2 * i / e) for i in range(e // 2))
    rope = OpCall(OPS["rope"], "test", {}, {"style": style, "inverse_frequencies": frequencies}, None, {})
    norm = norm_call()
    attention = OpCall(OPS["attention"], "test", {}, {"scale": 0.3}, None, {"H": n_heads})
    fused = FusedAttention(
        "test", attention, norm, norm, norm, rope if style else None, CacheLayer(kind, 0), True, has_v_from_k, ()
    )
    launched = plan_attention(fused, n_heads, 2, 1e-6, plan, Card(n_multiprocessors))
    n_table, page = plan.n_table(kind), plan.page_size
    table = torch.randperm(n_table, generator=torch.Generator().manual_seed(e)).to(torch.int32) + 1
    cache = torch.full((n_table + 2, 2, j, page, e), float("nan"), dtype=torch.bfloat16, device="cuda")
    first = 0 if window is None else max(0, position - window + 1)
    old = torch.randn(2, position, j, e, generator=generator, device="cuda").bfloat16()
    for p in range(first, position):
        cache[int(table[(p // page) % n_table]), :, :, p % page] = old[:, p]
    rows = (n_heads + j + (0 if has_v_from_k else j)) * e
    qkv = torch.randn(2, rows, generator=generator, device="cuda")
    q_weight, k_weight = torch.randn(2, e, generator=generator, device="cuda")
    weights = [torch.tensor(frequencies, dtype=torch.float64, device="cuda"), cache, table.cuda(), n_table]
    parts = torch.zeros(launched.n_parts, dtype=torch.int64, device="cuda")
    sums = torch.zeros(launched.n_sums, dtype=torch.int64, device="cuda")
    out = torch.full((n_heads * e,), float("nan"), device="cuda")
    found = []
    for n_steps in (1, 2):  # either parity, over what the other left
        launch(
            launched.kernel, (launched.n_head_groups, launched.max_runs), handed(qkv, n_steps), q_weight, k_weight,
            *weights, step_state(0, position, n_steps), parts, sums, 3, 7, out,
        )  # fmt: skip
        found.append(taken(out, n_steps))
    assert torch.equal(*found)
    heads = qkv.double().sum(0).view(-1, e)
    q, k = heads[:n_heads], heads[n_heads : n_heads + j]
    v = k if has_v_from_k else heads[n_heads + j :]
    turn = rope_of(style, frequencies, position)
    q = turn(head_norm(q) * q_weight.double()) * 0.3
    k = turn(head_norm(k) * k_weight.double()).float().bfloat16().double()
    v = head_norm(v).float().bfloat16().double()
    written = cache[int(table[(position // page) % n_table]), :, :, position % page].double()
    # A key at the border of two bf16 values may take either.
    assert relative_error(written, torch.stack((k, v))) < 2e-3
    keys = torch.cat((old[0, first:].double(), written[None, 0]))
    values = torch.cat((old[1, first:].double(), written[None, 1]))
    group = n_heads // j
    expected = torch.empty(n_heads, e, dtype=torch.float64, device="cuda")
    for h in range(n_heads):
        shares = (keys[:, h // group] @ q[h]).softmax(0)
        expected[h] = shares @ values[:, h // group]
    assert relative_error(found[0].view(n_heads, e), expected) < SPLIT


def head_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rope_of(style: str | None, frequencies: tuple[float, ...], position: int) -> Callable[[Tensor], Tensor]:
    def turn(x: Tensor) -> Tensor:
        if style is None:
            return x
        positions = torch.full((x.shape[0],), position, device=x.device)
        return OPS["rope"].reference(x[:, None], positions, style, frequencies)[:, 0]

    return turn


def test_rope_is_right_far_out() -> None:
    """N08: at position 100,000 angles are right to far less than 0.001, which a float32 angle is not.

    Every frequency is chosen to end a whole number of turns and 0.001 on; the unit pair (1, 0) then has sine 0.001.
    """
    e, position = 64, 100_003
    plan = CachePlan(capacity=131072, chunk=64)
    kind = CacheKind("kind", 1, e, 16, "bf16")
    frequencies = tuple((2 * math.pi * (101 + 977 * i) + 1e-3) / position for i in range(e // 2))
    rope = OpCall(OPS["rope"], "test", {}, {"style": "split", "inverse_frequencies": frequencies}, None, {})
    attention = OpCall(OPS["attention"], "test", {}, {"scale": 1.0}, None, {"H": 1})
    fused = FusedAttention("test", attention, None, None, None, rope, CacheLayer(kind, 0), True, False, ())
    launched = plan_attention(fused, 1, 1, 1e-6, plan, Card(132))
    n_table = plan.n_table(kind)
    cache = torch.zeros(n_table + 1, 2, 1, plan.page_size, e, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(1, n_table + 1, dtype=torch.int32, device="cuda")
    qkv = torch.zeros(1, 3 * e, device="cuda")
    qkv[:, : 2 * e].view(1, 2, 2, -1)[:, :, 0] = 1.0
    parts = torch.zeros(launched.n_parts + launched.n_sums, dtype=torch.int64, device="cuda")
    launch(
        launched.kernel, (1, launched.max_runs), handed(qkv), None, None,
        torch.tensor(frequencies, dtype=torch.float64, device="cuda"), cache, table, n_table, step_state(0, position),
        parts, parts[launched.n_parts :], 0, 1, torch.zeros(e, device="cuda"),
    )  # fmt: skip
    found = cache[int(table[(position // plan.page_size) % n_table]), 0, 0, position % plan.page_size]
    assert relative_error(found[e // 2 :], torch.full((e // 2,), 1e-3, dtype=torch.float64, device="cuda")) < 4e-3


def run_logits(values: Tensor, banned: list[int], cap: float) -> tuple[Tensor, int]:
    v = values.shape[-1]
    kernel = spec("logits", 256, V=v, ROWS=v, PLANES=values.shape[0], CAP=float(cap), BLOCKS=8)
    out = torch.full((v,), float("nan"), device="cuda")
    mask = torch.zeros(v, dtype=torch.uint8, device="cuda")
    mask[banned] = 1
    state, history = step_state(7, 3), torch.zeros(9, dtype=torch.int32, device="cuda")
    bests, counter = torch.zeros(16, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    launch(kernel, (8, 1), handed(values), mask, out, bests, counter, state, history)
    assert state[1:].tolist() == [4, 2]
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
