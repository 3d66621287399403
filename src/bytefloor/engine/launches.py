"""How the one-row list becomes kernel launches: constants, grids and shared memory, decided without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.kernels import KernelSpec, spec
from bytefloor.errors import UnsupportedError
from bytefloor.formats.stream import ROWS, StreamForm
from bytefloor.model.fuse import FusedAttention, FusedProduct
from bytefloor.model.step import CacheKind

PRODUCT_WARPS = 16
SLOT_RECORDS = 4
"""Records of a slot of the ring of a product of one token: one for each warp of a group."""
MOST_HEADS = 8
"""Query heads of an attention block: the columns of a tensor core operation, and a warp each."""
ATTENTION_WARPS = 8
RESERVED_BYTES = 1024
"""Shared memory that the system takes of every block."""
MOST_SLOTS = 24
MOST_STAGES = 3
"""Of attention's tiles in bf16; up to twice as many of smaller ones, so that as many bytes are under way."""
MOST_COLUMNS = 4096
"""Of a part, where a product may be split: more of them take long to prepare in every block."""
ITEMS_A_BLOCK = 3
"""Fewer leave blocks waiting for the last one."""
STORAGES = {"bf16": 0, "int8": 1, "fp8": 2}
"""What a cache may keep, by the numbers that ops/attention_storage.cuh has for them."""
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
"""Of gates, by the numbers that ops/activation.cuh has for them."""
LEAST_TILES = 2
"""Of a run at least, where tiles are taken one after another: below, merging costs more."""


@dataclass(frozen=True)
class Card:
    """What launches depend on. multiprocessor_bytes: shared memory of a multiprocessor."""

    n_multiprocessors: int
    multiprocessor_bytes: int = 228 * 1024

    @property
    def has_room_for_two(self) -> bool:
        """Whether the next kernel of the chain can be there beside one with a ring worth having."""
        return self.multiprocessor_bytes >= 200 * 1024

    @property
    def block_bytes(self) -> int:
        """The most of a block: a little less than half where two are to fit, otherwise all."""
        return (self.alone_bytes - 640) if self.has_room_for_two else self.multiprocessor_bytes - RESERVED_BYTES

    @property
    def alone_bytes(self) -> int:
        """A little more than half: no two such blocks on one multiprocessor, though one fits beside its neighbours."""
        return self.multiprocessor_bytes // 2 - RESERVED_BYTES + 128 if self.has_room_for_two else 0


@dataclass(frozen=True)
class Segment:
    """One weight of a product: its form and its rows."""

    form: StreamForm
    n: int


@dataclass(frozen=True)
class Rows:
    """Values that several tokens have one row each of: floats from one row to the next of what a product reads.

    n_tokens: one, or a multiple of four. x, delta, factor: of its input, of the planes that the residual takes up, of
    what a gate is multiplied with. y: of a plane of the output. mode: of attention, where tokens are of one sequence.
    """

    n_tokens: int = 1
    x: int = 0
    delta: int = 0
    factor: int = 0
    y: int = 0
    mode: int = 0


ONE_ROW = Rows()
WRITES, READS = 1, 2
"""Modes of attention: keys and values to their pages and nothing else; all else, once they are there."""


@dataclass(frozen=True)
class ProductLaunch:
    """planes: parts of the result that the consumer adds. n_places: 64-bit words by which blocks tell each other of
    several tokens."""

    kernel: KernelSpec
    n_blocks: int
    planes: int
    n_places: int = 0


