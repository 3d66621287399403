"""The attention kernel against float64 over what the cache holds, which is poisoned outside the live band."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.launches import Card, plan_attention
from bytefloor.model.fuse import FusedAttention
from bytefloor.model.step import CacheKind, CacheLayer, OpCall
from bytefloor.ops import OPS
from bytefloor.ops.cache_write import page_ids
from bytefloor.ops.pages import codes_and_scales, keys_of, page_shape, turning_lanes, values_of, write_rows
from bytefloor.ops.round_to import LARGEST_OF_ALL, round_to
from device_kernels import handed, launch, norm_call, relative_error, step_state, taken

SPLIT = 5e-5
"""Queries and shares are split in two bf16: 16 bits, of scores that are tens."""
ONE_SCALE = 1e-3
"""Beside int8 a query's 16 bits count from its largest value; the cache has lost ten times as much."""
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


CODE_CASES = [
    *[(e, 4, 2, None, 170, False, "split") for e in (64, 80, 96, 128, 256, 512)],
    *[(128, h, 1, None, 33, False, "interleaved") for h in (1, 2, 4, 8, 16)],
    *[(512, h, 1, None, 77, True, "split") for h in (1, 2, 4, 8, 16)],
    *[(128, 8, 2, None, p, False, "split") for p in (0, 1, 63, 64, 127, 128, 319, 320, 383, 384, 700)],
    *[(256, 4, 2, 100, p, False, "split") for p in (0, 98, 99, 100, 127, 128, 163, 164, 500, 640)],
    (256, 2, 1, 16, 77, False, None),
]


@pytest.mark.parametrize(
    ("storage", "case"), [("int8", c) for c in CODE_CASES] + [("fp8", c) for c in CODE_CASES[:6]], ids=str
)
def test_attention_over_codes_equals_float64(storage: str, case: tuple) -> None:
    """The same over caches of codes; scales outside the live band are NaN, and all its bytes 0xff."""
    check_attention(*case, storage=storage)


@pytest.mark.parametrize("n_multiprocessors", [4, 132])
@pytest.mark.parametrize(
    ("storage", "case"), [("int8", c) for c in LONG_CASES] + [("fp8", c) for c in LONG_CASES[:4:3]], ids=str
)
def test_attention_over_many_tiles_of_codes_equals_float64(storage: str, case: tuple, n_multiprocessors: int) -> None:
    check_attention(*case, capacity=16384, n_multiprocessors=n_multiprocessors, storage=storage)


SHARED_CASES = [
    *[(512, 16, 1, p, 128) for p in (0, 1, 15, 16, 17, 79, 80, 95, 96, 300, 700)],
    *[(512, h, 1, 77, 128) for h in (1, 2, 4, 8)],
    (256, 4, 1, 200, 64),
    (128, 8, 2, 200, 32),
]


@pytest.mark.parametrize("case", SHARED_CASES, ids=str)
def test_attention_over_values_and_the_lanes_that_turn_equals_float64(case: tuple[int, int, int, int, int]) -> None:
    """K=V layers: all other lanes of keys are values times the weight of the K norm."""
    e, n_heads, j, position, rotated = case
    check_attention(e, n_heads, j, None, position, True, "split", rotated=rotated)


@pytest.mark.parametrize("n_multiprocessors", [4, 132])
@pytest.mark.parametrize(("n_heads", "j"), [(16, 1), (4, 2)])
def test_the_same_over_several_tiles_a_run(n_heads: int, j: int, n_multiprocessors: int) -> None:
    check_attention(512, n_heads, j, None, 9001, True, "split", 16384, n_multiprocessors=n_multiprocessors, rotated=128)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [1, 2])
def test_keys_and_values_that_are_not_finite_are_seen_in_codes(row: int, bad: float, storage: str) -> None:
    """N06: in the step that writes them and in the next, which reads their scale."""
    a = Attending(128, 1, 1, None, 70, False, None, storage=storage, has_norms=False)
    a.qkv[0].view(3, 128)[row, 5] = bad
    assert bool(a.run(1).isnan().all())
    a.qkv.zero_()
    assert bool(a.run(2, position=71).isnan().all())


def test_keys_and_values_of_zero_have_scales_of_zero() -> None:
    a = Attending(64, 2, 1, None, 0, False, None, storage="int8", has_norms=False)
    a.qkv.zero_()
    assert not a.run(1).any()
    page = a.cache[int(a.table[0])]
    codes, scales = codes_and_scales(page, 64)
    assert not codes[..., 0, :].any()
    assert not scales[..., 0].any()


