"""The forward pass of every family, in the order in which it happens."""

from __future__ import annotations

from bytefloor.errors import UnsupportedError
from bytefloor.model.config import LayerConfig, ModelConfig, Rounding
from bytefloor.model.step import Buffer, CacheKind, CacheLayer, Step, StepBuilder
from bytefloor.model.weights import LayerWeights, ModelWeights, Weight
from bytefloor.ops.page_codes import CODED, n_page_bytes
from bytefloor.ops.pages import PAGE_SIZE

PAIRS_TOGETHER = 16
"""Pairs of lanes that turn come in whole tensor core tiles of each half; where they do not, all of K is kept."""
FLOATS = ("float32", "bf16")
"""Storages that may leave out lanes of K; with codes, scores of V's lanes and of K's would have scales of their own."""
RECENT, FIRST = 128, 64
"""Positions that stay as they were written where pages are coded as a whole: a row's last ones, its own included, and
those that a sequence begins with. Either way whole pages are. docs/numerics.md has what they are worth."""


def build_step(c: ModelConfig, w: ModelWeights, rounding: Rounding) -> Step:
    """The list of one step: T token rows in, logits [R, V] of the wanted rows out."""
    caches, n_layers = assign_caches(c, rounding.cache)
    kinds = dict.fromkeys(cache.kind for cache in caches)
    s = StepBuilder((*kinds, *(other for kind in kinds for other in kind.beside.values())), n_layers)
    s.part = "embedding"
    x = s.embed(s.inputs["tokens"], w.embedding, c.embedding_scale)
    per_layer = per_layer_inputs(s, c, w, x, rounding) if c.per_layer_width else None
    for index, (layer, lw) in enumerate(zip(c.layers, w.layers, strict=True)):
        s.part = f"layers.{index}.attention"
        x = attention_block(s, c, layer, lw, caches[index], x, rounding, w.layers[layer.kv_source].k_norm)
        s.part = f"layers.{index}.mlp"
        x = mlp_block(s, c, lw, x, rounding)
        if per_layer is not None:
            s.part = f"layers.{index}.per_layer"
            x = per_layer_block(s, c, lw, x, s.select(per_layer, index), rounding)
        if lw.scalar is not None:
            x = s.scale(x, weight=lw.scalar)
    s.part = "head"
    x = s.gather_rows(x, s.inputs["wanted"])
    hidden = s.rms_norm(x, w.final_norm, c.eps)
    logits = s.linear(s.round_to(hidden, rounding.activations), w.head)
    if c.logit_soft_cap is not None:
        logits = s.soft_cap(logits, c.logit_soft_cap)
    return s.finish(hidden, logits)


def attention_block(
    s: StepBuilder,
    c: ModelConfig,
    layer: LayerConfig,
    w: LayerWeights,
    cache: CacheLayer,
    x: Buffer,
    rounding: Rounding,
    k_norm: Weight | None,
) -> Buffer:
    """x + norm(o(attention(rope(norm(q)), rope(norm(k)), v))). k_norm: of the layer whose cache it reads."""
    h = s.round_to(s.rms_norm(x, w.input_norm, c.eps), rounding.activations)
    q = s.view(s.linear(h, w.q), layer.n_heads, layer.head_size)
    if w.q_norm is not None:
        q = s.rms_norm(q, w.q_norm, c.eps)
    if layer.rope is not None:
        q = s.rope(q, layer.rope.style, layer.rope.inverse_frequencies)
    is_coded = bool(cache.kind.beside)
    if w.k is not None:
        write_keys_and_values(s, c, layer, w, cache, h)
    attended = s.attention(cache, s.rotate(q) if is_coded else q, layer.attention_scale, k_norm)
    if is_coded:
        attended = s.rotate(attended)
    flat = s.round_to(s.view(attended, layer.n_heads * layer.head_size), rounding.activations)
    out = s.linear(flat, w.o)
    if w.post_attention_norm is not None:
        out = s.rms_norm(out, w.post_attention_norm, c.eps)
    return s.add(x, out)


def write_keys_and_values(
    s: StepBuilder, c: ModelConfig, layer: LayerConfig, w: LayerWeights, cache: CacheLayer, h: Buffer
) -> None:
    """The norm of K comes before RoPE: a weight per channel does not commute with turning pairs of them."""
    assert w.k is not None
    k = s.view(s.linear(h, w.k), layer.n_kv_heads, layer.head_size)
    v = k if w.v is None else s.view(s.linear(h, w.v), layer.n_kv_heads, layer.head_size)
    if w.k_norm is not None:
        k = s.rms_norm(k, w.k_norm, c.eps)
    if c.has_v_norm:
        v = s.rms_norm(v, None, c.eps)
    if layer.rope is not None:
        k = s.rope(k, layer.rope.style, layer.rope.inverse_frequencies)
    if cache.kind.beside:
        k, v = s.rotate(k), s.rotate(v)
    s.cache_write(cache, k, v)


