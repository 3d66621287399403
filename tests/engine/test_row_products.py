"""Products of many rows: tiles, parts and blocks decided without a GPU, and their kernels compiled."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.kernels import compile_kernel
from bytefloor.engine.launches import RESERVED_BYTES, Card
from bytefloor.engine.row_products import (
    ALIGNMENT_BYTES,
    BARRIER_BYTES,
    MOST_SPLITS,
    TILES,
    RowProduct,
    pad_rows,
    row_paddings,
)
from bytefloor.errors import UnsupportedError
from bytefloor.formats import stream
from bytefloor.formats.lanes import STEP

KB = 1024
H200, A100, SMALL = Card(132), Card(108, 164 * KB), Card(170, 100 * KB)
SEGMENTS: dict[str, tuple[Sequence[str], str | None]] = {
    "qkv": (("Q4_K", "Q4_K", "Q6_K"), None),
    "gates": (("Q4_K",), "gelu_tanh"),
    "Q5_K": (("Q5_K",), None),
    "Q6_K": (("Q6_K",), None),
    "BF16": (("BF16",), None),
}
MOST_SPILLED = {64: 12, 128: 8}
"""Bytes, for Hopper: four warpgroups that multiply have 112 registers a thread, and an address may wait in local
memory; with sums of a record beside those of 64 rows 104 do not hold two forms' items. Every other tile keeps all."""


def product_of(name: str) -> RowProduct:
    formats, activation = SEGMENTS[name]
    forms = tuple(stream.choose(each, 4096, 4096, torch.bfloat16) for each in formats)
    return RowProduct(forms, (4096,) * len(forms), 4096, activation)


def plain(n: int, k: int) -> RowProduct:
    return RowProduct((stream.choose("Q4_K", 4096, 4096),), (n,), k)


@pytest.mark.parametrize("pitch", [tile.n_rows for tile in TILES])
@pytest.mark.parametrize("name", list(SEGMENTS))
def test_every_tile_compiles_for_hopper(name: str, pitch: int) -> None:
    """Warpgroups' products that wait for one another would be said too."""
    pytest.importorskip("cuda.core")
    kernel = product_of(name).kernel(pitch, H200)
    code, report = compile_kernel(kernel, "sm_90a")
    assert len(code) > 1000
    assert sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report)) <= MOST_SPILLED.get(pitch, 0)
    assert "C75" not in report
    assert "serializ" not in report.lower()
    tile = product_of(name).tile(pitch)
    registers = tile.registers * tile.warpgroups + tile.left_registers
    assert registers * 128 * tile.blocks <= 65536


@pytest.mark.parametrize("pitch", [tile.n_rows for tile in TILES])
def test_older_chips_have_a_way_of_their_own(pitch: int) -> None:
    pytest.importorskip("cuda.core")
    assert len(compile_kernel(product_of("qkv").kernel(pitch, A100), "sm_80")[0]) > 1000


def test_rows_are_padded_to_few_numbers() -> None:
    assert [pad_rows(n) for n in (1, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513)] == [
        32, 32, 64, 64, 128, 128, 256, 256, 512, 512, 768,
    ]  # fmt: skip
    assert row_paddings(1) == (32,)
    assert row_paddings(100) == (32, 64, 128)
    assert row_paddings(600) == (32, 64, 128, 256, 512, 768)
    assert [plain(256, 256).tile(pitch).n_rows for pitch in row_paddings(600)] == [32, 64, 128, 256, 256, 256]


@pytest.mark.parametrize("card", [H200, A100])
@pytest.mark.parametrize("pitch", [tile.n_rows for tile in TILES])
@pytest.mark.parametrize("name", list(SEGMENTS))
def test_blocks_have_the_shared_memory_they_ask_for(name: str, pitch: int, card: Card) -> None:
    """No less is asked for than the slots take, and so many blocks fit on a multiprocessor."""
    product = product_of(name)
    kernel, tile = product.kernel(pitch, card), product.tile(pitch)
    d = {key: int(value) for key, value in kernel.defines if key.startswith("SLOT")}
    tiles = d["SLOTS_X"] * (tile.n_rows * STEP * 2 + BARRIER_BYTES)
    assert kernel.shared_bytes >= ALIGNMENT_BYTES + tiles + d["SLOTS_W"] * (d["SLOT_BYTES"] + BARRIER_BYTES)
    assert d["SLOTS_X"] >= 2
    assert d["SLOTS_W"] >= 2
    assert tile.blocks * (kernel.shared_bytes + RESERVED_BYTES) <= card.multiprocessor_bytes


@pytest.mark.parametrize("pitch", [32, 64])
@pytest.mark.parametrize("name", list(SEGMENTS))
def test_few_rows_have_a_slot_for_each_step_of_a_record(name: str, pitch: int) -> None:
    (n_slots,) = (int(value) for key, value in product_of(name).kernel(pitch, H200).defines if key == "SLOTS_X")
    assert n_slots * STEP == 256


def test_slots_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no room for two slots of 18944 bytes beside tiles of 64 rows"):
        product_of("gates").kernel(64, SMALL)


@pytest.mark.parametrize("pitch", [32, 64, 128, 256, 2048])
@pytest.mark.parametrize(("n", "k"), [(3840, 15360), (576, 576), (8192, 3840), (262144, 3840), (1024, 64)])
def test_parts_of_k_are_whole_and_none_where_blocks_are_busy_without(n: int, k: int, pitch: int) -> None:
    product = plain(n, k)
    splits, tile = product.splits(pitch, H200), product.tile(pitch)
    steps = ceil_div(k, STEP)
    units = steps // 4 if steps % 4 == 0 else 1
    assert 1 <= splits <= min(MOST_SPLITS, units)
    at_once, items = H200.n_multiprocessors * tile.blocks, product.n_items(pitch)
    assert items * tile.weight_rows * tile.n_rows >= n * pitch
    assert product.n_blocks(splits, pitch, H200) == min(items * splits, at_once)
    assert product.n_blocks(splits, pitch, H200) % tile.cluster == 0
    if items > 8 * at_once:
        assert splits == 1
    if items * 4 <= at_once and units >= 8:
        assert splits > 1
