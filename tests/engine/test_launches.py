"""Kernel launches, decided and compiled without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.device_highest import highest_specs
from bytefloor.engine.kernels import KernelSpec, compile_kernel, spec
from bytefloor.engine.launches import (
    RESERVED_BYTES,
    Card,
    Rows,
    Segment,
    count_parts,
    plan_attention,
    plan_product,
)
from bytefloor.engine.stream_limit import read_spec
from bytefloor.errors import KernelError, UnsupportedError
from bytefloor.formats import stream
from bytefloor.model.fuse import FusedAttention, FusedProduct
from bytefloor.model.step import CacheKind, CacheLayer, OpCall
from bytefloor.ops import OPS
from cards import CARDS

MOST_SPILLED_BYTES = 64
REGISTERS = 65536
H200 = CARDS["sm_90a"]
MULTIPROCESSORS = H200.n_multiprocessors
PLAN = CachePlan(capacity=32768, chunk=64)


def call(name: str, **attributes: object) -> OpCall:
    return OpCall(OPS[name], "test", {}, attributes, None, {"H": attributes.get("H", 1)})  # type: ignore[dict-item]


def product(*segments: tuple[str, int], k: int, glu: str | None = None, norm: bool = False) -> FusedProduct:
    return FusedProduct(
        "test",
        tuple(call("linear") for _ in segments),
        call("rms_norm", eps=1e-6) if norm else None,
        norm,
        call("rms_norm", eps=1e-6) if norm else None,
        None,
        call("glu", activation=glu) if glu else None,
        (),
    )


def planned(card: Card, *segments: tuple[str, int], k: int, glu: str | None = None, norm: bool = False) -> KernelSpec:
    forms = [Segment(stream.choose(name, n, k), n) for name, n in segments]
    fused = product(*segments, k=k, glu=glu, norm=norm)
    return plan_product(fused, forms, k, 2 if norm else 0, 1e-6, card).kernel


def gate(card: Card, segment: tuple[str, int], k: int) -> KernelSpec:
    fused = replace(product(segment, k=k, glu="gelu_tanh"), has_delta=True, post_norm=call("rms_norm", eps=1e-6))
    fused = replace(fused, factor=call("select", index=3))
    return plan_product(fused, [Segment(stream.choose(*segment, k), segment[1])], k, 4, 1e-6, card).kernel


def affine(card: Card, bits: int, group: int, k: int) -> KernelSpec:
    return of_format(card, f"affine-{bits}b-g{group}", k)


def of_format(card: Card, name: str, k: int) -> KernelSpec:
    segment = Segment(stream.choose(name, 4096, k, torch.bfloat16), 4096)
    return plan_product(product(("BF16", 4096), k=k, norm=True), [segment], k, 2, 1e-6, card).kernel


def attention(
    card: Card, e: int, n_heads: int, j: int, window: int | None = None, storage: str = "bf16", rotated: int = 0
) -> KernelSpec:
    fused = FusedAttention(
        "test",
        call("attention", scale=1.0, H=n_heads),
        call("rms_norm", eps=1e-6),
        call("rms_norm", eps=1e-6),
        None,
        call("rope", style="split", inverse_frequencies=()),
        CacheLayer(CacheKind("kind", j, e, window, storage, rotated), 0),
        True,
        False,
        (),
    )
    return plan_attention(fused, n_heads, 2, 1e-6, PLAN, card).kernel


REPRESENTATIVE: dict[str, Callable[[Card], KernelSpec]] = {
    "gemma4 12B qkv": lambda card: planned(card, ("Q4_K", 4096), ("Q4_K", 2048), ("Q6_K", 2048), k=3840, norm=True),
    "gemma4 12B gate and up": lambda card: planned(card, ("Q4_K", 30720), k=3840, glu="gelu_tanh", norm=True),
    "gemma4 12B down": lambda card: planned(card, ("Q6_K", 3840), k=15360),
    "llama 8B gate and up": lambda card: planned(card, ("Q4_K", 28672), k=4096, glu="silu", norm=True),
    "smollm2 qkv": lambda card: planned(card, ("Q4_1", 576), ("Q4_1", 192), ("Q4_1", 192), k=576, norm=True),
    "q5_k": lambda card: planned(card, ("Q5_K", 4096), k=4096),
    "q5_0": lambda card: planned(card, ("Q5_0", 4096), k=640),
    "q5_1": lambda card: planned(card, ("Q5_1", 4096), k=1536),
    "q4_0": lambda card: planned(card, ("Q4_0", 4096), k=4096),
    "q8_0 head": lambda card: planned(card, ("Q8_0", 49152), k=576, norm=True),
    "bf16": lambda card: planned(card, ("BF16", 4096), k=4096),
    "f16": lambda card: planned(card, ("F16", 4096), k=4096),
    "attention 64": lambda card: attention(card, 64, 9, 3),
    "attention 80": lambda card: attention(card, 80, 8, 8),
    "attention 96": lambda card: attention(card, 96, 8, 4),
    "attention 128": lambda card: attention(card, 128, 32, 8),
    "attention 256": lambda card: attention(card, 256, 16, 8, 1024),
    "attention 512": lambda card: attention(card, 512, 16, 1),
    "attention of values": lambda card: attention(card, 512, 16, 1, None, "bf16", 128),
    "attention int8 64": lambda card: attention(card, 64, 9, 3, None, "int8"),
    "attention int8 80": lambda card: attention(card, 80, 8, 8, None, "int8"),
    "attention int8 128": lambda card: attention(card, 128, 32, 8, None, "int8"),
    "attention int8 256": lambda card: attention(card, 256, 16, 8, 1024, "int8"),
    "attention int8 512": lambda card: attention(card, 512, 16, 1, None, "int8"),
    "attention fp8 96": lambda card: attention(card, 96, 8, 4, None, "fp8"),
    "attention fp8 128": lambda card: attention(card, 128, 32, 8, None, "fp8"),
    "attention fp8 256": lambda card: attention(card, 256, 16, 8, 1024, "fp8"),
    "attention fp8 512": lambda card: attention(card, 512, 16, 1, None, "fp8"),
    "embed": lambda card: spec("embed", 128, FORM="Q6_K", D=3840, V=262144, SCALE=61.9),
    "logits": lambda card: spec("logits", 256, V=262144, ROWS=262144, PLANES=2, CAP=30.0, BLOCKS=128, HISTORY=4097),
    "gemma4 E4B gate": lambda card: gate(card, ("Q4_K", 256), k=2560),
    "per layer": lambda card: spec(
        "per_layer",
        256,
        FORM="Q4_K",
        L=42,
        P=256,
        V=262144,
        PLANES=1,
        EPS=1e-6,
        PROJECTED_SCALE=0.02,
        OWN_SCALE=16.0,
        SCALE=0.7,
    ),
    "affine 4 bit": lambda card: affine(card, 4, 64, 3840),
    "affine 8 bit": lambda card: affine(card, 8, 128, 4096),
    "affine 3 bit": lambda card: affine(card, 3, 32, 576),
    "affine 6 bit": lambda card: affine(card, 6, 64, 640),
    "q2_k": lambda card: of_format(card, "Q2_K", 4096),
    "q3_k": lambda card: of_format(card, "Q3_K", 3840),
    "iq4_nl": lambda card: of_format(card, "IQ4_NL", 640),
    "iq4_xs": lambda card: of_format(card, "IQ4_XS", 4096),
    "mxfp4": lambda card: of_format(card, "MXFP4", 2880),
    "nvfp4": lambda card: of_format(card, "NVFP4-modelopt", 4096),
    "fp4 g128": lambda card: of_format(card, "FP4-E2M1-g128", 3840),
    "fp8": lambda card: of_format(card, "FP8-E4M3-row", 3840),
    "mxfp8": lambda card: of_format(card, "mlx-mxfp8", 4096),
    "unpack": lambda card: spec("unpack", 256, FORM="Q5_K", K=512),
    "unpack affine": lambda card: spec("unpack", 256, FORM="Affine<4, 4, 64, true>", K=512),
    "read": lambda card: read_spec(),
    "highest": lambda card: highest_specs(262144)[torch.float32],
    "highest float64": lambda card: highest_specs(151669)[torch.float64],
}

SEVERAL = {
    "gate and up": (("Q4_K", 30720), 3840, True),
    "down": (("Q6_K", 3840), 15360, False),
    "mlx": (("affine-4b-g64", 4096), 4096, True),
    "fp4": (("FP4-E2M1-g128", 4096), 3840, True),
    "q8_0": (("Q8_0", 4096), 3840, True),
    "bf16": (("BF16", 3840), 4096, False),
}


def several(card: Card, name: str, n_tokens: int) -> KernelSpec:
    """The kernel of a product of several tokens; that of a single one must be split alike."""
    segment, k, has_norm = SEVERAL[name]
    form = Segment(stream.choose(*segment, k, torch.bfloat16), segment[1])
    fused = product(("BF16", segment[1]), k=k, norm=has_norm, glu="silu" if name == "gate and up" else None)
    planes = 2 if has_norm else 0
    found = plan_product(fused, [form], k, planes, 1e-6, card, Rows(n_tokens, k, planes * k, 0, segment[1]))
    alone = plan_product(fused, [form], k, planes, 1e-6, card)
    assert (found.planes, found.n_blocks) == (alone.planes, alone.n_blocks)
    return found.kernel


PRODUCTS = [name for name in REPRESENTATIVE if REPRESENTATIVE[name](H200).name == "product"]


@pytest.mark.parametrize("architecture", list(CARDS))
@pytest.mark.parametrize("name", list(REPRESENTATIVE))
def test_every_kernel_compiles_for_every_architecture_without_spills(name: str, architecture: str) -> None:
    pytest.importorskip("cuda.core")
    check_compiled(REPRESENTATIVE[name](CARDS[architecture]), architecture)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("n_tokens", [4, 8, 16])
@pytest.mark.parametrize("name", list(SEVERAL))
def test_products_of_several_tokens_compile(name: str, n_tokens: int, architecture: str) -> None:
    """Some spill a little: as many warps as there are count for more. Where codes have no room that is said."""
    pytest.importorskip("cuda.core")
    if architecture == "sm_80" and n_tokens == 16 and name != "bf16":  # which is split in two
        with pytest.raises(UnsupportedError, match="of 16 tokens leaves no room"):
            several(CARDS[architecture], name, n_tokens)
        return
    kernel = several(CARDS[architecture], name, n_tokens)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", compile_kernel(kernel, architecture)[1])]
    assert spilled
    assert max(spilled) <= 200
    assert kernel.shared_bytes + RESERVED_BYTES <= CARDS[architecture].multiprocessor_bytes


@pytest.mark.parametrize("name", ["gemma4 12B qkv", "gemma4 12B down", "q8_0 head", "attention 256"])
def test_what_older_chips_run_compiles_for_newer_ones(name: str) -> None:
    """So that a card with bulk copies can prove the road without."""
    pytest.importorskip("cuda.core")
    kernel = REPRESENTATIVE[name](H200)
    check_compiled(replace(kernel, defines=(*kernel.defines, ("BULK", "0"))), "sm_90a")


def check_compiled(kernel: KernelSpec, architecture: str) -> None:
    code, report = compile_kernel(kernel, architecture)
    assert len(code) > 1000
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert spilled
    assert max(spilled) <= MOST_SPILLED_BYTES, f"spills {max(spilled)} bytes"


@pytest.mark.parametrize("architecture", list(CARDS))
@pytest.mark.parametrize("name", list(REPRESENTATIVE))
def test_a_block_has_the_shared_memory_it_asks_for(name: str, architecture: str) -> None:
    card = CARDS[architecture]
    assert REPRESENTATIVE[name](card).shared_bytes + RESERVED_BYTES <= card.multiprocessor_bytes


@pytest.mark.parametrize("name", [name for name in REPRESENTATIVE if name.startswith("attention")])
def test_attention_fits_beside_a_product(name: str) -> None:
    """Each quarter of a multiprocessor has its own registers, which are given out by eights; the 18 warps of a product
    leave room for two warps where five of them are. Else attention starts when the product has ended, 5 us late."""
    pytest.importorskip("cuda.core")

    def quarter(kernel: KernelSpec) -> int:
        found = re.search(r"Used (\d+) registers", compile_kernel(kernel, "sm_90a")[1])
        assert found is not None
        return ceil_div(kernel.threads // 32, 4) * ceil_div(int(found[1]), 8) * 8 * 32

    attention = REPRESENTATIVE[name](H200)
    assert attention.threads == 256
    for other in ("gemma4 12B qkv", "gemma4 12B down"):
        assert quarter(attention) + quarter(REPRESENTATIVE[other](H200)) <= REGISTERS // 4


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize(("e", "n_heads", "j"), [(64, 9, 3), (80, 8, 8), (128, 32, 8), (256, 16, 8), (512, 16, 1)])
def test_tiles_of_codes_hold_more_positions_in_as_many_bytes(e: int, n_heads: int, j: int, storage: str) -> None:
    """So as many bytes are under way; and a short band is cut as that of bf16 is, where tiles allow."""
    plain, codes = (dict(attention(H200, e, n_heads, j, None, kv).defines) for kv in ("bf16", storage))
    positions = [int(d["TILE"]) * int(d["STAGES"]) for d in (plain, codes)]
    assert positions[0] * 1.5 <= positions[1] <= positions[0] * 2
    least = [int(d["TILE"]) * int(d["MIN_TILES"]) for d in (plain, codes)]
    assert least[0] <= least[1] <= least[0] * 1.5
    assert PLAN.page_size % int(codes["TILE"]) == 0


@pytest.mark.parametrize(("k", "planes"), [(1004, 1), (1000, 3)])
def test_columns_that_no_kernel_can_take_are_refused(k: int, planes: int) -> None:
    """Eights are loaded at once, and planes of the product before are whole row tiles apart."""
    fused = product(("BF16", 320), k=k, norm=True)
    segments = [Segment(stream.choose("BF16", 320, k), 320)]
    with pytest.raises(UnsupportedError, match=f"over {k} columns of {planes} planes"):
        plan_product(fused, segments, k, planes, 1e-6, H200)


def test_a_kernel_that_does_not_compile_says_so() -> None:
    pytest.importorskip("cuda.core")
    with pytest.raises(KernelError, match="kernel embed for sm_90a"):
        compile_kernel(spec("embed", 128, FORM="Q9_9", D=1, V=1, SCALE=1.0), "sm_90a")


@pytest.mark.parametrize("name", list(REPRESENTATIVE))
def test_two_products_fit_on_a_multiprocessor(name: str) -> None:
    """The next kernel's ring fills while this one runs: shared memory and registers must hold it and its neighbour."""
    pytest.importorskip("cuda.core")
    kernel = REPRESENTATIVE[name](H200)
    assert kernel.shared_bytes + H200.block_bytes + 2 * RESERVED_BYTES <= H200.multiprocessor_bytes
    assert 2 * (H200.alone_bytes + RESERVED_BYTES) > H200.multiprocessor_bytes
    registers = re.search(r"Used (\d+) registers", compile_kernel(kernel, "sm_90a")[1])
    assert registers is not None
    assert 2 * kernel.threads * int(registers[1]) <= REGISTERS


def test_columns_are_split_where_a_block_would_prepare_many_or_have_few_items() -> None:
    assert count_parts(60, 15360, 240, MULTIPROCESSORS) == 4
    assert count_parts(16, 4096, 240, MULTIPROCESSORS) == 2
    assert count_parts(15, 3840, 1920, MULTIPROCESSORS) == 1
    assert count_parts(9, 576, 36, MULTIPROCESSORS) == 1
    for n_records, k in ((60, 15360), (56, 14336), (48, 12288), (7, 1792), (61, 15616)):
        assert n_records % count_parts(n_records, k, 240, MULTIPROCESSORS) == 0


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_item_is_static_or_drawn(name: str) -> None:
    """What the kernel takes for granted, see its static assertions."""
    d = dict(REPRESENTATIVE[name](H200).defines)
    tiles, a_part = int(d["N"]) // 16, int(d["BLOCKS"]) // int(d["PARTS"])
    assert int(d["BLOCKS"]) % int(d["PARTS"]) == 0
    assert int(d["BLOCKS"]) <= MULTIPROCESSORS
    assert int(d["STATIC_ITEMS"]) * a_part <= tiles
    assert int(d["SLOTS"]) >= int(d["WARPS"]) // 4
