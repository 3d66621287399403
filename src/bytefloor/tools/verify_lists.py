"""Plain lists against each other, and the reference executor's own arithmetic against the oracle, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bytefloor.model.step import Buffer, OpCall, Step
from bytefloor.model.weights import Weight
from bytefloor.tools.verify_bounds import (
    ROW_SCORE_ERROR,
    STEP,
    attention_error,
    evaluate,
    kept_error,
    mixture,
)
from bytefloor.tools.verify_oracle import Oracle, Roundings, kept_values, keys_and_values, new_pools
from bytefloor.tools.verify_report import EQUAL, WRONG, Line, Seen, Site, names, numbers_of
from bytefloor.tools.verify_sites import QUIET, buffer_of, quiet

Key = tuple[str, str, int]
"""Part, op, and how many such calls of the part came before."""


def compare_lists(expected: Step, found: Step, rung: str) -> Iterator[Line]:
    """A line for each call of the first list: whether the other has it, with the same attributes and operands, where
    all that it reads has been made. Then one for each call that only the other has."""
    ours, theirs = _keyed(expected.calls), _keyed(found.calls)
    our_makers, their_makers = _made_by(ours), _made_by(theirs)
    inputs = {b.id: b.name for b in (*expected.inputs.values(), *expected.tables.values())}
    order = {key: i for i, key in enumerate(theirs)}
    numbers = numbers_of(expected)
    written: dict[int, int] = {}
    for key, call in theirs.items():
        if call.op.writes_cache:
            written.setdefault(_layer(call), order[key])

    def source(operand: object, made_by: dict[int, Key], named: dict[int, str]) -> object:
        if isinstance(operand, Weight):
            return operand.name
        assert isinstance(operand, Buffer)
        return made_by.get(operand.id, named.get(operand.id, operand.name))

    their_inputs = {b.id: b.name for b in (*found.inputs.values(), *found.tables.values())}
    for key, call in ours.items():
        other, note = theirs.get(key), ""
        if other is None:
            note = "the other list has no such call"
        else:
            note = _difference(call, other)
            for name, operand in call.operands.items():
                theirs_from = source(other.operands.get(name), their_makers, their_inputs) if not note else None
                ours_from = source(operand, our_makers, inputs)
                if not note and theirs_from != ours_from:
                    note = f"{name} comes from {_shown(theirs_from)}, expected {_shown(ours_from)}"
                if not note and isinstance(theirs_from, tuple) and order[theirs_from] > order[key]:
                    note = f"{name} is made only later, by {_shown(theirs_from)}"
            if not note and call.op.reads_cache and written.get(_layer(other), -1) > order[key]:
                note = "reads keys and values before they are written"
        number = str(numbers[id(call)])
        yield Line(rung, number, call.part, names([call]), 0.0, 0.0, WRONG if note else EQUAL, note)
    for key, call in theirs.items():
        if key not in ours:
            yield Line(rung, "", call.part, names([call]), None, None, WRONG, "only the other list has this call")


def _layer(call: OpCall) -> int:
    assert call.cache is not None
    return hash((call.cache.kind.name, call.cache.index))


def _difference(call: OpCall, other: OpCall) -> str:
    for name, value in call.attributes.items():
        if other.attributes.get(name) != value:
            return f"{name} is {_brief(other.attributes.get(name))}, expected {_brief(value)}"
    if set(call.operands) != set(other.operands):
        return f"operands {sorted(other.operands)}, expected {sorted(call.operands)}"
    if call.cache != other.cache:
        return f"cache layer {other.cache}, expected {call.cache}"
    return ""


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:60] + "..."


def _shown(source: object) -> str:
    return f"{source[1]} of {source[0]}" if isinstance(source, tuple) else str(source)


def _keyed(calls: Sequence[OpCall]) -> dict[Key, OpCall]:
    counts: dict[tuple[str, str], int] = {}
    found: dict[Key, OpCall] = {}
    for call in calls:
        place = call.part, call.op.name + "".join(weight.name for weight in call.weights)
        counts[place] = counts.get(place, -1) + 1
        found[*place, counts[place]] = call
    return found


def _made_by(calls: dict[Key, OpCall]) -> dict[int, Key]:
    return {call.output.id: key for key, call in calls.items() if call.output is not None}


@dataclass(frozen=True)
class Arithmetic:
    """How the reference executor computes. by_row: rows one by one. weights: dtype of matrices."""

    name: str
    by_row: bool = False
    weights: torch.dtype = torch.float32

    @property
    def roundings(self) -> Roundings:
        """What an oracle has to round to judge it."""
        if self.weights == torch.float32:
            return Roundings()
        return Roundings(weights="bf16", sums="bf16")


Compute = Callable[[OpCall, dict[int, Tensor], Tensor | None], Any]


class PlainCalls:
    """The reference of each call in float32, on the oracle's inputs; beside those, norms on quiet ones."""

    def __init__(self, oracle: Oracle, arithmetic: Arithmetic, compute: Compute | None = None) -> None:
        """compute: in place of the ops' references."""
        self.oracle, self.arithmetic = oracle, arithmetic
        self._compute = compute or self._run
        self._pools = new_pools(oracle.step, oracle.plan, oracle.device)

    def check(self, call: OpCall, inputs: dict[int, Tensor]) -> Line:
        """inputs: of all rows; the oracle has taken in the call."""
        site = Site(self.arithmetic.name, self.oracle.step, [call], call.part)
        floats = {key: x.float().double() if x.is_floating_point() else x for key, x in inputs.items()}
        if call.op.writes_cache:
            self._write(site, call, floats)
        elif call.op.reads_cache:
            self._attend(site, call, floats)
        else:
            self._see(site, call, floats, "")
            if call.op.name == "rms_norm":
                x = buffer_of(call, "x")
                small = {**floats, x: quiet(floats[x], call.attributes["eps"])}
                self._see(site, call, small, QUIET)
        return site.line()

    def _see(self, site: Site, call: OpCall, inputs: dict[int, Tensor], probe: str) -> None:
        valued = evaluate(self.oracle, [call], inputs, STEP / 2)
        expected, allowed = valued.of(call)
        found = self._rows(call, inputs, None)
        positions = tuple(range(len(expected)))
        site.seen.append(Seen("result", (call,), found, expected, allowed, positions, probe=probe))

    def _write(self, site: Site, call: OpCall, inputs: dict[int, Tensor]) -> None:
        assert call.cache is not None
        kind, layer = call.cache.kind, call.cache
        pool = self._pools[kind.name][layer.index]
        self._rows(call, inputs, pool)
        kept = self._kept(pool, call)
        e = kind.head_size
        k, v = inputs[buffer_of(call, "k")], inputs[buffer_of(call, "v")]
        if kind.rotated:
            expected = self._kept(self.oracle.pool_of(layer), call)[:, 0]
            pairs = [("values", kept[:, 0, :, :e], v), ("turning keys", kept[:, 0, :, e:], expected[..., e:])]
        else:
            pairs = [("keys", kept[:, 0], k), ("values", kept[:, 1], v)]
        storage = call.attributes["storage"]
        for what, found, x in pairs:
            allowed = kept_error(x, STEP * x.abs(), storage)
            site.seen.append(Seen(what, (call,), found, x, allowed, tuple(range(len(x)))))

    def _kept(self, pool: Tensor, call: OpCall) -> Tensor:
        assert call.cache is not None
        table, n = self.oracle.batch.tables[call.cache.kind.name][0], len(self.oracle.ids)
        return kept_values(pool, call.cache, table, self.oracle.plan.page_size, n)

    def _attend(self, site: Site, call: OpCall, inputs: dict[int, Tensor]) -> None:
        assert call.cache is not None
        oracle, pool = self.oracle, self.oracle.pool_of(call.cache)
        weight = call.operands.get("k_norm")
        k_norm = oracle.matrices.values(weight) if isinstance(weight, Weight) else None
        k, v = keys_and_values(self._kept(pool, call), call.cache, k_norm)
        q, slots = inputs[buffer_of(call, "q")], inputs[buffer_of(call, "slots")]
        expected = oracle.result(call, inputs, pool)
        window, scale = call.attributes["window"], call.attributes["scale"]
        mixed = mixture(q, torch.zeros_like(q), k, v, slots, scale, window)
        allowed = attention_error(mixed, expected, ROW_SCORE_ERROR)
        found = self._rows(call, inputs, pool.float() if pool.dtype == torch.float64 else pool)
        site.seen.append(Seen("mixed values", (call,), found, expected, allowed, tuple(range(len(q)))))

    # --- the other executor

    def _rows(self, call: OpCall, inputs: dict[int, Tensor], pool: Tensor | None) -> Any:
        """All at once, or one by one."""
        n = len(self.oracle.ids)
        tables = {buffer.id for buffer in self.oracle.step.tables.values()}
        wanted = self.oracle.step.inputs["wanted"].id
        if not self.arithmetic.by_row:
            return self._compute(call, inputs, pool)
        parts = []
        for row in range(n):
            own = {key: x if key in tables else x[row : row + 1] for key, x in inputs.items()}
            if wanted in own:
                own[wanted] = torch.zeros_like(own[wanted])
            parts.append(self._compute(call, own, pool))
        return torch.cat(parts) if parts[0] is not None else parts[0]

    def _run(self, call: OpCall, inputs: dict[int, Tensor], pool: Tensor | None) -> Any:
        arguments: dict[str, Any] = dict(call.attributes)
        for name, operand in call.operands.items():
            if isinstance(operand, Buffer):
                x = inputs[operand.id]
                arguments[name] = x.float() if x.is_floating_point() else x
            elif call.op.name == "embed":
                arguments[name] = _Rows(operand, self.oracle.device)
            else:
                matrix = self.oracle.matrices.values(operand)
                arguments[name] = matrix.to(self.arithmetic.weights) if matrix.dim() == 2 else matrix
        if pool is not None:
            arguments["cache"] = pool
        return call.op.reference(**arguments)


class _Rows:
    """Rows of a table as float32."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        self._stored, self._device = weight.stored, device

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self._stored.rows(ids.cpu()).to(self._device)