def count_parts(n_records: int, k: int, n_tiles: int, n_multiprocessors: int) -> int:
    """Into how many parts the columns are split: few, of no more columns than a block should prepare."""
    whole = [p for p in range(1, n_records + 1) if n_records % p == 0]
    fitting = [p for p in whole if k // p <= MOST_COLUMNS] or whole[-1:]
    wanted = [p for p in fitting if n_tiles * p >= ITEMS_A_BLOCK * n_multiprocessors]
    enough = [p for p in wanted if n_records // p >= SLOT_RECORDS * 2]
    return (enough or fitting)[0]


@dataclass(frozen=True)
class Ring:
    """How a product's block uses its warps and its shared memory.

    warps: those that multiply. group: records of a slot. resident: blocks that share a multiprocessor.
    """

    warps: int
    group: int
    resident: int


RINGS = {
    1: (Ring(16, 4, 2),),
    4: (Ring(16, 4, 2), Ring(8, 2, 2)),
    8: (Ring(20, 4, 1), Ring(16, 2, 1)),
    16: (Ring(16, 4, 1), Ring(12, 2, 1), Ring(8, 2, 1)),
}
"""By the number of tokens, in order of preference: the first that has room."""


def plan_product(
    fused: FusedProduct,
    segments: list[Segment],
    k: int,
    delta_planes: int,
    eps: float,
    card: Card,
    rows: Rows = ONE_ROW,
) -> ProductLaunch:
    """Grid, ring and constants of a product. segments: of one record width.

    What decides the order of sums, parts above all, does not depend on the number of tokens.
    """
    columns, n_tokens = segments[0].form.columns, rows.n_tokens
    assert all(segment.form.columns == columns for segment in segments)
    if k % 8 or (delta_planes > 1 and k % ROWS):
        # Planes of whole row tiles come from the product before.
        raise UnsupportedError(
            f"{fused.part}: no kernel for products over {k} columns of {max(1, delta_planes)} planes"
        )
    n, all_records = sum(segment.n for segment in segments), segments[0].form.n_records(k)
    n_tiles = n // ROWS
    # Norms, and the residual that the first block writes, need all columns in every block; zeros stand at the end only.
    is_whole = fused.norm is not None or fused.has_delta or all_records * columns != k
    parts = 1 if is_whole else count_parts(all_records, k, n_tiles, card.n_multiprocessors)
    n_records = all_records // parts
    part_columns = n_records * columns
    record_bytes = max(segment.form.record_bytes for segment in segments)

    def n_buffers(ring: Ring, n_slots: int) -> int:
        return ceil_div(n_slots, ceil_div(n_records, ring.group)) + (2 if n_tokens == 1 else 1)

    def shared_bytes(ring: Ring, n_slots: int) -> int:
        activations = (2 * part_columns + part_columns // 32 * 16) * n_tokens
        shares = n_records * ROWS * 4 * n_tokens
        beside = 2 * PRODUCT_WARPS * 4
        return (
            n_slots * (ring.group * record_bytes + 24) + activations + n_buffers(ring, n_slots) * (shares + 20) + beside
        )

    def most_slots(ring: Ring) -> int | None:
        room = card.block_bytes if ring.resident > 1 else card.multiprocessor_bytes - RESERVED_BYTES
        fitting = [n for n in range(ring.warps // ring.group, MOST_SLOTS + 1) if shared_bytes(ring, n) <= room]
        return fitting[-1] if fitting else None

    found = [(ring, n_slots) for ring in RINGS[n_tokens] if (n_slots := most_slots(ring)) is not None]
    if not found:
        raise UnsupportedError(
            f"{fused.part}: a product over {k} columns of {n_tokens} tokens leaves no room for a ring of weights"
        )
    ring, n_slots = found[0]
    shared = shared_bytes(ring, n_slots)
    if fused.norm is None and fused.glu is None:
        # After attention, which leaves some multiprocessors empty, two blocks would settle on one and none on another.
        shared = max(shared, card.alone_bytes)
    blocks_a_part = max(1, min(card.n_multiprocessors // parts, n_tiles))
    activation = ACTIVATIONS[fused.glu.attributes["activation"] if fused.glu else None]
    constants: dict[str, Any] = {
        "SEGMENTS": " ".join(f"S({segment.n // ROWS}, {segment.form.name})" for segment in segments),
        "COLUMNS": columns,
        "RECORD_BYTES": record_bytes,
        "WARPS": ring.warps,
        "K": part_columns,
        "K_IN": k // parts,
        "PARTS": parts,
        "N": n,
        "NORM": fused.norm is not None,
        "POST_NORM": fused.post_norm is not None,
        "DELTA_PLANES": delta_planes,
        "SCALAR": fused.scalar is not None,
        "GLU": activation,
        "FACTOR": fused.factor is not None,
        "SLOTS": n_slots,
        "BUFFERS": n_buffers(ring, n_slots),
        "BLOCKS": blocks_a_part * parts,
        "STATIC_ITEMS": min(n_slots // ceil_div(n_records, ring.group), n_tiles // blocks_a_part),
        "INTERLEAVE": 4 if fused.is_pair and n_tiles % 4 == 0 else 1,
        "EPS": float(eps),
    }
    threads = max(ring.warps, PRODUCT_WARPS) * 32 + 64
    if n_tokens == 1:
        return ProductLaunch(spec("product", threads, shared, **constants), blocks_a_part * parts, parts)
    constants |= {
        "TOKENS": n_tokens,
        "GROUP": ring.group,
        "THREADS": threads,
        "RESIDENT": ring.resident,
        "X_STRIDE": rows.x,
        "DELTA_STRIDE": rows.delta,
        "FACTOR_STRIDE": rows.factor,
        "Y_STRIDE": parts * rows.y,
    }
    n_places = part_columns * parts // 8 * 4 * n_tokens
    return ProductLaunch(spec("product_tokens", threads, shared, **constants), blocks_a_part * parts, parts, n_places)


@dataclass(frozen=True)
class AttentionLaunch:
    """grid: groups of heads, blocks of each, tokens. n_parts, n_sums: a token's tagged values, which are merged."""

    kernel: KernelSpec
    grid: tuple[int, int, int]
    n_parts: int
    n_sums: int


@dataclass(frozen=True)
class Tiles:
    """Tiles of attention: how many are under way, how many a round may take, how many a run has at least."""

    n_positions: int
    stages: int
    together: int
    least: int
    shared_bytes: int


def choose_tiles(kind: CacheKind, heads: int, card: Card) -> Tiles:
    """So that they fit in shared memory. heads: query heads a block."""
    e, has_codes = kind.head_size, STORAGES[kind.storage] > 0
    bf16_tile = 16 if e > 256 else 32 if e > 128 else 64
    tile = min(64, 2 * bf16_tile) if has_codes else bf16_tile
    row_bytes = (
        2 * (e + (0 if e % 32 else 16) + 2) if has_codes else 2 * (kind.head_values + (8 if kind.rotated else 16))
    )
    stage_bytes, parts = tile * row_bytes, ATTENTION_WARPS // (tile // 16)

    def beside_tiles(together: int) -> int:
        n, queries = together * tile, heads * e * 4 if together > 1 else 0
        shares, factors = max(2 * heads * (n + 8) * 2, queries), 112 if has_codes else 32
        return max(parts * heads * (n + 4) * 4, e * 4) + shares + factors + 2 * e * 4

    def most_together(stages: int) -> int:
        room = card.block_bytes - stages * stage_bytes
        return max(n for n in range(1, stages + 1) if n == 1 or beside_tiles(n) <= room)

    fitting = (card.block_bytes - beside_tiles(1)) // stage_bytes
    if fitting < 2:
        raise UnsupportedError(f"no room for two tiles of {heads} heads of {e} in {card.block_bytes} bytes")
    stages = min(MOST_STAGES, fitting)
    if has_codes or kind.rotated:
        # More of what is smaller, but for one where that makes room for rounds of several.
        stages = max(range(stages, min(2 * MOST_STAGES, fitting) + 1), key=lambda n: (min(most_together(n), 2), n))
    together = most_together(stages)
    least = min(together, MOST_STAGES) if together > 1 else LEAST_TILES
    shared = stages * stage_bytes + beside_tiles(together)
    return Tiles(tile, stages, together, ceil_div(least * bf16_tile, tile), shared)


def plan_attention(
    fused: FusedAttention,
    n_heads: int,
    planes_in: int,
    eps: float,
    plan: CachePlan,
    card: Card,
    rows: Rows = ONE_ROW,
) -> AttentionLaunch:
    """Heads a block, tile and stages so that the tiles fit. rows.x: floats from one token's q, k, v to the next.

    Runs wait for each other when they are merged, so no more are planned than are on the device at once. Several tokens
    are cut into the same runs as one, which fewer blocks then take by turns.
    """
    kind = fused.cache.kind
    e, j = kind.head_size, kind.n_kv_heads
    group = n_heads // j
    heads = next(h for h in range(MOST_HEADS, 0, -1) if group % h == 0)
    if e % 16 or e > 512:
        raise UnsupportedError(f"{fused.part}: no attention kernel for head size {e}")
    if kind.rotated % 32:
        raise UnsupportedError(f"{fused.part}: no attention kernel for keys of which {kind.rotated} lanes turn")
    tiles = choose_tiles(kind, heads, card)
    tile, shared = tiles.n_positions, tiles.shared_bytes
    if plan.page_size % tile:
        raise UnsupportedError(f"{fused.part}: pages of {plan.page_size} positions are not whole tiles of {tile}")
    on_device = card.n_multiprocessors * min(2, card.multiprocessor_bytes // (shared + RESERVED_BYTES))
    n_groups = n_heads // heads
    longest = min(plan.capacity, kind.window + tile) if kind.window else plan.capacity
    max_runs = max(1, min(on_device // n_groups, ceil_div(longest, tile) + 1))
    n_in = (n_heads + (j if fused.owns_kv else 0) + (j if fused.owns_kv and not fused.has_v_from_k else 0)) * e
    rope = {None: 0, "split": 1, "interleaved": 2}[fused.rope.attributes["style"] if fused.rope else None]
    kernel = spec(
        "attention",
        ATTENTION_WARPS * 32,
        shared,
        STORAGE=STORAGES[kind.storage],
        ROTATED=kind.rotated,
        E=e,
        H=n_heads,
        J=j,
        HEADS=heads,
        WINDOW=kind.window or 0,
        PAGE=plan.page_size,
        TILE=tile,
        STAGES=tiles.stages,
        TOGETHER=tiles.together,
        TOKENS=rows.n_tokens,
        QKV_STRIDE=rows.x,
        MAX_RUNS=max_runs,
        MIN_TILES=tiles.least,
        PLANES_IN=planes_in,
        N_IN=n_in,
        QK_NORM=fused.q_norm is not None,
        V_NORM=fused.v_norm is not None,
        ROPE=rope,
        OWNS_KV=fused.owns_kv and rows.mode != READS,
        V_FROM_K=fused.has_v_from_k,
        SCALE=float(fused.attention.attributes["scale"]),
        EPS=float(eps),
        MODE=rows.mode,
    )
    n_runs = n_groups * max_runs
    n_blocks = 1 if rows.mode == WRITES else max(1, min(max_runs, on_device // (n_groups * rows.n_tokens)))
    grid = (n_groups, n_blocks, rows.n_tokens)
    return AttentionLaunch(kernel, grid, n_runs * heads * e, n_runs * heads * 2)
