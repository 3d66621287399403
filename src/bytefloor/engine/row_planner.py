"""The launches of many rows, a chunk of prompts, with their buffers: planned once for each padded number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.eviction import deciding_calls
from bytefloor.engine.kernels import KernelSpec, spec
from bytefloor.engine.launches import Card
from bytefloor.engine.packed import PackedWeights, matrix
from bytefloor.engine.plan_rows import plan_attention_rows
from bytefloor.engine.planner import Launch
from bytefloor.engine.row_inputs import Items, RowInputs, places_of
from bytefloor.engine.row_launches import (
    glu_rows_grid,
    heads_rows_grid,
    norm_rows_grid,
    plan_glu_rows,
    plan_heads_rows,
    plan_norm_rows,
)
from bytefloor.engine.row_products import TILES, RowProduct, pad_rows, row_paddings
from bytefloor.engine.scratch import BLAS_WORKSPACE_BYTES, eviction_bytes, kept_bytes
from bytefloor.formats.lanes import STEP
from bytefloor.model.fuse import Fused, FusedAttention, FusedEmbed, FusedPerLayer, FusedProduct
from bytefloor.model.step import CacheLayer, OpCall
from bytefloor.model.weights import Weight
from bytefloor.ops.rms_norm import reference as rms_norm

UNPACK_THREADS = 256
SUMS = 2
"""Of the head's planes, where there are several: one so far, and with one more."""
CAP_TERMS = 2
"""Of wanted rows of logits, while a soft cap is computed."""
PER_LAYER_COPIES = 5
"""Of the per-layer inputs: the terms of a norm and a sum."""
SUMMED_ROWS = 256
"""Whose hidden values are unpacked at a time, a multiple of an atom's rows."""
SUM_COPIES = 3
"""Of those rows in float32: two of half the size while they are put in order, the values, and them once more."""
BLOCKS_A_MULTIPROCESSOR = 8

RowStep = Launch | Callable[[], None]


@dataclass(frozen=True)
class Planes:
    """Float32 [n][rows][stride], which the consumer adds up."""

    values: Tensor
    n: int
    stride: int
    plane_stride: int


@dataclass(frozen=True)
class Head:
    """The last product, of the wanted rows alone, and what it leaves."""

    launches: tuple[Launch, ...]
    planes: Planes


NOWHERE = torch.empty(0)
"""Stands for every buffer while their sizes are found out."""