class Attending:
    """One attention kernel with random inputs and a cache that is poisoned outside the live band."""

    def __init__(
        self, e: int, n_heads: int, j: int, window: int | None, position: int, has_v_from_k: bool, style: str | None,
        capacity: int = 1024, n_multiprocessors: int = 132, storage: str = "bf16", has_norms: bool = True,
        rotated: int = 0,
    ) -> None:  # fmt: skip
        self.position, self.storage = position, storage
        generator = torch.Generator("cuda").manual_seed(position * 1000 + e)
        plan = CachePlan(capacity, chunk=64)
        kind = CacheKind("kind", j, e, window, storage, rotated)
        stands = [i >= rotated // 2 if rotated else i % 5 == 4 for i in range(e // 2)]
        self.frequencies = tuple(0.0 if stands[i] else 10000.0 ** (-2 * i / e) for i in range(e // 2))
        rope = OpCall(OPS["rope"], "test", {}, {"style": style, "inverse_frequencies": self.frequencies}, None, {})
        norm = norm_call() if has_norms else None
        attention = OpCall(OPS["attention"], "test", {}, {"scale": 0.3}, None, {"H": n_heads})
        fused = FusedAttention(
            "test", attention, norm, norm, norm, rope if style else None, CacheLayer(kind, 0), True, has_v_from_k, ()
        )
        self.launched = plan_attention(fused, n_heads, 2, 1e-6, plan, Card(n_multiprocessors))
        n_table, self.page = plan.n_table(kind), plan.page_size
        self.table = torch.randperm(n_table, generator=torch.Generator().manual_seed(e)).to(torch.int32) + 1
        shape, dtype = page_shape(storage, j, self.page, e, rotated)
        self.cache = torch.empty(n_table + 2, *shape, dtype=dtype, device="cuda")
        self.cache.view(torch.uint8).fill_(0xFF)
        self.first = 0 if window is None else max(0, position - window + 1)
        old = torch.randn(2, position, j, e, generator=generator, device="cuda")
        if storage != "bf16":  # largest values of rows differ, as those of a model's do
            old *= 0.25 + torch.rand(2, position, j, 1, generator=generator, device="cuda")
        self.old = round_to(old, storage).double()
        slots = torch.arange(self.first, position, device="cuda")
        pages = page_ids(slots, self.table.cuda().long().expand(len(slots), -1), self.page)
        if rotated:  # V, and lanes of K that have nothing to do with it
            kept = torch.cat((old[1], turning_lanes(old[0], rotated)), -1)[self.first :]
            self.cache[pages, 0, :, slots % self.page] = kept.bfloat16()
        for half in range(0 if rotated else 2):
            rows = old[half, self.first :]
            if storage == "bf16":
                self.cache[pages, half, :, slots % self.page] = rows.bfloat16()
            else:
                write_rows(self.cache, half, pages, slots % self.page, rows, storage)
        n_rows = (n_heads + j + (0 if has_v_from_k else j)) * e
        self.qkv = torch.randn(2, n_rows, generator=generator, device="cuda")
        self.q_weight, self.k_weight = torch.randn(2, e, generator=generator, device="cuda")
        self.rotated = rotated
        if rotated:
            self.old[0] = self.whole_keys(self.old[1], turning_lanes(self.old[0], rotated))
        self.parts = torch.zeros(self.launched.n_parts, dtype=torch.int64, device="cuda")
        self.sums = torch.zeros(self.launched.n_sums, dtype=torch.int64, device="cuda")
        self.out = torch.full((n_heads * e,), float("nan"), device="cuda")

    def run(self, n_steps: int, position: int | None = None, dropped: int = 0) -> Tensor:
        position = self.position if position is None else position
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device="cuda")
        launch(
            self.launched.kernel, self.launched.grid, handed(self.qkv, n_steps),
            self.q_weight, self.k_weight, frequencies, self.cache, self.table.cuda(), len(self.table),
            step_state(0, position, n_steps, dropped), self.parts, self.sums, 3, 7, self.out,
        )  # fmt: skip
        return taken(self.out, n_steps).clone()

    def whole_keys(self, v: Tensor, lanes: Tensor) -> Tensor:
        return keys_of(torch.cat((v, lanes), -1), self.k_weight.double(), self.rotated)

    def written(self, e: int) -> Tensor:
        """[2, J, E]: what the cache holds of the position."""
        page = self.cache[int(self.table[(self.position // self.page) % len(self.table)])]
        if self.rotated:
            kept = page[0, :, self.position % self.page].double()
            return torch.stack((self.whole_keys(kept[:, :e], kept[:, e:]), kept[:, :e]))
        return values_of(page, e, self.storage)[:, :, self.position % self.page].double()


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
    storage: str = "bf16",
    rotated: int = 0,
) -> None:
    a = Attending(
        e, n_heads, j, window, position, has_v_from_k, style, capacity, n_multiprocessors, storage, rotated=rotated
    )
    assert torch.equal(a.run(1), a.run(2)), "either parity, over what the other left"
    heads = a.qkv.double().sum(0).view(-1, e)
    q, k = heads[:n_heads], heads[n_heads : n_heads + j]
    v = k if has_v_from_k else heads[n_heads + j :]
    turn = rope_of(style, a.frequencies, position)
    q = turn(head_norm(q) * a.q_weight.double()) * 0.3
    k = turn(head_norm(k) * a.k_weight.double())
    written = a.written(e)
    if rotated:  # lanes that do not turn are made of V, which is rounded before
        rounded = head_norm(v).float().bfloat16().double()
        k = a.whole_keys(rounded, turning_lanes(k, rotated))
    check_written(written, torch.stack((k, head_norm(v))).float(), storage)
    keys = torch.cat((a.old[0, a.first :], written[None, 0]))
    values = torch.cat((a.old[1, a.first :], written[None, 1]))
    group = n_heads // j
    expected = torch.empty(n_heads, e, dtype=torch.float64, device="cuda")
    for h in range(n_heads):
        shares = (keys[:, h // group] @ q[h]).softmax(0)
        expected[h] = shares @ values[:, h // group]
    assert relative_error(a.run(3).view(n_heads, e), expected) < (ONE_SCALE if storage == "int8" else SPLIT)


def check_written(found: Tensor, rows: Tensor, storage: str) -> None:
    """A value at the border of two that the cache can hold may take either, and the scale of one row too."""
    expected = round_to(rows, storage).double()
    if storage == "bf16":
        assert relative_error(found, expected) < 2e-3
        return
    scale = rows.abs().amax(-1, keepdim=True) / LARGEST_OF_ALL[storage]
    step = scale if storage == "int8" else torch.maximum(rows.abs() / 8, scale)
    assert bool(((found - expected).abs() <= 1.6 * step).all())
    n_off = ((found != expected).double().mean(-1) >= 0.02).sum()
    assert n_off <= 1


def head_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rope_of(style: str | None, frequencies: tuple[float, ...], position: int) -> Callable[[Tensor], Tensor]:
    def turn(x: Tensor) -> Tensor:
        if style is None:
            return x
        positions = torch.full((x.shape[0],), position, device=x.device)
        return OPS["rope"].reference(x[:, None], positions, style, frequencies)[:, 0]

    return turn


@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("position", [63, 64, 300, 900])
def test_what_was_dropped_moves_slots_and_no_angle(position: int, storage: str) -> None:
    """Without a window a row 1,000 positions on, all of which are dropped, finds the same keys and leaves its own in
    the same place, turned by 1,000 positions more. Where nothing turns, or with a window, not a bit is another."""
    for window, style in ((None, None), (None, "split"), (64, "split")):
        a = Attending(128, 8, 2, window, position, False, style, storage=storage)
        expected, written = a.run(1), a.written(128)
        again = a.run(2, position + 1000, 1000) if window is None else a.run(2, position, 1000)
        if style is None or window is not None:
            assert torch.equal(again, expected)
            assert torch.equal(a.written(128), written)
            continue
        assert relative_error(again, expected) > 1e-3
        k, v = a.qkv.double().sum(0).view(-1, 128)[8:].split(2)
        turned = rope_of(style, a.frequencies, position + 1000)(head_norm(k) * a.k_weight.double())
        check_written(a.written(128), torch.stack((turned, head_norm(v))).float(), storage)
        assert torch.equal(a.written(128)[1], written[1])


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
        launched.kernel, (1, launched.grid[1]), handed(qkv), None, None,
        torch.tensor(frequencies, dtype=torch.float64, device="cuda"), cache, table, n_table, step_state(0, position),
        parts, parts[launched.n_parts :], 0, 1, torch.zeros(e, device="cuda"),
    )  # fmt: skip
    found = cache[int(table[(position // plan.page_size) % n_table]), 0, 0, position % plan.page_size]
    assert relative_error(found[e // 2 :], torch.full((e // 2,), 1e-3, dtype=torch.float64, device="cuda")) < 4e-3
