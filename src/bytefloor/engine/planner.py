"""The launches of one token, or of several at once, with their buffers: what a CUDA graph is captured from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.engine.kernels import KernelSpec, spec
from bytefloor.engine.launches import (
    READS,
    WRITES,
    AttentionLaunch,
    Card,
    Rows,
    Segment,
    plan_attention,
    plan_product,
)
from bytefloor.engine.packed import PackedWeights, matrix, padded_rows
from bytefloor.errors import UnsupportedError
from bytefloor.model.fuse import Fused, FusedAttention, FusedEmbed, FusedLogits, FusedPerLayer, FusedProduct
from bytefloor.model.step import OpCall
from bytefloor.model.weights import Weight

LOGITS_BLOCKS = 128
LOGITS_THREADS = 256
EMBED_THREADS = 128
PER_LAYER_WARPS = 8


@dataclass(frozen=True)
class Launch:
    """One node of the graph."""

    part: str
    kernel: KernelSpec
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """What a token, or several at once, read and write beside the weights.

    pools, tables: of each cache kind. state: token, position, number of the step, and how many positions layers without
    a window have dropped, int32 [4]. history: the token at each position. banned: uint8 [V]. logits: float32 [V]. With
    several tokens tables, state, history and logits have a row for each.
    """

    plan: CachePlan
    device: torch.device
    pools: dict[str, Tensor]
    tables: dict[str, Tensor]
    state: Tensor
    history: Tensor
    banned: Tensor
    logits: Tensor
    n_tokens: int = 1


class LaunchPlanner:
    """Turns fused calls into launches and gives them buffers."""

    def __init__(
        self, fused: Sequence[Fused], weights: PackedWeights, memory: DeviceMemory, of_one: bool = False
    ) -> None:
        """of_one: the tokens are of one sequence, and see those before them."""
        self.fused, self.weights, self.memory, self.n_tokens = fused, weights, memory, memory.n_tokens
        self._of_one = of_one
        self.written: list[Tensor] = []
        properties = torch.cuda.get_device_properties(memory.device)
        self.card = Card(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)
        width = fused[0].replaces[0].sizes["D"]
        assert isinstance(width, int)
        # Every buffer that one kernel hands to another is written once a step: see ops/handover.cuh.
        self.residual = self._floats(width)
        # What the last call left: of each token `planes` rows to be added, result_size floats in all.
        self.result: Tensor | None = None
        self.planes, self.result_size = 1, 0
        plans = self._attention_plans()
        # Attention's scratch is shared by all layers and as large as the largest needs; tags tell the layers apart.
        self.parts = self._longs(max(plan.n_parts for plan in plans))
        self.part_sums = self._longs(max(plan.n_sums for plan in plans))
        self.n_attention = len(plans)
        self.attention_calls = 0
        self.frequencies: dict[tuple[float, ...], Tensor] = {}
        # Of an E model, float32 [L, P].
        self.per_layer: Tensor | None = None
        self.per_layer_size = 0

    def _floats(self, n: int) -> Tensor:
        """n a token."""
        self.written.append(torch.zeros(self.n_tokens * n, dtype=torch.float32, device=self.memory.device))
        return self.written[-1]

    def _longs(self, n: int) -> Tensor:
        """n a token."""
        return self._words(self.n_tokens * n)

    def _words(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int64, device=self.memory.device)

    def _ints(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int32, device=self.memory.device)

    def plan_all(self) -> list[Launch]:
        """The launches of every fused call, in order."""
        return [launch for fused in self.fused for launch in self._plan(fused)]

    def _attention_plans(self) -> list[AttentionLaunch]:
        """Of all layers; their scratch does not depend on planes or eps."""
        layers = [fused for fused in self.fused if isinstance(fused, FusedAttention)]
        return [self._plan_attention(fused, 1, 1.0) for fused in layers]

    def _plan_attention(self, fused: FusedAttention, planes_in: int, eps: float, mode: int = 0) -> AttentionLaunch:
        n_heads, plan = self._n_heads(fused), self.memory.plan
        rows = Rows(self.n_tokens, self.result_size, mode=mode)
        return plan_attention(fused, n_heads, planes_in, eps, plan, self.card, rows)

    @staticmethod
    def _n_heads(fused: FusedAttention) -> int:
        n_heads = fused.attention.sizes["H"]
        assert isinstance(n_heads, int)
        return n_heads

    def _plan(self, fused: Fused) -> list[Launch]:
        if isinstance(fused, FusedProduct):
            return self._product(fused)
        if isinstance(fused, FusedEmbed):
            return [self._embed(fused)]
        if isinstance(fused, FusedPerLayer):
            return [self._per_layer(fused)]
        if isinstance(fused, FusedAttention):
            return self._attention(fused)
        return [self._logits(fused)]

    def _vector(self, weight: Weight | None) -> Tensor | None:
        return None if weight is None else self.weights.vector(weight)

    def _norm_weight(self, call: OpCall | None) -> Tensor | None:
        weight = None if call is None else call.operands.get("weight")
        return self._vector(weight) if isinstance(weight, Weight) else None

    def _embed(self, fused: FusedEmbed) -> Launch:
        table = matrix(fused.call, "table")
        v, d = table.shape
        form = self.weights.form_of(table)
        kernel = spec("embed", EMBED_THREADS, FORM=form.name, D=d, V=v, SCALE=float(fused.call.attributes["scale"]))
        grid = (ceil_div(d, EMBED_THREADS), self.n_tokens)
        return Launch("embedding", kernel, grid, (self.weights.packed(table), self.memory.state, self.residual))

    def _per_layer(self, fused: FusedPerLayer) -> Launch:
        table = matrix(fused.embed, "table")
        shape = fused.norm.output.shape if fused.norm.output is not None else ()
        n_layers, width = shape[-2:]
        assert isinstance(n_layers, int)
        assert isinstance(width, int)
        if n_layers * width != padded_rows(n_layers * width):
            raise UnsupportedError(f"{fused.part}: {n_layers} x {width} inputs are not whole tiles of rows")
        kernel = spec(
            "per_layer",
            PER_LAYER_WARPS * 32,
            FORM=self.weights.form_of(table).name,
            L=n_layers,
            P=width,
            V=table.shape[0],
            PLANES=self.planes,
            EPS=float(fused.norm.attributes["eps"]),
            PROJECTED_SCALE=float(fused.projected.attributes["factor"]),
            OWN_SCALE=float(fused.embed.attributes["scale"]),
            SCALE=float(fused.scaled.attributes["factor"]),
        )
        self.per_layer = self._floats(n_layers * width)
        self.per_layer_size = n_layers * width
        weight, packed = self._norm_weight(fused.norm), self.weights.packed(table)
        arguments = (self.result, weight, packed, self.memory.state, self.per_layer)
        return Launch(fused.part, kernel, (ceil_div(n_layers, PER_LAYER_WARPS), self.n_tokens), arguments)

    def _factor(self, fused: FusedProduct) -> Tensor | None:
        """The slice of the per-layer inputs that a gate is multiplied with."""
        if fused.factor is None:
            return None
        assert self.per_layer is not None
        n = matrix(fused.products[0]).shape[0]
        if n != padded_rows(n):
            raise UnsupportedError(f"{fused.part}: {n} per-layer inputs are not whole tiles of rows")
        return _columns(self.per_layer, self.n_tokens, fused.factor.attributes["index"] * n, n)

    def _product(self, fused: FusedProduct) -> list[Launch]:
        """One launch, or several one after another where matrices have records of different widths."""
        weights = [matrix(call) for call in fused.products]
        k = weights[0].shape[1]
        if fused.is_pair:
            segments, packed = (
                [Segment(self.weights.form_of(weights[0]), 2 * weights[0].shape[0])],
                [self.weights.packed(weights[0])],
            )
        else:
            segments = [Segment(self.weights.form_of(weight), padded_rows(weight.shape[0])) for weight in weights]
            packed = [self.weights.packed(weight) for weight in weights]
        norm = fused.norm or fused.post_norm
        eps = norm.attributes["eps"] if norm is not None else 0.0
        delta_planes = self.planes if fused.has_delta else 0
        runs = _runs_of_one_width(segments)
        sizes = [segment.n // (2 if fused.is_pair else 1) for segment in segments]
        is_first = self.result is None  # nothing but the embedded token is there yet
        is_residual = is_first or fused.norm is not None or fused.has_delta
        x, x_size = (self.residual, k) if is_residual else (self.result, self.result_size)
        rows = Rows(self.n_tokens, x_size, self.result_size, self.per_layer_size, sum(sizes))
        plans = [plan_product(fused, segments[chosen], k, delta_planes, eps, self.card, rows) for chosen in runs]
        if len(plans) > 1 and any(plan.planes > 1 for plan in plans):
            names = ", ".join(segment.form.name for segment in segments)
            raise UnsupportedError(f"{fused.part}: no kernels for products of {names} side by side, in parts")
        size = plans[0].planes * sum(sizes)
        out = self._floats(size)
        launches: list[Launch] = []
        for chosen, plan in zip(runs, plans, strict=True):
            # The residual is the first launch's to write: what is handed over is written once.
            residual = self._floats(k) if fused.has_delta else None
            if residual is not None and not launches:
                self.residual = residual
            arguments = (
                *packed[chosen],
                *[None] * (3 - len(packed[chosen])),
                x,
                self.result if fused.has_delta else None,
                self._norm_weight(fused.post_norm),
                self._norm_weight(fused.norm),
                self._vector(fused.scalar),
                residual,
                _columns(out, self.n_tokens, sum(sizes[: chosen.start]), plan.planes * sum(sizes[chosen])),
                self._ints(plan.planes),
                self.memory.state,
                self._factor(fused),
                *([self._words(plan.n_places)] if self.n_tokens > 1 else ()),
            )
            launches.append(Launch(fused.part, plan.kernel, (plan.n_blocks, 1), arguments))
        self.result, self.planes, self.result_size = out, plans[0].planes, size
        return launches

    def _attention(self, fused: FusedAttention) -> list[Launch]:
        """One launch; of tokens of one sequence two, as all their keys and values must be there before any is read."""
        norm = fused.q_norm or fused.v_norm
        eps = norm.attributes["eps"] if norm is not None else 0.0
        modes = [0] if not self._of_one else [WRITES, READS] if fused.owns_kv else [READS]
        plans = [self._plan_attention(fused, self.planes, eps, mode) for mode in modes]
        kind = fused.cache.kind
        size = self._n_heads(fused) * kind.head_size
        out = self._floats(size)
        table = self.memory.tables[kind.name]
        arguments = (
            self.result,
            self._norm_weight(fused.q_norm),
            self._key_weight(fused),
            self._rope(fused),
            self.memory.pools[kind.name][fused.cache.index],
            table,
            table.shape[-1],
            self.memory.state,
            self.parts,
            self.part_sums,
            self.attention_calls,
            self.n_attention,
            out,
        )
        self.attention_calls += 1
        self.result, self.planes, self.result_size = out, 1, size
        return [Launch(fused.part, plan.kernel, plan.grid, arguments) for plan in plans]

    def _key_weight(self, fused: FusedAttention) -> Tensor | None:
        """Of the K norm: where the cache keeps less of K, queries of layers that own no keys need it too."""
        weight = fused.attention.operands.get("k_norm")
        return self._vector(weight) if isinstance(weight, Weight) else self._norm_weight(fused.k_norm)

    def _rope(self, fused: FusedAttention) -> Tensor | None:
        if fused.rope is None:
            return None
        table = fused.rope.attributes["inverse_frequencies"]
        if table not in self.frequencies:
            self.frequencies[table] = torch.tensor(table, dtype=torch.float64, device=self.memory.device)
        return self.frequencies[table]

    def _logits(self, fused: FusedLogits) -> Launch:
        v = self.memory.banned.shape[0]
        kernel = spec(
            "logits",
            LOGITS_THREADS,
            V=v,
            ROWS=padded_rows(v),
            PLANES=self.planes,
            CAP=float(fused.cap),
            BLOCKS=LOGITS_BLOCKS,
            HISTORY=self.memory.history.shape[-1],
        )
        bests = self._floats(2 * LOGITS_BLOCKS)
        counter = self._ints(self.n_tokens)
        arguments = (
            self.result,
            self.memory.banned,
            self.memory.logits,
            bests,
            counter,
            self.memory.state,
            self.memory.history,
        )
        return Launch("head", kernel, (LOGITS_BLOCKS, self.n_tokens), arguments)


def _columns(rows: Tensor, n_rows: int, start: int, n: int) -> Tensor:
    """n floats of each row, from ``start`` on."""
    return rows[start : start + n] if n_rows == 1 else rows.view(n_rows, -1)[:, start : start + n]


def _runs_of_one_width(segments: Sequence[Segment]) -> list[slice]:
    """Neighbours whose records have as many columns: what one launch multiplies."""
    starts = [i for i in range(len(segments)) if i == 0 or segments[i].form.columns != segments[i - 1].form.columns]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(segments)], strict=True)]