class RowPlanner:
    """Turns fused calls into launches over many rows.

    most_rows: of a chunk. Everything is as large as the largest padding of them needs; what kernels do for rows of
    padding is thrown away. UnsupportedError where a shape has no kernel.
    """

    def __init__(
        self, fused: Sequence[Fused], weights: PackedWeights, plan: CachePlan, pools: Mapping[str, Tensor],
        most_rows: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.fused, self.weights, self.plan, self.pools, self.device = fused, weights, plan, pools, device
        properties = torch.cuda.get_device_properties(device)
        self.card = Card(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)
        self.most_rows, self.paddings = most_rows, row_paddings(most_rows)
        layers = [call for call in fused if isinstance(call, FusedAttention)]
        # Layers of one kind share pages, but may have different numbers of query heads.
        self._attention = {
            (kind, n_heads): plan_attention_rows(kind, n_heads, plan, self.card)
            for kind, n_heads in dict.fromkeys((layer.cache.kind, query_heads(layer.attention)) for layer in layers)
        }
        self.n_table = {kind.name: plan.n_table(kind) for kind, _ in self._attention}
        items = [Items(rows, places_of(kind)) for (kind, _), (_, rows, _) in self._attention.items()]
        self.inputs = RowInputs(self.paddings[-1], plan, self.n_table, items, device)
        self._frequencies: dict[tuple[float, ...], Tensor] = {}
        self._rooms: dict[str, Tensor] = {}
        self._needed: dict[str, tuple[int, torch.dtype]] = {}
        self._is_sizing = True
        for pitch in self.paddings:
            self.walk(pitch).head(pitch, is_real=False)
        self._rooms = {name: torch.zeros(n, dtype=dtype, device=device) for name, (n, dtype) in self._needed.items()}
        self._is_sizing = False

    def _room(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """A buffer that all layers share: n values of it."""
        if self._is_sizing:
            self._needed[name] = (max(n, self._needed.get(name, (0, dtype))[0]), dtype)
            return NOWHERE
        return self._rooms[name]

    def queries(self, pitch: int, n_heads: int, head_size: int) -> Tensor:
        """bf16 [pitch, H, E]: of the layer whose heads were prepared last, times its scale and log2(e), and where keys
        are values but for some lanes, times the weight of their norm in the others."""
        return self._rooms["queries"][: pitch * n_heads * head_size].view(pitch, n_heads, head_size)

    def walk(self, pitch: int) -> Walk:
        """The launches for a padded number of rows."""
        return Walk(self, pitch)

    def specs(self) -> list[KernelSpec]:
        """Every kernel that any chunk takes: beyond the largest tile rows add blocks and no kernels."""
        found: dict[KernelSpec, None] = {}
        for pitch in [pitch for pitch in self.paddings if pitch <= TILES[-1].n_rows]:
            walk = self.walk(pitch)
            launches = [*walk.trunk, *walk.head(pitch, is_real=False).launches]
            found |= {launch.kernel: None for launch in launches if isinstance(launch, Launch)}
        return list(found)

    @property
    def n_vocabulary(self) -> int:
        head = self.fused[-2]
        assert isinstance(head, FusedProduct)
        return matrix(head.products[0]).shape[0]

    def running_bytes(self) -> int:
        """What a chunk takes while it runs: planes and logits of a row a sequence, per-layer inputs term by term."""
        head = self.fused[-2]
        assert isinstance(head, FusedProduct)
        product, most = self.product(head), pad_rows(self.plan.n_sequences)
        pitches = [pitch for pitch in self.paddings if pitch <= most]
        splits = [product.splits(pitch, self.card) for pitch in pitches]
        planes = max((n + min(n - 1, SUMS)) * pitch for n, pitch in zip(splits, pitches, strict=True))
        logits = (planes + CAP_TERMS * self.plan.n_sequences) * self.n_vocabulary * 4
        sums = SUM_COPIES * min(SUMMED_ROWS, self.paddings[-1]) * matrix(head.products[0]).shape[1] * 4
        per_layer = PER_LAYER_COPIES * self._needed.get("per_layer", (0, None))[0] * 4
        return max(logits, sums, per_layer, self._eviction_bytes())

    def _eviction_bytes(self) -> int:
        """What choosing and moving take where a budget cuts prompts."""
        if self.plan.budget is None:
            return 0
        kinds = [(kind, n_heads) for kind, n_heads in self._attention if kind.window is None]
        n_layers = {kind.name: len(self.pools[kind.name]) for kind, _ in kinds}
        most = max(eviction_bytes(kind, n_heads, self.plan) for kind, n_heads in kinds)
        return BLAS_WORKSPACE_BYTES + kept_bytes([kind for kind, _ in kinds], n_layers, self.plan) + most

    def decoding_bytes(self) -> int:
        """What graphs of a row a sequence hold for good: the planes of each padding's head, and logits."""
        most = pad_rows(self.plan.n_sequences)
        head = self.fused[-2]
        assert isinstance(head, FusedProduct)
        product = self.product(head)
        planes = sum(product.splits(pitch, self.card) * pitch for pitch in self.paddings if pitch <= most)
        return (planes + most) * self.n_vocabulary * 4

    def product(self, fused: FusedProduct) -> RowProduct:
        """The matrices of a call; gate and up are one."""
        weights = [matrix(call) for call in fused.products]
        k = weights[0].shape[1]
        if fused.is_pair:
            assert fused.glu is not None
            form, n = self.weights.form_of(weights[0]), 2 * weights[0].shape[0]
            return RowProduct((form,), (n,), k, fused.glu.attributes["activation"])
        forms = tuple(self.weights.form_of(weight) for weight in weights)
        return RowProduct(forms, tuple(weight.shape[0] for weight in weights), k)

    def frequencies(self, call: OpCall | None) -> Tensor | None:
        if call is None:
            return None
        table = call.attributes["inverse_frequencies"]
        if table not in self._frequencies:
            self._frequencies[table] = torch.tensor(table, dtype=torch.float64, device=self.device)
        return self._frequencies[table]

    def vector(self, weight: object) -> Tensor | None:
        return self.weights.vector(weight) if isinstance(weight, Weight) else None

    def attention(self, fused: FusedAttention) -> tuple[KernelSpec, int, int]:
        return self._attention[fused.cache.kind, query_heads(fused.attention)]


def query_heads(attention: OpCall) -> int:
    """Of a call."""
    n_heads = attention.sizes["H"]
    assert isinstance(n_heads, int)
    return n_heads


def _adders(fused: Sequence[Fused]) -> frozenset[int]:
    """Products whose outputs the residual takes up as they are: where K is whole they can be added to it at once."""
    products = [call for call in fused if isinstance(call, FusedProduct)]
    return frozenset(id(one) for one, then in pairwise(products) if then.has_delta and then.post_norm is None)


class Walk:
    """One walk over the fused list: where the values of each call lie is what it carries along.

    trunk: all but the head, in order. choosing: of layers whose queries say what is kept of prompts, how many steps of
    the trunk come before these are overwritten: what is cached, and the query heads.
    """

    def __init__(self, planner: RowPlanner, pitch: int) -> None:
        self.p, self.pitch = planner, pitch
        width = planner.fused[0].replaces[0].sizes["D"]
        assert isinstance(width, int)
        self.width = width
        self.x = planner._room("residual", pitch * width, torch.float32)
        self.delta: Planes | None = None  # what the residual takes up next
        self.tiles: Tensor | None = None  # what the next product without a norm reads
        self.per_layer: Tensor | None = None
        self.n_per_layer = 0
        self._adders = _adders(planner.fused)
        self.choosing: dict[int, tuple[CacheLayer, int]] = {}
        self.trunk = self._trunk()

    def _trunk(self) -> list[RowStep]:
        steps: list[RowStep] = []
        attention: dict[int, OpCall] = {}
        for fused in self.p.fused[:-2]:
            if isinstance(fused, FusedEmbed):
                steps.append(self._embed(fused.call, self.x))
            elif isinstance(fused, FusedPerLayer):
                steps += self._per_layer(fused)
            elif isinstance(fused, FusedProduct):
                steps += self._product(fused)
            elif isinstance(fused, FusedAttention):
                steps += self._heads(fused)
                attention[len(steps)] = fused.attention
        for n, layer in deciding_calls(attention).items():
            self.choosing[n] = layer, query_heads(attention[n])
        return steps

    def head(self, n_wanted: int, is_real: bool = True) -> Head:
        """For a padded number of wanted rows, whose planes are made here if they are to be real."""
        fused = self._last_product
        norm, tiles = self._norm(fused, self.p.inputs.view("wanted"), n_wanted)
        product = self.p.product(fused)
        splits = product.splits(n_wanted, self.p.card)
        n_values = splits * n_wanted * sum(product.sizes) if is_real else 0
        out = torch.empty(n_values, dtype=torch.float32, device=self.p.device)
        launch, planes = self._multiply(fused, product, tiles, n_wanted, splits, out)
        return Head((norm, launch), planes)

    def final_norm(self) -> tuple[Launch, Tensor]:
        """What the head would get of all rows: row tiles of ``width`` columns, in the buffer of every other norm's."""
        return self._norm(self._last_product, None, self.pitch)

    @property
    def _last_product(self) -> FusedProduct:
        fused = self.p.fused[-2]
        assert isinstance(fused, FusedProduct)
        return fused

    def _embed(self, call: OpCall, out: Tensor) -> Launch:
        """Rows of a table, times a constant."""
        table = matrix(call, "table")
        packed, step, offset = self.p.weights.packed_rows(table)
        kernel = spec(
            "unpack",
            UNPACK_THREADS,
            FORM=self.p.weights.form_of(table).name,
            K=table.shape[1],
            SCALE=float(call.attributes["scale"]),
        )
        grid = (self.p.card.n_multiprocessors * BLOCKS_A_MULTIPROCESSOR, 1)
        return Launch(call.part, kernel, grid, (packed, self.p.inputs.tokens, offset, step, self.pitch, out))

    def _per_layer(self, fused: FusedPerLayer) -> list[RowStep]:
        """(norm(scaled projection) + the token's own row) * a constant, by torch: once a chunk."""
        assert self.delta is not None
        shape = fused.norm.output.shape if fused.norm.output is not None else ()
        n_layers, width = shape[-2:]
        assert isinstance(n_layers, int)
        assert isinstance(width, int)
        n = n_layers * width
        own = self.p._room("per_layer.own", self.pitch * n, torch.float32)
        out = self.p._room("per_layer", self.pitch * n, torch.float32)
        projected, pitch, p = self.delta, self.pitch, self.p
        weight, eps = p.vector(fused.norm.operands.get("weight")), fused.norm.attributes["eps"]
        projected_scale, scale = fused.projected.attributes["factor"], fused.scaled.attributes["factor"]

        def mix() -> None:
            planes = projected.values[: projected.n * projected.plane_stride].view(projected.n, pitch, n_layers, width)
            normed = rms_norm(planes.sum(0) * projected_scale, eps, weight)
            mixed = (normed + own[: pitch * n].view(pitch, n_layers, width)) * scale
            out[: pitch * n].view(pitch, n_layers, width).copy_(mixed)

        self.per_layer, self.n_per_layer, self.delta = out, n, None
        return [self._embed(fused.embed, own), mix]

    def _norm(self, fused: FusedProduct, rows: Tensor | None, n_rows: int) -> tuple[Launch, Tensor]:
        """What stands before a product: the residual's sum, norms, rounding."""
        p, delta = self.p, self.delta if fused.has_delta else None
        k = matrix(fused.products[0]).shape[1]
        norm = fused.norm or fused.post_norm
        kernel = plan_norm_rows(
            k,
            norm.attributes["eps"] if norm is not None else 0.0,
            has_delta=delta is not None,
            has_post_norm=fused.post_norm is not None,
            has_scalar=fused.scalar is not None,
            has_norm=fused.norm is not None,
        )
        tiles = self._tiles("normed", k, n_rows)
        arguments = (
            rows,
            self.x,
            delta.values if delta else None,
            delta.n if delta else 0,
            delta.plane_stride if delta else 0,
            p.vector(fused.post_norm.operands.get("weight")) if fused.post_norm else None,
            p.vector(fused.norm.operands.get("weight")) if fused.norm else None,
            p.vector(fused.scalar),
            tiles,
            n_rows,
            n_rows,
        )
        return Launch(fused.part, kernel, norm_rows_grid(kernel, n_rows, p.card), arguments), tiles

    def _tiles(self, name: str, k: int, n_rows: int) -> Tensor:
        """Row tiles of k columns, a buffer for each k."""
        return self.p._room(f"{name}.{k}", ceil_div(k, STEP) * STEP * n_rows, torch.bfloat16)

    def _product(self, fused: FusedProduct) -> list[RowStep]:
        p, product = self.p, self.p.product(fused)
        steps: list[RowStep] = []
        is_residual = fused.norm is not None or fused.has_delta or self.tiles is None
        if is_residual:
            norm, tiles = self._norm(fused, None, self.pitch)
            steps.append(norm)
        else:
            assert self.tiles is not None
            tiles = self.tiles
        self.tiles, self.delta = None, None
        n, splits = sum(product.sizes), product.splits(self.pitch, p.card)
        if product.activation:
            self.tiles = self._tiles("gated", n // 2, self.pitch)
            launch, _ = self._multiply(fused, product, tiles, self.pitch, splits, self.tiles)
            return [*steps, launch]
        if splits == 1 and id(fused) in self._adders:
            return [*steps, self._multiply(fused, product, tiles, self.pitch, splits, self.x, adds=True)[0]]
        out = p._room("planes", splits * self.pitch * n, torch.float32)
        launch, self.delta = self._multiply(fused, product, tiles, self.pitch, splits, out)
        steps.append(launch)
        if fused.factor is not None:
            steps.append(self._factor(fused, n))
        return steps

    def _multiply(
        self, fused: FusedProduct, product: RowProduct, tiles: Tensor, n_rows: int, splits: int, out: Tensor,
        adds: bool = False,
    ) -> tuple[Launch, Planes]:  # fmt: skip
        """out: planes, or with an activation row tiles, whose stride is their pitch. adds: to what is there."""
        p, sizes, missing = self.p, product.sizes, 3 - len(product.sizes)
        packed = [p.weights.packed(matrix(call)) for call in fused.products[: len(sizes)]]
        n, steps = sum(sizes), ceil_div(product.k, STEP)
        stride = n_rows if product.activation else n
        common = (tiles, *packed, *[None] * missing, *sizes, *[0] * missing)
        grid = (product.n_blocks(splits, n_rows, p.card), 1)
        arguments = (*common, out, n_rows, n_rows, stride, steps, splits, adds)
        launch = Launch(fused.part, product.kernel(n_rows, p.card), grid, arguments)
        return launch, Planes(out, splits, n, n_rows * n)

    def _factor(self, fused: FusedProduct, n: int) -> Launch:
        """An E model's gate times a slice of the per-layer inputs."""
        assert fused.glu is not None
        assert fused.factor is not None
        assert self.per_layer is not None
        assert self.delta is not None
        kernel = plan_glu_rows(n, fused.glu.attributes["activation"])
        gate, self.delta, self.tiles = self.delta, None, self._tiles("gated", n, self.pitch)
        arguments = (
            gate.values, gate.n, gate.plane_stride, self.per_layer, self.n_per_layer,
            fused.factor.attributes["index"] * n, self.tiles, self.pitch, self.pitch,
        )  # fmt: skip
        return Launch(fused.part, kernel, glu_rows_grid(kernel, self.pitch), arguments)

    def _heads(self, fused: FusedAttention) -> list[RowStep]:
        """Norms, RoPE and the cache write; then attention over the pages."""
        p, kind, heads = self.p, fused.cache.kind, query_heads(fused.attention)
        assert self.delta is not None
        y, e = self.delta, kind.head_size
        norm = fused.q_norm or fused.v_norm
        kernel = plan_heads_rows(fused, heads, norm.attributes["eps"] if norm is not None else 0.0, p.plan)
        starts = [0]
        if fused.owns_kv:
            starts += [heads * e] if fused.has_v_from_k else [heads * e, (heads + kind.n_kv_heads) * e]
        sources: list[tuple[Tensor | None, int, int, int]] = [
            (y.values[start:], y.stride, y.n, y.plane_stride) for start in starts
        ]
        sources += [(None, 0, 0, 0)] * (3 - len(sources))
        queries = p._room("queries", self.pitch * heads * e, torch.bfloat16)
        key_weight = fused.attention.operands.get("k_norm") or (fused.k_norm and fused.k_norm.operands.get("weight"))
        pool = p.pools[kind.name][fused.cache.index]
        table = p.inputs.view(f"table.{kind.name}")
        arguments = (
            *(value for source in sources for value in source),
            p.vector(fused.q_norm.operands.get("weight")) if fused.q_norm else None,
            p.vector(key_weight),
            p.frequencies(fused.rope),
            *(p.inputs.view(name) for name in ("positions", places_of(kind), "sequence")),
            pool,
            table,
            p.plan.n_table(kind),
            queries,
            self.pitch,
        )
        attention, item_rows, blocks = p.attention(fused)
        self.delta, self.tiles = None, self._tiles("attended", heads * e, self.pitch)
        items = p.inputs.view(Items(item_rows, places_of(kind)).name)
        n_items = p.inputs.n_items(self.pitch, item_rows, p.plan)
        mixed = (queries, pool, table, p.plan.n_table(kind), items, self.tiles, self.pitch)
        return [
            Launch(fused.part, kernel, heads_rows_grid(kernel, self.pitch, p.card), arguments),
            Launch(fused.part, attention, (n_items, blocks), mixed),
        ]
