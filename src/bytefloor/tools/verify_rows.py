"""The kernels of many rows against the oracle, launch by launch: a chunk of a text, on top of what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.planner import Launch
from bytefloor.engine.row_planner import Planes, RowStep
from bytefloor.engine.row_products import FEW_ROWS, pad_rows
from bytefloor.model.fuse import Fused, FusedAttention, FusedEmbed, FusedLogits, FusedPerLayer, FusedProduct
from bytefloor.model.step import OpCall
from bytefloor.ops.row_tiles import from_row_tiles, tiles_shape, to_row_tiles
from bytefloor.tools.verify_bounds import (
    BF16_STEP,
    ROW_SCORE_ERROR,
    UNIT_ERROR,
    Valued,
    differs_from_rounded,
    evaluate,
    kept_error,
)
from bytefloor.tools.verify_decode import settle
from bytefloor.tools.verify_oracle import Oracle, kept_values, query_factor
from bytefloor.tools.verify_report import Line, Site, makers
from bytefloor.tools.verify_sites import (
    LOUD_EDGE,
    Asked,
    Probe,
    buffer_of,
    chosen_rows,
    has_loud_edge,
    heads_expected,
    part_of,
    parts_of,
    prepare_pages,
    probes,
    projected_buffers,
    taken_out,
)

UNIT_FORMS = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Whose products of few rows multiply multiples of a unit: docs/architecture.md, "Many rows at once"."""


