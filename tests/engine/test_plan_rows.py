"""Attention of many rows, decided and compiled without a GPU; its twin against float64."""

from __future__ import annotations

import re

import pytest

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.kernels import compile_kernel
from bytefloor.engine.launches import RESERVED_BYTES, Card
from bytefloor.engine.plan_rows import attention_items, plan_attention_rows
from bytefloor.errors import UnsupportedError
from bytefloor.model.step import CacheKind
from cards import CARDS
from flash_twin import RowsBatch
from kernel_twins import TwinDevice, TwinKernel

KB = 1024
PLAN = CachePlan(capacity=32768, chunk=2048)
REPRESENTATIVE = [
    # head size, query heads, kv heads, window, storage, lanes that turn
    (64, 9, 3, None, "bf16", 0),
    (80, 8, 8, None, "bf16", 0),
    (96, 8, 4, None, "fp8", 0),
    (128, 32, 8, None, "bf16", 0),
    (128, 32, 8, None, "int8", 0),
    (256, 16, 8, 1024, "bf16", 0),
    (256, 16, 8, 1024, "int8", 0),
    (256, 16, 8, 1024, "fp8", 0),
    (512, 16, 1, None, "bf16", 0),
    (512, 16, 1, None, "int8", 0),
    (512, 16, 1, None, "bf16", 128),
]
EVERYWHERE = (REPRESENTATIVE[3], REPRESENTATIVE[6])
"""Compiled for all architectures; the others for the oldest and for the one that is offered."""
COMPILED = [(v, a) for v in REPRESENTATIVE for a in CARDS if v in EVERYWHERE or a in ("sm_80", "sm_90a")]


def kind_of(e: int, j: int, window: int | None = None, storage: str = "bf16", rotated: int = 0) -> CacheKind:
    return CacheKind("kind", j, e, window, storage, rotated)


@pytest.mark.parametrize(("variant", "architecture"), COMPILED, ids=str)
def test_attention_of_rows_compiles_for_every_architecture_without_spills(variant: tuple, architecture: str) -> None:
    """Products of warpgroups that wait for one another would be said too."""
    pytest.importorskip("cuda.core")
    e, n_heads, j, *rest = variant
    card = CARDS[architecture]
    kernel = plan_attention_rows(kind_of(e, j, *rest), n_heads, PLAN, card, architecture == "sm_90a")[0]
    code, report = compile_kernel(kernel, architecture)
    assert len(code) > 1000
    assert [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)] == [0]
    assert "C75" not in report
    assert "serializ" not in report.lower()
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None
    assert int(registers[1]) * kernel.threads <= 65536
    assert kernel.shared_bytes + RESERVED_BYTES <= card.multiprocessor_bytes


@pytest.mark.parametrize("has_warpgroups", [True, False])
@pytest.mark.parametrize("n_heads", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("e", [64, 80, 96, 128, 256, 512])
def test_a_rows_heads_are_in_one_tile(e: int, n_heads: int, has_warpgroups: bool) -> None:
    kernel, rows_an_item, grid_y = plan_attention_rows(kind_of(e, 1), n_heads, PLAN, CARDS["sm_89"], has_warpgroups)
    d = dict(kernel.defines)
    tile_rows = int(d["GROUPS"]) * 64 // int(d["PARTS"])
    assert grid_y == 1
    assert rows_an_item * n_heads <= tile_rows < (rows_an_item + 1) * n_heads


@pytest.mark.parametrize(
    ("e", "n_heads", "rotated", "message"),
    [
        (72, 4, 0, "head size 72"),
        (528, 4, 0, "head size 528"),
        (80, 4, 32, "head size 80 with 32"),
        (64, 200, 0, "200 query"),
    ],
)
def test_shapes_that_no_kernel_takes_are_refused(e: int, n_heads: int, rotated: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan_attention_rows(kind_of(e, 1, rotated=rotated), n_heads, PLAN, CARDS["sm_90a"])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no room for attention of rows with head size 512"):
        plan_attention_rows(kind_of(512, 1), 16, PLAN, Card(10, 64 * KB))


def test_items_are_pieces_of_runs_the_longest_first() -> None:
    runs = [(0, 5, 100, 0), (5, 1, 7, 1), (6, 70, 0, 2)]
    items = attention_items(runs, 32)
    assert items == [(0, 5, 100, 0), (70, 6, 64, 2), (38, 32, 32, 2), (6, 32, 0, 2), (5, 1, 7, 1)]


@pytest.mark.parametrize(
    "variant",
    [
        (64, 3, 1, None, "bf16", 0),
        (80, 9, 3, 24, "int8", 0),
        (96, 2, 1, None, "fp8", 0),
        (256, 4, 1, 100, "bf16", 64),
    ],
    ids=str,
)  # fmt: skip
def test_the_twin_equals_float64(variant: tuple) -> None:
    batch = RowsBatch(*variant, [(33, 100), (1, 0), (65, 300)], device="cpu")
    TwinKernel(TwinDevice(), batch.kernel).launch(0, batch.grid, batch.arguments)
    batch.check()
