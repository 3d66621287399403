"""How the one-row list becomes kernel launches: constants, grids and shared memory, decided without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.kernels import KernelSpec, spec
from bytefloor.errors import UnsupportedError
from bytefloor.formats.stream import ROWS, StreamForm
from bytefloor.model.fuse import FusedAttention, FusedProduct

WARPS = 8
MOST_HEADS = WARPS
"""Query heads of an attention block: a warp does the softmax of one."""
PRODUCT_THREADS = WARPS * 32 + 32
ATTENTION_THREADS = 256
SHARED_BYTES = 113 * 1024
"""Half a multiprocessor's shared memory on sm_90: the next kernel of the chain must fit beside this one."""
MOST_SLOTS = 12
MOST_TILES = 24
"""Row tiles a block sums in shared memory; a product with more of them takes more blocks."""
RUNS_ON_DEVICE = 264
"""Runs of the cache band that an attention kernel is cut into at most, over all KV heads: two a multiprocessor."""


@dataclass(frozen=True)
class Segment:
    """One weight of a product: its form and its rows."""

    form: StreamForm
    n: int


@dataclass(frozen=True)
class ProductLaunch:
    """planes: parts of the result that the consumer adds."""

    kernel: KernelSpec
    n_blocks: int
    planes: int


def unit_ranges(n_units: int, granule: int, n_blocks: int) -> list[tuple[int, int]]:
    """The units of each block, as the kernel works them out."""
    granules = n_units // granule
    return [(granules * b // n_blocks * granule, granules * (b + 1) // n_blocks * granule) for b in range(n_blocks)]


def count_planes(n_units: int, units_a_tile: int, ranges: list[tuple[int, int]]) -> int:
    """The most blocks that share one row tile."""
    touched: dict[int, int] = {}
    for begin, end in ranges:
        if end > begin:
            for tile in {begin // units_a_tile, (end - 1) // units_a_tile}:
                touched[tile] = touched.get(tile, 0) + 1
    return max(touched.values())


def plan_product(
    fused: FusedProduct,
    segments: list[Segment],
    k: int,
    delta_planes: int,
    eps: float,
    n_multiprocessors: int,
    takes_codes: bool = False,
) -> ProductLaunch:
    """Grid and constants of a product. Blocks share the records evenly, to the record, or to the tile with GLU."""
    columns = segments[0].form.columns
    if any(segment.form.columns != columns for segment in segments):
        names = ", ".join(segment.form.name for segment in segments)
        raise UnsupportedError(f"{fused.part}: no kernel for products of {names} in one launch")
    units_a_tile = k // columns
    n = sum(segment.n for segment in segments)
    if fused.glu is not None and n % 64:
        raise UnsupportedError(f"{fused.part}: {n // 2} outputs of the GLU are not whole groups of 32")
    n_units = n // ROWS * units_a_tile
    granule = units_a_tile if fused.glu is not None else 1
    wanted = n_units // granule if granule > 1 else ceil_div(n_units, WARPS)
    n_blocks = min(n_multiprocessors, wanted)
    while _most_tiles(ranges := unit_ranges(n_units, granule, n_blocks), units_a_tile) > MOST_TILES:
        n_blocks += n_multiprocessors
    planes = 1 if fused.glu is not None else count_planes(n_units, units_a_tile, ranges)
    tiles = _most_tiles(ranges, units_a_tile)
    record_bytes = max(segment.form.record_bytes for segment in segments)
    fixed = 2 * k + k // 32 * 16 + tiles * WARPS * ROWS * 4 + 2 * WARPS * 4
    n_slots = min(MOST_SLOTS, (SHARED_BYTES - fixed) // (WARPS * record_bytes + 16))
    if n_slots < 2:
        raise UnsupportedError(f"{fused.part}: a product over {k} columns leaves no room for a ring of weights")
    activation = {None: 0, "silu": 1, "gelu_tanh": 2}[fused.glu.attributes["activation"] if fused.glu else None]
    kernel = spec(
        "product",
        PRODUCT_THREADS,
        n_slots * (WARPS * record_bytes + 16) + fixed,
        SEGMENTS=" ".join(f"S({segment.form.name}, {segment.n // ROWS})" for segment in segments),
        COLUMNS=columns,
        RECORD_BYTES=record_bytes,
        K=k,
        N=n,
        NORM=fused.norm is not None,
        POST_NORM=fused.post_norm is not None,
        DELTA_PLANES=delta_planes,
        SCALAR=fused.scalar is not None,
        CODES=takes_codes,
        GLU=activation,
        PLANES=planes,
        TILES_PER_BLOCK=tiles,
        SLOTS=n_slots,
        EPS=float(eps),
    )
    return ProductLaunch(kernel, n_blocks, planes)


def _most_tiles(ranges: list[tuple[int, int]], units_a_tile: int) -> int:
    return max((end - 1) // units_a_tile - begin // units_a_tile + 1 for begin, end in ranges if end > begin)


@dataclass(frozen=True)
class AttentionLaunch:
    """max_runs by n_head_groups blocks; parts: floats of scratch that runs are merged from."""

    kernel: KernelSpec
    max_runs: int
    n_head_groups: int
    part_floats: int


def plan_attention(fused: FusedAttention, n_heads: int, planes_in: int, eps: float, plan: CachePlan) -> AttentionLaunch:
    """Heads a block, tile and stages so that the tiles fit in shared memory."""
    kind = fused.cache.kind
    e, j = kind.head_size, kind.n_kv_heads
    group = n_heads // j
    heads = next(h for h in ((4, 2, 1) if e > 256 else (8, 7, 6, 5, 4, 3, 2, 1)) if group % h == 0)
    if e % 16:
        raise UnsupportedError(f"{fused.part}: no attention kernel for head size {e}")
    tile, stages = (32, 2) if e > 256 else (64, 1) if e > 128 else (64, 2)
    if plan.page_size % tile:
        raise UnsupportedError(f"{fused.part}: pages of {plan.page_size} positions are not whole tiles of {tile}")
    max_runs = max(1, RUNS_ON_DEVICE // (j * (group // heads)))
    max_runs = min(max_runs, 64 if e > 256 else 128, ceil_div(plan.capacity, tile) + 1)
    tiles_bytes = stages * 2 * tile * (e + 8) * 2
    sums_bytes = ATTENTION_THREADS // (e // 8) * heads * e * 4
    shared = max(tiles_bytes, sums_bytes) + heads * ceil_div(e, 64) * 256 + 2 * e * 4 + 8 * tile * 4 + heads * 4
    n_in = (n_heads + (j if fused.owns_kv else 0) + (j if fused.owns_kv and not fused.has_v_from_k else 0)) * e
    rope = {None: 0, "split": 1, "interleaved": 2}[fused.rope.attributes["style"] if fused.rope else None]
    kernel = spec(
        "attention",
        ATTENTION_THREADS,
        shared,
        E=e,
        H=n_heads,
        J=j,
        HEADS=heads,
        WINDOW=kind.window or 0,
        PAGE=plan.page_size,
        TILE=tile,
        STAGES=stages,
        MAX_RUNS=max_runs,
        PLANES_IN=planes_in,
        N_IN=n_in,
        QK_NORM=fused.q_norm is not None,
        V_NORM=fused.v_norm is not None,
        ROPE=rope,
        OWNS_KV=fused.owns_kv,
        V_FROM_K=fused.has_v_from_k,
        SCALE=float(fused.attention.attributes["scale"]),
        EPS=float(eps),
    )
    n_groups = n_heads // heads
    return AttentionLaunch(kernel, max_runs, n_groups, n_groups * max_runs * heads * e)
