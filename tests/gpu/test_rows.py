"""The small kernels of a prompt chunk, against float64; what they must not touch is NaN, and stays it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.launches import Card
from bytefloor.engine.row_launches import (
    glu_rows_grid,
    heads_rows_grid,
    norm_rows_grid,
    plan_glu_rows,
    plan_heads_rows,
    plan_norm_rows,
)
from bytefloor.model.fuse import FusedAttention
from bytefloor.model.step import CacheKind, CacheLayer, OpCall
from bytefloor.ops import OPS
from bytefloor.ops.cache_write import page_ids
from bytefloor.ops.pages import codes_and_scales, holds_codes, page_shape, turning_lanes, values_of
from bytefloor.ops.row_tiles import from_row_tiles, pitch_of, to_row_tiles
from device_kernels import launch, norm_call, relative_error
from gpu.test_attention import check_written, head_norm

Launch = Callable[..., None]
NAN = float("nan")
EPS = 1e-6
TIGHT = 1e-6
LEAST_GATE = 0.05
"""The tails of gelu are differences of nearly equal numbers."""
GAP = 3
"""Rows of NaN behind each plane."""


@pytest.fixture
def launched() -> Launch:
    return launch


def planes_with_gaps(values: Tensor) -> Tensor:
    """Planes [n, T, K] with rows of NaN behind each."""
    return torch.cat((values, values.new_full((values.shape[0], GAP, values.shape[2]), NAN)), dim=1)


def poisoned_tiles(k: int, pitch: int, device: torch.device) -> Tensor:
    return torch.full_like(to_row_tiles(torch.zeros(1, k, device=device), pitch), NAN)


def check_tiles(tiles: Tensor, expected: Tensor, least: float = 0.0) -> None:
    """Expected is float64 [T, K]: nearly all values are those correctly rounded, columns behind K zero, rows NaN."""
    n_rows, k = expected.shape
    n_columns, n_atoms = tiles.shape[:2]
    found = from_row_tiles(tiles, n_atoms * 8, n_columns * 64)
    rounded = expected.to(torch.bfloat16)
    assert bool(found[n_rows:].isnan().all())
    assert not found[:n_rows, k:].any()
    check_rounded(found[:n_rows, :k], rounded, least)


def check_rounded(found: Tensor, rounded: Tensor, least: float = 0.0) -> None:
    """Values at the border of two bf16 may take either: those that a float32 error of 1e-7 moves across.

    Smaller values than ``least`` are seen by their size alone.
    """
    assert relative_error(found, rounded.double()) < 1e-4
    differs = (found != rounded.float()) & (rounded.float().abs() >= least)
    assert differs.double().mean().item() < 1e-3 + 1 / found.numel()


NORM_CASES = [
    # K, rows, planes, post norm, scalar, norm
    (576, 7, 1, False, False, True),
    (640, 33, 2, True, False, True),
    (1008, 9, 2, False, True, True),
    (1152, 130, 4, True, True, True),
    (2560, 1, 3, True, True, False),
    (3840, 33, 2, True, False, True),
    (4096, 130, 1, False, False, True),
    (5376, 7, 4, True, True, True),
    (8192, 3, 2, False, False, True),
    (96, 70, 0, False, False, True),
    (96, 70, 0, False, True, False),
]


class Norms:
    """norm_rows over random rows of very different sizes, and what it should give."""

    def __init__(self, k: int, n_rows: int, n_planes: int, post: bool, scalar: bool, norm: bool, device: torch.device):
        generator = torch.Generator().manual_seed(k + n_rows)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.x = draw(n_rows, k) * 10 ** draw(n_rows, 1).clamp(-2, 5)
        self.delta = planes_with_gaps(draw(n_planes, n_rows, k)) if n_planes else None
        self.post, self.norm = draw(k) if post else None, draw(k) if norm else None
        self.scalar = torch.tensor([0.37], device=device) if scalar else None
        self.k, self.n_rows, self.n_planes = k, n_rows, n_planes
        residual = self.x.double()
        if self.delta is not None:
            d = self.delta[:, :n_rows].double().sum(0)
            residual = residual + (self.normed(d, self.post) if self.post is not None else d)
        self.residual = residual if self.scalar is None else residual * self.scalar.double()
        self.expected = self.residual if self.norm is None else self.normed(self.residual, self.norm)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return head_norm(x) * weight.double()

    def run(self, launched: Launch, rows: list[int] | None = None) -> Tensor:
        """The tiles; x holds what the kernel left there. n blocks or three."""
        kernel = plan_norm_rows(
            self.k, EPS, has_delta=self.delta is not None, has_post_norm=self.post is not None,
            has_scalar=self.scalar is not None, has_norm=self.norm is not None,
        )  # fmt: skip
        n_rows = self.n_rows if rows is None else len(rows)
        pitch = pitch_of(n_rows) + 8
        tiles = poisoned_tiles(self.k, pitch, self.x.device)
        picked = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=self.x.device)
        stride = (self.n_rows + GAP) * self.k
        launched(
            kernel, norm_rows_grid(kernel, n_rows, Card(3)), picked, self.x, self.delta, self.n_planes, stride,
            self.post, self.norm, self.scalar, tiles, n_rows, pitch,
        )  # fmt: skip
        return tiles


@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_norms_of_rows_equal_float64(case: tuple, launched: Launch, card: torch.device) -> None:
    """Residuals beyond what float16 holds among them; few blocks, so that each goes over several rows."""
    norms = Norms(*case, card)
    check_tiles(norms.run(launched), norms.expected)
    assert relative_error(norms.x, norms.residual) < TIGHT


@pytest.mark.parametrize("case", [(640, 33, 2, True, True, True), (3840, 9, 0, False, False, True)], ids=str)
def test_picked_rows_leave_the_residual_alone(case: tuple, launched: Launch, card: torch.device) -> None:
    norms, rows = Norms(*case, card), [7, 0, 8, 8, 3]
    before = norms.x.clone()
    check_tiles(norms.run(launched, rows), norms.expected[rows])
    assert torch.equal(norms.x, before)


def test_a_nan_stays_in_its_row(launched: Launch, card: torch.device) -> None:
    """N06"""
    norms = Norms(640, 9, 2, False, False, True, card)
    assert norms.delta is not None
    norms.delta[1, 4, 33] = NAN
    found = from_row_tiles(norms.run(launched), 9, 640)
    assert found.isnan().all(dim=1).tolist() == [row == 4 for row in range(9)]
    assert found.isnan().any(dim=1).tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("n", "n_rows", "n_planes"), [(256, 33, 1), (48, 7, 3), (256, 1, 4)])
def test_gates_of_rows_equal_float64(
    n: int, n_rows: int, n_planes: int, activation: str, launched: Launch, card: torch.device
) -> None:
    """Factors are a slice of what all layers have."""
    generator = torch.Generator().manual_seed(n)
    planes = planes_with_gaps(torch.randn(n_planes, n_rows, n, generator=generator) * 3).to(card)
    factors = torch.randn(n_rows, 5, n, generator=generator).to(card)
    kernel, pitch = plan_glu_rows(n, activation), pitch_of(n_rows) + 8
    tiles = poisoned_tiles(n, pitch, card)
    launched(
        kernel, glu_rows_grid(kernel, n_rows), planes, n_planes, (n_rows + GAP) * n, factors, 5 * n, 3 * n, tiles,
        n_rows, pitch,
    )  # fmt: skip
    gate = planes[:, :n_rows].double().sum(0)
    check_tiles(tiles, OPS["glu"].reference(gate, factors[:, 3].double(), activation), LEAST_GATE)


HEADS_CASES = [
    # head size, query heads, kv heads, storage, lanes that turn, RoPE, V from K, norms
    (64, 9, 3, "bf16", 0, "split", False, True),
    (64, 5, 1, "int8", 0, "interleaved", False, False),
    (80, 8, 8, "fp8", 0, "split", False, True),
    (96, 8, 4, "bf16", 0, "interleaved", False, True),
    (96, 4, 2, "int8", 0, None, True, True),
    (128, 32, 8, "bf16", 0, "interleaved", False, False),
    (128, 8, 2, "bf16", 32, "split", True, True),
    (256, 16, 8, "int8", 0, "split", False, True),
    (256, 4, 1, "fp8", 0, None, False, False),
    (512, 16, 1, "bf16", 128, "split", True, True),
    (512, 4, 2, "fp8", 0, "interleaved", True, True),
]
SCALE = 0.3
LENGTHS = {2: (61, 9), 0: (323, 5), 1: (0, 3)}
"""Of each sequence: the first slot of its rows, which cross pages and turn in the ring; how many."""


class Heads:
    """heads_rows over rows of three sequences, with rows to be left out among them, and pages full of NaN."""

    def __init__(self, e: int, n_heads: int, j: int, storage: str, rotated: int, style: str | None,
                 v_from_k: bool, norms: bool, device: torch.device, owns_kv: bool = True) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(e + n_heads)
        self.e, self.j, self.n_heads, self.storage, self.rotated, self.device = e, j, n_heads, storage, rotated, device
        stands = [i >= rotated // 2 if rotated else i % 5 == 4 for i in range(e // 2)]
        self.frequencies = tuple(0.0 if stands[i] else 10000.0 ** (-2 * i / e) for i in range(e // 2))
        rope = OpCall(OPS["rope"], "test", {}, {"style": style, "inverse_frequencies": self.frequencies}, None, {})
        self.style, self.norm, self.v_from_k, self.owns_kv = style, norm_call() if norms else None, v_from_k, owns_kv
        kind = CacheKind("kind", j, e, None, storage, rotated)
        attention = OpCall(OPS["attention"], "test", {}, {"scale": SCALE}, None, {"H": n_heads})
        fused = FusedAttention(
            "test", attention, self.norm, self.norm, self.norm, rope if style else None, CacheLayer(kind, 0), owns_kv,
            v_from_k, (),
        )  # fmt: skip
        plan = CachePlan(capacity=256, chunk=64)
        self.page, self.kernel = plan.page_size, plan_heads_rows(fused, n_heads, EPS, plan)
        rows = [(s, first + i) for s, (first, n) in LENGTHS.items() for i in range(n)]
        rows[4:4] = [(-1, 0), (-1, 0)]
        self.sequence, self.slots = (torch.tensor(c, dtype=torch.int32, device=device) for c in zip(*rows, strict=True))
        self.positions = self.slots + 100_000
        self.n_rows, n_table = len(rows), plan.n_table(kind)
        ids = torch.randperm(3 * n_table, generator=generator)
        self.table = (ids + 1).to(torch.int32).view(3, n_table).to(device)
        shape, dtype = page_shape(storage, j, self.page, e, rotated)
        self.cache = torch.empty(3 * n_table + 2, *shape, dtype=dtype, device=device)
        self.cache.view(torch.uint8).fill_(0xFF)
        self.y = [
            planes_with_gaps(torch.randn(n, self.n_rows, m * e + 16, generator=generator)).to(device)
            for n, m in ((2, n_heads), (1, j), (3, j))
        ]
        self.q_weight, self.k_weight = torch.randn(2, e, generator=generator).to(device)
        self.q_out = torch.full((self.n_rows, n_heads, e), NAN, dtype=torch.bfloat16, device=device)

    def run(self, launched: Launch) -> None:
        sources: list[object] = []
        for i, y in enumerate(self.y):
            is_there = i == 0 or (self.owns_kv and not (i == 2 and self.v_from_k))
            sources += [y, y.shape[2], y.shape[0], y.shape[1] * y.shape[2]] if is_there else [None, 0, 0, 0]
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=self.device) if self.style else None
        weights = (self.q_weight, self.k_weight) if self.norm else (None, None)
        launched(
            self.kernel, heads_rows_grid(self.kernel, self.n_rows, Card(132)), *sources, *weights, frequencies,
            self.positions, self.slots, self.sequence, self.cache, self.table, self.table.shape[1], self.q_out,
            self.n_rows,
        )  # fmt: skip

    @property
    def live(self) -> Tensor:
        return torch.nonzero(self.sequence >= 0)[:, 0]

    def heads(self, i: int, n: int) -> Tensor:
        """float64 [live, n, E] of q, k or v."""
        return self.y[i][:, self.live, : n * self.e].double().sum(0).view(-1, n, self.e)

    def turned(self, heads: Tensor, weight: Tensor) -> Tensor:
        if self.norm is not None:
            heads = head_norm(heads) * weight.double()
        if self.style is not None:
            heads = OPS["rope"].reference(heads, self.positions[self.live].long(), self.style, self.frequencies)
        return heads

    def written(self) -> tuple[Tensor, Tensor]:
        """(pages, offsets) of the live rows."""
        slots = self.slots[self.live].long()
        return page_ids(slots, self.table[self.sequence[self.live].long()].long(), self.page), slots % self.page

    def check_queries(self) -> None:
        expected = self.turned(self.heads(0, self.n_heads), self.q_weight) * (SCALE / math.log(2))
        if self.rotated:
            stands = torch.arange(self.e, device=self.device) % (self.e // 2) >= self.rotated // 2
            expected = torch.where(stands, expected * self.k_weight.double(), expected)
        check_rounded(self.q_out[self.live].float(), expected.to(torch.bfloat16))
        assert bool(self.q_out[self.sequence < 0].isnan().all())

    def check_pages(self) -> None:
        pages, offsets = self.written()
        k = self.heads(1, self.j)
        v = k if self.v_from_k else self.heads(2, self.j)
        k, v = self.turned(k, self.k_weight), head_norm(v) if self.norm is not None else v
        rows = (torch.cat((v, turning_lanes(k, self.rotated)), dim=-1),) if self.rotated else (k, v)
        found = values_of(self.cache, self.e, self.storage)
        for half, expected in enumerate(rows):
            own = found[pages, half, :, offsets].double()
            check_written(own.flatten(0, 1), expected.float().flatten(0, 1), self.storage)

    def check_nothing_else_was_written(self) -> None:
        pages, offsets = self.written()
        views = codes_and_scales(self.cache, self.e) if holds_codes(self.cache) else (self.cache,)
        for view in views:
            view = view.unsqueeze(-1) if view.dim() == 4 else view  # scales have no lanes
            for half in range(view.shape[1]):
                poison = torch.full_like(view[pages, half, :, offsets].view(torch.uint8), 0xFF)
                view[pages, half, :, offsets] = poison.view(view.dtype)
        assert bool((self.cache.view(torch.uint8) == 0xFF).all())


@pytest.mark.parametrize("case", HEADS_CASES, ids=str)
def test_heads_of_rows_equal_float64(case: tuple, launched: Launch, card: torch.device) -> None:
    heads = Heads(*case, card)
    heads.run(launched)
    heads.check_queries()
    heads.check_pages()
    heads.check_nothing_else_was_written()


def test_a_layer_without_a_cache_of_its_own_writes_queries_alone(launched: Launch, card: torch.device) -> None:
    heads = Heads(64, 9, 3, "bf16", 0, "split", False, True, card, owns_kv=False)
    heads.run(launched)
    heads.check_queries()
    assert bool(heads.cache.isnan().all())


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_have_scales_of_nan(
    storage: str, bad: float, launched: Launch, card: torch.device
) -> None:
    """N06: of that row and head alone."""
    heads = Heads(64, 4, 2, storage, 0, None, False, False, card)
    row = int(heads.live[3])
    heads.y[2][1, row, 64 + 5] = bad
    heads.run(launched)
    pages, offsets = heads.written()
    scales = codes_and_scales(heads.cache, 64)[1][pages, 1, :, offsets]
    is_nan = [[i == 3 and head == 1 for head in range(2)] for i in range(len(pages))]
    assert scales.isnan().tolist() == is_nan
