"""Attention of many rows against float64 over the cache, which is poisoned outside the slots that rows see."""

from __future__ import annotations

import math

import pytest
import torch

from bytefloor.engine.kernels import load_kernels
from device_kernels import launch
from flash_twin import RowsBatch

ROWS = (1, 2, 17, *range(26, 34), 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 192, 224, 320, 384)
FIRST_SLOTS = (0, 1, 63, 64, 100, 1000)
RAGGED = ([(37, 0), (200, 100), (5, 1000)], [(1, 700), (129, 64), (64, 63)], [(384, 300), (1, 0), (1, 1)])
VARIANTS = [
    # head size, query heads, kv heads, window, storage, lanes that turn
    *[(e, 4, 2, window, "bf16", 0) for e in (64, 128, 256, 512) for window in (None, 24)],
    *[(e, 4, 2, None, "bf16", 0) for e in (80, 96)],
    *[(64, n, 1, None, "bf16", 0) for n in (1, 2, 3, 4, 5, 8, 16)],
    (64, 9, 3, 512, "bf16", 0),
    (80, 9, 3, None, "int8", 0),  # 720 columns are not whole tiles of 64
    (128, 8, 1, 512, "bf16", 0),
    (256, 16, 8, 1024, "bf16", 0),
    (256, 10, 2, 1024, "fp8", 0),
    (512, 16, 1, None, "bf16", 0),
    *[(e, 4, 2, None, storage, 0) for e in (64, 96, 128, 512) for storage in ("int8", "fp8")],
    (256, 4, 2, 512, "int8", 0),
    (128, 16, 2, 24, "int8", 0),
    (512, 16, 1, None, "int8", 0),
    (512, 16, 1, None, "bf16", 128),
    (512, 4, 2, 24, "bf16", 128),
    (256, 4, 1, None, "bf16", 64),
    (128, 3, 1, 512, "bf16", 32),
]


def run(batch: RowsBatch) -> None:
    launch(batch.kernel, batch.grid, *batch.arguments)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_attention_of_rows_equals_float64(variant: tuple) -> None:
    """Every number of rows at every first slot, each a sequence of its own; rings of windows are shorter than those."""
    for first_slot in FIRST_SLOTS:
        batch = RowsBatch(*variant, [(n, first_slot) for n in ROWS])
        run(batch)
        batch.check()


@pytest.mark.parametrize("runs", RAGGED, ids=str)
@pytest.mark.parametrize("variant", VARIANTS[::3], ids=str)
def test_ragged_batches_equal_float64(variant: tuple, runs: list[tuple[int, int]]) -> None:
    batch = RowsBatch(*variant, runs)
    run(batch)
    batch.check()


@pytest.mark.parametrize("variant", VARIANTS[::3], ids=str)
def test_long_prompts_and_scores_of_hundreds(variant: tuple) -> None:
    """The ring goes round many times, and the maximum moves from tile to tile."""
    batch = RowsBatch(*variant, [(384, 9000), (64, 16000)], capacity=16384, spread=60.0)
    run(batch)
    batch.check()


@pytest.mark.parametrize("variant", VARIANTS[::4], ids=str)
def test_what_older_chips_run_equals_float64(variant: tuple) -> None:
    """Their tiles, and mma.sync in place of wgmma, which is in sm_90a alone."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("machine code for sm_90")
    batch = RowsBatch(*variant, RAGGED[0], has_warpgroups=False)
    loaded = load_kernels([batch.kernel], "sm_90")[batch.kernel]
    loaded.launch(torch.cuda.current_stream().cuda_stream, batch.grid, batch.arguments)
    torch.cuda.synchronize()
    batch.check()


@pytest.mark.parametrize("variant", [VARIANTS[4], VARIANTS[-1], VARIANTS[-5]], ids=str)
def test_two_runs_give_the_same_bits(variant: tuple) -> None:
    batch = RowsBatch(*variant, RAGGED[1])
    run(batch)
    first = batch.out.clone()
    run(batch)
    assert torch.equal(first.view(torch.int16), batch.out.view(torch.int16))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_queries_that_are_not_finite_are_seen(bad: float) -> None:
    """In the rows and heads that have them, and nowhere else."""
    batch = RowsBatch(128, 4, 2, None, "bf16", 0, RAGGED[0])
    batch.q[40, 3, 7] = bad
    run(batch)
    with pytest.raises(AssertionError, match="in row 40 of"):
        batch.check()
    batch.q[40, 3] = 0
    run(batch)
    batch.check()


def test_items_without_rows_are_nothing() -> None:
    """A graph's spare ones."""
    batch = RowsBatch(64, 4, 2, None, "bf16", 0, [(33, 100)])
    batch.items = torch.cat((batch.items, torch.zeros_like(batch.items)))
    run(batch)
    batch.check()
