"""Launches of the small kernels of a prompt chunk, decided and compiled without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.kernels import KernelSpec, compile_kernel
from bytefloor.engine.launches import RESERVED_BYTES
from bytefloor.engine.row_launches import (
    glu_rows_grid,
    heads_rows_grid,
    norm_rows_grid,
    plan_glu_rows,
    plan_heads_rows,
    plan_norm_rows,
)
from bytefloor.errors import UnsupportedError
from bytefloor.model.fuse import FusedAttention
from bytefloor.model.step import CacheKind, CacheLayer, OpCall
from bytefloor.ops import OPS
from cards import CARDS

PLAN = CachePlan(capacity=32768, chunk=2048)
WIDTHS = (576, 640, 1152, 2560, 3840, 4096, 5376, 8192)


def norms(k: int, has_all: bool = True) -> KernelSpec:
    return plan_norm_rows(k, 1e-6, has_delta=True, has_post_norm=has_all, has_scalar=has_all, has_norm=True)


def heads(
    e: int, n_heads: int, j: int, storage: str = "bf16", rotated: int = 0, style: str = "split", owns_kv: bool = True,
    v_from_k: bool = False,
) -> KernelSpec:  # fmt: skip
    def call(name: str, **attributes: object) -> OpCall:
        return OpCall(OPS[name], "test", {}, attributes, None, {})

    norm, kind = call("rms_norm", eps=1e-6), CacheKind("kind", j, e, None, storage, rotated)
    rope = call("rope", style=style, inverse_frequencies=())
    fused = FusedAttention(
        "test", call("attention", scale=1.0), norm, norm, norm, rope, CacheLayer(kind, 0), owns_kv, v_from_k, ()
    )
    return plan_heads_rows(fused, n_heads, 1e-6, PLAN)


REPRESENTATIVE: dict[str, Callable[[], KernelSpec]] = {
    **{f"norms {k}": lambda k=k: norms(k) for k in WIDTHS},
    **{f"norms {k} alone": lambda k=k: norms(k, has_all=False) for k in WIDTHS},
    "heads 64": lambda: heads(64, 9, 3),
    "heads 80 int8": lambda: heads(80, 8, 8, "int8"),
    "heads 96 fp8": lambda: heads(96, 8, 4, "fp8"),
    "heads 128": lambda: heads(128, 32, 8, style="interleaved"),
    "heads 256": lambda: heads(256, 16, 8),
    "heads 256 fp8": lambda: heads(256, 16, 8, "fp8"),
    "heads 512": lambda: heads(512, 16, 1, v_from_k=True),
    "heads 512 of values": lambda: heads(512, 16, 1, rotated=128, v_from_k=True),
    "heads 512 int8": lambda: heads(512, 16, 1, "int8", v_from_k=True),
    "queries alone": lambda: heads(256, 8, 1, owns_kv=False),
    "gates": lambda: plan_glu_rows(256, "gelu_tanh"),
}
EVERYWHERE = ("norms 3840", "norms 5376", "heads 128", "heads 256 fp8", "heads 512", "heads 512 of values", "gates")
"""Compiled for all architectures; the others for the oldest and for the one that is offered."""
COMPILED = [(n, a) for n in REPRESENTATIVE for a in CARDS if n in EVERYWHERE or a in ("sm_80", "sm_90a")]


@pytest.mark.parametrize(("name", "architecture"), COMPILED)
def test_every_kernel_compiles_for_every_architecture_without_spills(name: str, architecture: str) -> None:
    pytest.importorskip("cuda.core")
    code, report = compile_kernel(REPRESENTATIVE[name](), architecture)
    assert len(code) > 1000
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]


@pytest.mark.parametrize("name", list(REPRESENTATIVE))
def test_blocks_have_the_shared_memory_they_ask_for(name: str) -> None:
    kernel = REPRESENTATIVE[name]()
    for card in CARDS.values():
        assert kernel.shared_bytes + RESERVED_BYTES <= card.multiprocessor_bytes
    n_blocks = int(dict(kernel.defines).get("RESIDENT", 1))
    assert n_blocks * (kernel.shared_bytes + RESERVED_BYTES) <= CARDS["sm_90a"].multiprocessor_bytes


@pytest.mark.parametrize("k", [32, *WIDTHS, 12288])
def test_a_row_is_split_over_whole_warps_that_are_nearly_all_at_work(k: int) -> None:
    kernel = norms(k)
    constants = {key: int(dict(kernel.defines)[key]) for key in ("WARPS", "TOGETHER", "RESIDENT")}
    lanes = 32 * constants["WARPS"]
    assert kernel.threads == lanes * constants["TOGETHER"] <= 1024
    n_fours = ceil_div(k, 64) * 16
    assert ceil_div(n_fours, lanes) <= 5
    if k >= 576:
        assert n_fours >= 0.9 * ceil_div(n_fours, lanes) * lanes
        assert 24 <= constants["RESIDENT"] * kernel.threads // 32 <= 32


def test_grids_cover_all_rows() -> None:
    card, kernel = CARDS["sm_90a"], norms(576)
    assert norm_rows_grid(kernel, 1, card) == (1, 1)
    assert norm_rows_grid(kernel, 17, card) == (3, 1)
    assert norm_rows_grid(kernel, 100_000, card) == (132 * int(dict(kernel.defines)["RESIDENT"]), 1)
    kernel = heads(256, 16, 8)
    assert heads_rows_grid(kernel, 2048, card) == (2048, 1)
    assert heads_rows_grid(kernel, 33, card) == (33, 4), "32 heads, eight a block"
    assert heads_rows_grid(heads(64, 9, 3), 1, card) == (1, 1), "15 heads, 32 a block"
    assert heads_rows_grid(heads(256, 8, 1, owns_kv=False), 1, card) == (1, 1)
    assert glu_rows_grid(plan_glu_rows(48, "silu"), 33) == (ceil_div(33 * 16, 256), 1)


def test_what_no_kernel_takes_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="norms of rows of 578 columns"):
        norms(578)
    with pytest.raises(UnsupportedError, match="norms of rows of 12352 columns"):
        norms(12352)
    with pytest.raises(UnsupportedError, match="test: no kernel for heads of 72 in many rows"):
        heads(72, 4, 2)
    with pytest.raises(UnsupportedError, match="gates of 30 columns"):
        plan_glu_rows(30, "silu")