class RowKernels:
    """The launches of a chunk, and where their inputs and outputs are.

    rows: consecutive positions of the oracle's text.
    """

    def __init__(self, executor: DeviceExecutor, fused: Sequence[Fused], oracle: Oracle, rows: Sequence[int]) -> None:
        self.executor, self.oracle, self.rows, self.pitch = executor, oracle, tuple(rows), pad_rows(len(rows))
        self.rung = f"kernels of {len(rows)} rows"
        self._planner = executor._prompts._planner
        self._place()
        walk = self._planner.walk(self.pitch)
        head = walk.head(self.pitch)
        self.steps = steps_of(fused, [*walk.trunk, *head.launches])
        self._planes_of_head, self.per_layer = head.planes, walk.per_layer

    def _place(self) -> None:
        """Tokens, slots and pages where the kernels look for them. All rows are wanted."""
        whole, rows = self.oracle.batch, list(self.rows)
        batch = Batch(
            [whole.tokens[row] for row in rows], list(rows), list(rows), [0] * len(rows), list(range(len(rows))),
            whole.tables,
        )  # fmt: skip
        self.executor._prompts._place(batch, self.pitch)

    def check(self, fused: Fused, inputs: dict[int, Tensor]) -> list[Line]:
        """A line for each kernel. inputs: of all rows of the text; the oracle has taken in the call.

        The soft cap is no kernel here; what it gives is among the logits of whole runs.
        """
        if isinstance(fused, FusedLogits):
            return []
        chosen = chosen_rows(inputs, self.oracle, self.rows)
        if isinstance(fused, FusedAttention):
            return self._attention(fused, chosen)
        if isinstance(fused, FusedProduct):
            return self._product(fused, chosen)
        return [self._other(fused, chosen)]

    def _launch(self, step: RowStep) -> None:
        settle(self.executor.device)
        self.executor.launch_all([step]) if isinstance(step, Launch) else step()
        settle(self.executor.device)

    def _asked(self, fused: Fused, probe: Probe) -> Asked:
        return Asked(self.oracle, fused, probe, self.rows, is_rows=True)

    def _site(self, fused: Fused, calls: Sequence[OpCall]) -> Site:
        return Site(self.rung, self.oracle.step, calls, part_of(fused))

    # --- buffers

    def _put(self, buffer: Tensor, values: Tensor) -> None:
        """Rows of float32, NaN behind them."""
        flat = values.flatten(1)
        buffer.view(-1).fill_(torch.nan)
        buffer.view(-1)[: flat.numel()].copy_(flat.float().flatten())

    def _put_tiles(self, buffer: Tensor, values: Tensor) -> None:
        tiles = to_row_tiles(values.float(), self.pitch)
        buffer.view(-1)[: tiles.numel()].copy_(tiles.flatten())

    def _tiles(self, buffer: Tensor, k: int) -> Tensor:
        shape = tiles_shape(k, self.pitch)
        n = shape[0] * shape[1] * shape[2] * shape[3]
        return from_row_tiles(buffer.view(-1)[:n].view(shape), len(self.rows), k).double()

    def _planes(self, planes: Planes) -> Tensor:
        whole = planes.values.view(-1)[: planes.n * self.pitch * planes.stride]
        return whole.view(planes.n, self.pitch, planes.stride).double().sum(0)[: len(self.rows)]

    # --- each kind of call

    def _other(self, fused: Fused, inputs: dict[int, Tensor]) -> Line:
        """An embedding, or per-layer inputs: their projection comes from the product before them."""
        steps, last = self.steps[id(fused)], fused.replaces[-1]
        site = self._site(fused, fused.replaces)
        for probe in probes(fused, inputs):
            valued, asked = evaluate(self.oracle, fused.replaces, probe.inputs), self._asked(fused, probe)
            if isinstance(fused, FusedPerLayer):
                assert self._projected is not None
                assert self.per_layer is not None
                self._put(self._projected.values, self._as_planes(probe.inputs[buffer_of(fused.projected, "x")]))
                out = self.per_layer
            else:
                assert isinstance(fused, FusedEmbed)
                assert isinstance(steps[0], Launch)
                out = steps[0].arguments[-1]
            out.fill_(torch.nan)
            for step in steps:
                self._launch(step)
            expected, allowed = (x.flatten(1) for x in valued.of(last))
            found = out.view(-1)[: expected.numel()].view(expected.shape)
            asked.look("result", makers(last, fused.replaces), found, expected, allowed)
            site.seen += asked.seen
        return site.line()

    def _as_planes(self, x: Tensor) -> Tensor:
        """The first plane of a product's result, zeros in all others."""
        assert self._projected is not None
        whole = torch.zeros(self._projected.n, self.pitch, self._projected.stride, device=x.device)
        whole[0, : len(x), : x[0].numel()] = x.flatten(1).float()
        return whole.flatten(1)

    _projected: Planes | None = None

    def _product(self, fused: FusedProduct, inputs: dict[int, Tensor]) -> list[Line]:
        """The norm before it, the product, and where an E model's gate is the product, what multiplies it."""
        steps = [step for step in self.steps[id(fused)] if isinstance(step, Launch)]
        lines = []
        if steps[0].kernel.name == "norm_rows":
            lines.append(self._norm(fused, steps[0], inputs))
            steps = steps[1:]
        lines.append(self._multiply(fused, steps[0], inputs))
        if len(steps) > 1:
            lines.append(self._gate(fused, steps[1], inputs))
        return lines

    def _norm(self, fused: FusedProduct, launch: Launch, inputs: dict[int, Tensor]) -> Line:
        parts, arguments = parts_of(fused), launch.arguments
        before = fused.replaces[: next(i for i, c in enumerate(fused.replaces) if c is fused.products[0])]
        calls = [call for call in before if call is not fused.factor]
        site = self._site(fused, calls)
        for probe in probes(replace(fused, replaces=tuple(calls)), {k: inputs[k] for k in _needed(calls, inputs)}):
            valued, asked = evaluate(self.oracle, calls, probe.inputs), self._asked(fused, probe)
            has_delta = arguments[2] is not None
            if has_delta:
                delta = Planes(arguments[2], arguments[3], arguments[4] // self.pitch, arguments[4])
                assert parts.delta is not None
                whole = torch.zeros(delta.n, self.pitch, delta.stride, device=self.executor.device)
                whole[0, : len(self.rows)] = probe.inputs[parts.delta].float()
                self._put(arguments[2], whole)
                self._put(arguments[1], probe.inputs[parts.x])
            else:  # the product before has added to the residual
                self._put(arguments[1], valued.of(parts.summed)[0] if parts.summed else probe.inputs[parts.x])
            arguments[8].view(-1).fill_(torch.nan)
            self._launch(launch)
            if has_delta and parts.summed is not None and arguments[0] is None:
                expected, allowed = valued.of(parts.summed)
                found = arguments[1].view(-1)[: expected.numel()].view(expected.shape)
                asked.look("the residual", makers(parts.summed, calls), found, expected, allowed)
            self._look_at_tiles(asked, valued, calls, arguments[8], taken_out(fused))
            site.seen += asked.seen
        return site.line()

    def _look_at_tiles(
        self, asked: Asked, valued: Valued, calls: Sequence[OpCall], tiles: Tensor, unproven: tuple[OpCall, ...]
    ) -> None:
        """What the last call but its rounding gives, as bf16."""
        rounding = calls[-1]
        value = buffer_of(rounding, "x")
        expected = valued.values[value]
        error = valued.errors[value].expand_as(expected)
        found = self._tiles(tiles, expected.shape[-1])
        allowed = kept_error(expected, error, "bf16")
        others = differs_from_rounded(found, expected, error)
        by = makers(rounding, calls)
        asked.look("rounded rows", by, found, expected, allowed, others=others, unproven=unproven)

    def _multiply(self, fused: FusedProduct, launch: Launch, inputs: dict[int, Tensor]) -> Line:
        """What bf16 rows, which are exact here, give."""
        arguments = launch.arguments
        calls = [*fused.products] if fused.glu is None or fused.factor is not None else [*fused.products, fused.glu]
        valued = evaluate(self.oracle, fused.replaces, inputs)
        given = {key: valued.values[key] for key in (buffer_of(fused.products[0], "x"),)}
        x = next(iter(given.values()))
        is_few = self.pitch <= FEW_ROWS
        unit = max(UNIT_ERROR * (is_few and _form(call) in UNIT_FORMS) for call in fused.products)
        found = evaluate(self.oracle, calls, given, weight_error=unit)
        asked = self._asked(fused, Probe("", inputs))
        self._put_tiles(arguments[0], x)
        out, adds = arguments[7], bool(arguments[13])
        sizes = [size for size in arguments[4:7] if size]
        site = self._site(fused, calls)
        if calls[-1] is fused.glu:
            expected, error = found.of(fused.glu)
            out.view(-1).fill_(torch.nan)
            self._launch(launch)
            tiles = self._tiles(out, expected.shape[1])
            others = differs_from_rounded(tiles, expected, error)
            asked.look(
                "gated rows", makers(fused.glu, calls), tiles, expected, kept_error(expected, error, "bf16"),
                others=others,
            )  # fmt: skip
        else:
            before = torch.linspace(-1, 1, sizes[0], dtype=torch.float64, device=x.device).float().double()
            self._put(out, before.expand(self.pitch, -1) if adds else torch.empty(self.pitch, 0, device=x.device))
            self._launch(launch)
            planes = Planes(out, arguments[12], arguments[10], arguments[10] * self.pitch)
            result, start = self._planes(planes), 0
            for call, size in zip(fused.products, sizes, strict=True):
                expected, allowed = found.of(call)
                if adds:
                    expected = expected + before
                    allowed = allowed + BF16_STEP**3 * expected.abs()
                asked.look("a product", (call,), result[:, start : start + size], expected, allowed)
                start += size
            self._projected = planes
        site.seen += asked.seen
        return site.line()

    def _gate(self, fused: FusedProduct, launch: Launch, inputs: dict[int, Tensor]) -> Line:
        """An E model's gate, and the slice of the per-layer inputs that it is multiplied with."""
        assert fused.glu is not None
        assert fused.factor is not None
        arguments, calls = launch.arguments, [fused.factor, fused.glu]
        valued = evaluate(self.oracle, fused.replaces, inputs)
        gate = buffer_of(fused.glu, "gate")
        given = {gate: valued.values[gate].float().double(), **{k: inputs[k] for k in _needed([fused.factor], inputs)}}
        found, asked = evaluate(self.oracle, calls, given), self._asked(fused, Probe("", inputs))
        whole = torch.zeros(arguments[1], self.pitch, arguments[2] // self.pitch, device=self.executor.device)
        whole[0, : len(self.rows)] = given[gate].float()
        self._put(arguments[0], whole)
        self._put(arguments[3], given[buffer_of(fused.factor, "x")])
        arguments[6].view(-1).fill_(torch.nan)
        self._launch(launch)
        expected, error = found.of(fused.glu)
        tiles = self._tiles(arguments[6], expected.shape[1])
        asked.look(
            "gated rows", makers(fused.glu, calls), tiles, expected, kept_error(expected, error, "bf16"),
            others=differs_from_rounded(tiles, expected, error),
        )  # fmt: skip
        site = self._site(fused, calls)
        site.seen += asked.seen
        return site.line()

    def _attention(self, fused: FusedAttention, inputs: dict[int, Tensor]) -> list[Line]:
        """Norms of heads, RoPE and the cache write; then the mixing, over the oracle's pages and queries."""
        heads_launch, launch = self.steps[id(fused)]
        assert isinstance(heads_launch, Launch)
        assert isinstance(launch, Launch)
        before = [call for call in fused.replaces[:-1] if call is not fused.attention]
        site, mixing = self._site(fused, before), self._site(fused, [fused.attention])
        found = probes(fused, inputs)
        for probe in found:
            asked = self._asked(fused, probe)
            self._heads(asked, fused, heads_launch)
            site.seen += asked.seen
        edge = [Probe(LOUD_EDGE, found[0].inputs, blames=("attention",))] if has_loud_edge(fused) else []
        for probe in [found[0], *edge]:
            asked = self._asked(fused, probe)
            self._mix(asked, fused, launch)
            mixing.seen += asked.seen
        return [site.line(), mixing.line()]

    def _heads(self, asked: Asked, fused: FusedAttention, launch: Launch) -> None:
        oracle, arguments, calls = self.oracle, launch.arguments, fused.replaces
        heads = heads_expected(oracle, fused, asked.probe.inputs)
        until = self.rows[0] if fused.owns_kv else self.rows[-1] + 1
        pool = self.executor.pools[fused.cache.kind.name][fused.cache.index]
        pool.copy_(prepare_pages(oracle, fused, self.rows, until, False))
        for i, buffer in enumerate(projected_buffers(fused)):
            values, stride, n_planes, plane_stride = arguments[4 * i : 4 * i + 4]
            x = asked.probe.inputs[buffer].flatten(1).float()
            for plane in range(n_planes):
                target = values.as_strided(
                    (len(x), x.shape[1]), (stride, 1), values.storage_offset() + plane * plane_stride
                )
                target.copy_(x if plane == 0 else torch.zeros_like(x))
        queries = arguments[21]
        queries.view(-1).fill_(torch.nan)
        self._launch(launch)
        table, size = oracle.batch.tables[fused.cache.kind.name][0], oracle.plan.page_size
        kept = kept_values(pool, fused.cache, table, size, self.rows[-1] + 1)
        asked.look_at_kept(heads, kept[list(self.rows)])
        factor = self._factor(fused, heads.q)
        expected, error = heads.q * factor, heads.q_error * factor.abs()
        error = error + 2.0**-21 * expected.abs()
        result = queries.view(-1)[: expected.numel()].view(expected.shape).double()
        allowed = kept_error(expected, error, "bf16")
        queries_by = tuple(made for made in makers(fused.attention, calls, "q") if made is not fused.attention)
        turning = tuple(call for call in calls if call.op.name == "rope")
        asked.look("queries", queries_by, result, expected, allowed, idle_at_0=turning)

    def _factor(self, fused: FusedAttention, q: Tensor) -> Tensor:
        attributes, weight = fused.attention.attributes, fused.attention.operands.get("k_norm")
        k_norm = None if weight is None else self.oracle.matrices.values(weight).double()  # type: ignore[arg-type]
        return query_factor(q, attributes["scale"], attributes["rotated"], k_norm)

    def _mix(self, asked: Asked, fused: FusedAttention, launch: Launch) -> None:
        oracle, arguments = self.oracle, launch.arguments
        heads = heads_expected(oracle, fused, asked.probe.inputs)
        pages = prepare_pages(oracle, fused, self.rows, self.rows[-1] + 1, asked.probe.name == LOUD_EDGE)
        pool = self.executor.pools[fused.cache.kind.name][fused.cache.index]
        pool.copy_(pages)
        factor = self._factor(fused, heads.q)
        held = (heads.q * factor).to(torch.bfloat16)
        queries = arguments[0].view(-1)
        queries[: held.numel()].copy_(held.flatten())
        arguments[5].view(-1).fill_(torch.nan)
        self._launch(launch)
        found = self._tiles(arguments[5], held[0].numel())
        asked.look_at_mixed(heads, pages, found, ROW_SCORE_ERROR)


def _needed(calls: Sequence[OpCall], inputs: dict[int, Tensor]) -> list[int]:
    """Those of the inputs that these calls read."""
    read = {getattr(operand, "id", None) for call in calls for operand in call.operands.values()}
    return [key for key in inputs if key in read]


def _form(call: OpCall) -> str:
    return call.weights[0].stored.format_name


def steps_of(fused: Sequence[Fused], steps: Sequence[RowStep]) -> dict[int, list[RowStep]]:
    """Which launches are whose, by the identity of the fused call."""
    waiting, found = list(steps), {}

    def next_is(name: str) -> bool:
        return bool(waiting) and isinstance(waiting[0], Launch) and waiting[0].kernel.name == name

    for call in fused:
        if isinstance(call, FusedLogits):
            continue
        own: list[RowStep] = []
        if isinstance(call, FusedProduct):
            own += [waiting.pop(0)] if next_is("norm_rows") else []
            own.append(waiting.pop(0))
            own += [waiting.pop(0)] if next_is("glu_rows") else []
        else:
            own += [waiting.pop(0) for _ in range(1 if isinstance(call, FusedEmbed) else 2)]
        found[id(call)] = own
    assert not waiting
    return found
