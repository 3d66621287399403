"""How the small kernels of a prompt chunk are launched: constants and grids, decided without a GPU."""

from __future__ import annotations

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.kernels import KernelSpec, spec
from bytefloor.engine.launches import ACTIVATIONS, STORAGES, Card
from bytefloor.errors import UnsupportedError
from bytefloor.model.fuse import FusedAttention

ROW_WARPS = 8
"""Warps of a block, about: more where a row needs them."""
RESIDENT_WARPS = {3: 32, 5: 24, 4: 32}
"""Warps of a multiprocessor that norms have registers for, by the fours of a row a lane: of the residual, of a sum of
planes and of a plane under way. In order of preference where rows are split as evenly."""
MOST_COLUMNS = 12288
"""Of a row whose norms' weights and sums a block has room for."""
HEAD_THREADS = 256
HEAD_BLOCKS = 4
"""Blocks a multiprocessor that heads of rows are spread over, where rows are few."""
GLU_THREADS = 256


def plan_norm_rows(
    k: int, eps: float, *, has_delta: bool, has_post_norm: bool, has_scalar: bool, has_norm: bool
) -> KernelSpec:
    """norm_rows over K columns. UnsupportedError where K is no multiple of 4, or more than MOST_COLUMNS."""
    n_fours = ceil_div(k, 64) * 16
    warps, fours = min(
        ((ceil_div(n_fours, 32 * fours), fours) for fours in RESIDENT_WARPS), key=lambda found: found[0] * found[1]
    )
    if k % 4 or k > MOST_COLUMNS:
        raise UnsupportedError(f"no kernel for norms of rows of {k} columns: multiples of 4, up to {MOST_COLUMNS}")
    together = max(1, ROW_WARPS // warps)
    weight_bytes = ceil_div(n_fours, 32 * warps) * 32 * warps * 16
    return spec(
        "norm_rows",
        32 * warps * together,
        weight_bytes * (has_norm + has_post_norm),
        K=k,
        WARPS=warps,
        TOGETHER=together,
        RESIDENT=max(1, RESIDENT_WARPS[fours] // (warps * together)),
        EPS=float(eps),
        HAS_DELTA=has_delta,
        POST_NORM=has_post_norm,
        SCALAR=has_scalar,
        NORM=has_norm,
    )


def norm_rows_grid(kernel: KernelSpec, n_rows: int, card: Card) -> tuple[int, int]:
    """As many blocks as are on the device at once, which go from row to row."""
    constants = dict(kernel.defines)
    n_blocks = ceil_div(n_rows, int(constants["TOGETHER"]))
    return max(1, min(n_blocks, card.n_multiprocessors * int(constants["RESIDENT"]))), 1


def plan_heads_rows(fused: FusedAttention, n_heads: int, eps: float, plan: CachePlan) -> KernelSpec:
    """heads_rows of one attention. UnsupportedError for head sizes that are no multiple of 16."""
    kind = fused.cache.kind
    if kind.head_size % 16:
        raise UnsupportedError(f"{fused.part}: no kernel for heads of {kind.head_size} in many rows")
    return spec(
        "heads_rows",
        HEAD_THREADS,
        STORAGE=STORAGES[kind.storage],
        ROTATED=kind.rotated,
        E=kind.head_size,
        H=n_heads,
        J=kind.n_kv_heads,
        PAGE=plan.page_size,
        OWNS_KV=fused.owns_kv,
        V_FROM_K=fused.has_v_from_k,
        QK_NORM=fused.q_norm is not None,
        V_NORM=fused.v_norm is not None,
        ROPE={None: 0, "split": 1, "interleaved": 2}[fused.rope.attributes["style"] if fused.rope else None],
        SCALE=float(fused.attention.attributes["scale"]),
        EPS=float(eps),
        THREADS=HEAD_THREADS,
    )


def heads_rows_grid(kernel: KernelSpec, n_rows: int, card: Card) -> tuple[int, int]:
    """A block a row, or several where rows are few and heads are many."""
    constants = {name: int(dict(kernel.defines)[name]) for name in ("E", "H", "J", "OWNS_KV", "THREADS")}
    fours = constants["E"] // 8
    lanes = 32 if fours > 16 else 16 if fours > 8 else 8
    n_heads = constants["H"] + 2 * constants["J"] * constants["OWNS_KV"]
    most = ceil_div(n_heads * lanes, constants["THREADS"])
    return n_rows, min(most, ceil_div(card.n_multiprocessors * HEAD_BLOCKS, max(1, n_rows)))


def plan_glu_rows(n: int, activation: str) -> KernelSpec:
    """glu_rows over N columns. UnsupportedError where N is no multiple of 4."""
    if n % 4:
        raise UnsupportedError(f"no kernel for gates of {n} columns: they take multiples of 4")
    return spec("glu_rows", GLU_THREADS, N=n, GLU=ACTIVATIONS[activation], THREADS=GLU_THREADS)


def glu_rows_grid(kernel: KernelSpec, n_rows: int) -> tuple[int, int]:
    """A lane for each four values of a row."""
    n = int(dict(kernel.defines)["N"])
    return ceil_div(n_rows * ceil_div(n, 64) * 16, kernel.threads), 1