def mlp_block(s: StepBuilder, c: ModelConfig, w: LayerWeights, x: Buffer, rounding: Rounding) -> Buffer:
    """x + norm(down(act(gate(h)) * up(h))), h = norm(x)"""
    h = s.round_to(s.rms_norm(x, w.ffn_norm, c.eps), rounding.activations)
    hidden = s.glu(s.linear(h, w.gate), s.linear(h, w.up), c.activation)
    out = s.linear(s.round_to(hidden, rounding.activations), w.down)
    if w.post_ffn_norm is not None:
        out = s.rms_norm(out, w.post_ffn_norm, c.eps)
    return s.add(x, out)


def per_layer_inputs(s: StepBuilder, c: ModelConfig, w: ModelWeights, x: Buffer, rounding: Rounding) -> Buffer:
    """[T, L, P]: (token's own row + norm(projection of x)) / sqrt(2), for all layers at once."""
    assert w.per_layer_embedding is not None
    assert w.per_layer_model_projection is not None
    n_layers, p = len(c.layers), c.per_layer_width
    s.part = "per_layer_inputs"
    own = s.view(s.embed(s.inputs["tokens"], w.per_layer_embedding, p**0.5), n_layers, p)
    projected = s.linear(s.round_to(x, rounding.activations), w.per_layer_model_projection)
    projected = s.view(s.scale(projected, c.width**-0.5), n_layers, p)
    return s.scale(s.add(s.rms_norm(projected, w.per_layer_projection_norm, c.eps), own), 2**-0.5)


def per_layer_block(
    s: StepBuilder, c: ModelConfig, w: LayerWeights, x: Buffer, slice_: Buffer, rounding: Rounding
) -> Buffer:
    """x + norm(projection(act(gate(x)) * slice))"""
    assert w.per_layer_gate is not None
    assert w.per_layer_projection is not None
    gate = s.linear(s.round_to(x, rounding.activations), w.per_layer_gate)
    gated = s.round_to(s.glu(gate, slice_, c.activation), rounding.activations)
    out = s.rms_norm(s.linear(gated, w.per_layer_projection), w.post_per_layer_norm, c.eps)
    return s.add(x, out)


def assign_caches(c: ModelConfig, storage: str) -> tuple[list[CacheLayer], dict[str, int]]:
    """Each layer's cache. Layers that own one are numbered within their kind; a sharing layer gets its source's."""
    counts: dict[str, int] = {}
    caches: list[CacheLayer] = []
    owners = [layer for index, layer in enumerate(c.layers) if layer.kv_source == index]
    rotated: dict[str, int] = {}
    for layer in owners:
        found = rotated_lanes(c, layer) if storage in FLOATS else 0
        # All layers of a kind alike, or none of them.
        rotated[kind_name(layer)] = found if rotated.get(kind_name(layer), found) == found else 0
    for index, layer in enumerate(c.layers):
        if layer.kv_source != index:
            caches.append(caches[layer.kv_source])
            continue
        kind = make_kind(layer, storage, rotated[kind_name(layer)])
        caches.append(CacheLayer(kind, counts.get(kind.name, 0)))
        for each in (kind, *kind.beside.values()):
            counts[each.name] = counts.get(each.name, 0) + 1
    if storage == CODED and not any(cache.kind.beside for cache in caches):
        raise UnsupportedError(
            f"a cache of {CODED}: every layer has a window of at most {RECENT} positions, none of which are coded"
        )
    return caches, counts


def make_kind(layer: LayerConfig, storage: str, rotated: int) -> CacheKind:
    """Of a layer that owns its cache. A window that holds nothing but recent positions has nothing to be coded."""
    name, shape, window = kind_name(layer), (layer.n_kv_heads, layer.head_size), layer.window
    if storage != CODED:
        return CacheKind(name, *shape, window, storage, rotated)
    if window is not None and window <= RECENT:
        return CacheKind(name, *shape, window, "bf16")
    n_page_bytes(PAGE_SIZE, layer.head_size)  # refuses what it cannot hold
    recent = CacheKind(f"recent.{name}", *shape, RECENT, "bf16")
    first = CacheKind(f"first.{name}", *shape, window, "bf16", most=FIRST)
    return CacheKind(name, *shape, window, storage, recent=recent, first=first)


def kind_name(layer: LayerConfig) -> str:
    """Window and shape: layers that have them in common share a pool."""
    span = "global" if layer.window is None else f"sliding{layer.window}"
    return f"{span}.{layer.n_kv_heads}x{layer.head_size}"


def rotated_lanes(c: ModelConfig, layer: LayerConfig) -> int:
    """How many lanes of K have to be kept beside V; 0 where all have to be.

    Where V is the raw key projection under a norm without a weight, K = RoPE(w V), w that of the K norm: in lanes that
    RoPE leaves alone K is w V, and needs no keeping. Those that turn are the first pairs of (i, i + E / 2).
    """
    if not (layer.has_v_from_k and c.has_v_norm and c.has_qk_norm):
        return 0
    if layer.rope is None or layer.rope.style != "split":
        return 0
    turns = [frequency != 0 for frequency in layer.rope.inverse_frequencies]
    n = sum(turns)
    return 2 * n if 0 < n < len(turns) and all(turns[:n]) and n % PAIRS_TOGETHER == 0 else 0
