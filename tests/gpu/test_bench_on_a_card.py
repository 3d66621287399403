"""bench on a card: prompts of a small random model, and products of many rows both ways."""

from __future__ import annotations

import pytest
import torch

from bytefloor.engine import loading
from bytefloor.engine.kernels import spec
from bytefloor.engine.packed import _for_each_row
from bytefloor.engine.row_products import pad_rows
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import SHAPES, Shape
from bytefloor.engine.tensor_peak import measure_tensor_peak
from bytefloor.formats import get
from bytefloor.ops import OPS
from bytefloor.ops.row_tiles import from_row_tiles, tiles_shape
from bytefloor.tools import bench as bench_module
from bytefloor.tools import bench_kernels
from bytefloor.tools import bench_row_products as rows_module
from bytefloor.tools.bench import BenchOptions, bench
from bytefloor.tools.bench_kernels import KernelOptions, make_cases, step_of
from bytefloor.tools.bench_row_products import (
    bench_row_products,
    cublas_starts,
    fused_launches,
    open_products,
    unpack_launches,
)
from device_kernels import form_of, launch, random_parts

PLAIN = Shape("llama", 256, 512, 2, 8, 2, 64, 2048, 4096, False, {"rope.freq_base": 1e4})
MIXED = Shape(
    "gemma4", 256, 512, 6, 4, 2, 64, 2048, 4096, True,
    {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 6, 1, 128,
)  # fmt: skip
PEAK = 600.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "plain", PLAIN)
    monkeypatch.setitem(SHAPES, "mixed", MIXED)
    monkeypatch.setattr(bench_kernels, "MODELS", ("plain", "mixed"))
    monkeypatch.setattr(bench_kernels, "SIZES_MB", (1,))
    monkeypatch.setattr(bench_kernels, "ROTATED_BYTES", 600_000)
    for module in (bench_module, rows_module):
        monkeypatch.setattr(module, "measure_limit", lambda device: StreamLimit(4000.0))
        monkeypatch.setattr(module, "measure_peak", lambda device: PEAK)


@pytest.mark.parametrize("name", ["plain", "mixed"])
def test_prompts_in_chunks_have_rates_and_shares(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(loading, "KERNEL_CHUNK", 128)
    options = BenchOptions(n_prompt=(100, 513), n_gen=4, depths=(), repeats=2)
    rows = list(bench(f"synthetic:{name}/Q8_0", options))
    assert [row.n_prompt for row in rows] == [100, 513]
    for row in rows:
        assert row.executor == "kernels"
        assert row.tflops is not None
        assert row.share_of_peak is not None
        assert row.attention_share is not None
        assert row.tok_s > 0
        assert 0 < row.share_of_peak < 1
        assert 0 < row.attention_share < 1


def test_a_card_has_a_peak(card: torch.device) -> None:
    found = measure_tensor_peak(card)
    assert found is not None
    assert 10 < found < 10_000


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "affine-4b-g64", "FP8-E4M3-row", "BF16"])
def test_what_is_unpacked_as_bf16_is_rounded_once(card: torch.device, name: str) -> None:
    n, k = 48, 512
    parts, form = random_parts(name, n, k, 1), form_of(name, n, k)
    packed = form.pack({key: _for_each_row(key, part, n) for key, part in parts.items()})
    out = torch.full((n + 8, k), float("nan"), dtype=torch.bfloat16, device=card)
    launch(spec("unpack_bf16", 256, FORM=form.name, K=k), (64, 1), packed, n, out)
    expected = get(name).decode(parts).to(torch.bfloat16)
    # Near the border of two bf16 numbers a weight may become either.
    found, expected = out[:n].float(), expected.float()
    assert bool(((found - expected).abs() <= 2.0**-7 * expected.abs()).all())
    assert float((found != expected).double().mean()) < 2e-3
    assert bool(out[n:].isnan().all())


@pytest.mark.parametrize("n_rows", [32, 300])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_both_routes_multiply_the_same(card: torch.device, kind: str, n_rows: int) -> None:
    case = make_cases()[0]
    pairs = open_products(case, step_of(case.shape_for(kind), kind, card), card)
    assert len(pairs) == 4 * case.shape.n_layers
    for timed, own in pairs:
        scratch = torch.full((timed.n, timed.k), float("nan"), dtype=torch.bfloat16, device=card)
        for each in unpack_launches(own, scratch):
            launch(each.kernel, each.grid, *each.arguments)
        for start in cublas_starts([own], n_rows, card):
            start()
        (fused,) = fused_launches([own], n_rows, card)
        out, pitch = fused.arguments[7], pad_rows(n_rows)
        out.fill_(float("nan"))
        launch(fused.kernel, fused.grid, *fused.arguments)
        x = from_row_tiles(fused.arguments[0], pitch, own.k)
        y = x.double() @ scratch.double().T
        if own.activation:
            found = from_row_tiles(out.view(tiles_shape(timed.n // 2, pitch)), pitch, timed.n // 2)
            y = OPS["glu"].reference(y[:, 0::2], y[:, 1::2], own.activation)
        else:
            found = out.view(-1, pitch, timed.n).sum(0)
        assert float((found - y).norm() / y.norm()) < 0.01, timed.shape


def test_rows_of_both_routes_are_measured(card: torch.device) -> None:
    words = ("plain.gate_up", "mixed.qkv.global", "plain.head")
    rows = list(bench_row_products(KernelOptions(("Q4_K", "affine-4b-g64"), words, 2, (32, 300))))
    assert len(rows) == 2 * 3 * 2 * 2
    assert {row.route for row in rows} == {"fused", "unpack+cublas"}
    assert all(row.us > 0 and row.share_of_peak is not None and 0 < row.share_of_peak < 1 for row in rows)
