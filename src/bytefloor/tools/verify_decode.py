"""The kernels of decoding against the oracle, launch by launch: of one token, or of as many as a graph has.

Each launch gets a step number of its own, inputs that carry its parity, and everything else NaN; then it runs alone. So
none waits for another, and attention's parts of one launch are not those of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.device_batch import DecodingRow
from bytefloor.engine.planner import Launch
from bytefloor.formats.stream import ROWS
from bytefloor.model.fuse import Fused, FusedAttention, FusedEmbed, FusedLogits, FusedPerLayer, FusedProduct
from bytefloor.tools.verify_bounds import STEP, evaluate
from bytefloor.tools.verify_oracle import Oracle, hide, kept_values
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


class DecodeKernels:
    """The launches of a device executor for n tokens, and where their inputs and outputs are.

    n_tokens: 1, or one of the executor's batch sizes; of_one: of its draft sizes, tokens of one sequence. The executor
    is not fit for decoding until ``finish`` was called.
    """

    def __init__(
        self,
        executor: DeviceExecutor,
        fused: Sequence[Fused],
        oracle: Oracle,
        n_tokens: int = 1,
        of_one: bool = False,
    ) -> None:
        self.executor, self.oracle, self.n, self.of_one = executor, oracle, n_tokens, of_one
        graphs = executor._drafts if of_one else executor._batches
        self._graph = None if n_tokens == 1 else graphs[n_tokens]
        launches = executor.launches if self._graph is None else self._graph.launches
        self.launches = launches_of(fused, launches)
        self.state = launches[-1].arguments[5].view(-1, 4)
        self.rung = decode_rung(n_tokens, of_one)

    def check(self, fused: Fused, inputs: dict[int, Tensor], rows: Sequence[int]) -> Line:
        """inputs: of all rows; the oracle has taken in the call. rows: those that are looked at."""
        site = Site(self.rung, self.oracle.step, fused.replaces, part_of(fused))
        for start in range(0, len(rows), self.n):
            chosen = tuple(rows[start : start + self.n])
            for probe in self._probes(fused, chosen_rows(inputs, self.oracle, chosen)):
                asked = Asked(self.oracle, fused, probe, chosen)
                self._ask(asked)
                site.seen += asked.seen
        return site.line()

    def _probes(self, fused: Fused, inputs: dict[int, Tensor]) -> Iterator[Probe]:
        yield from (found := probes(fused, inputs))
        if isinstance(fused, FusedAttention) and has_loud_edge(fused):
            yield Probe(LOUD_EDGE, found[0].inputs, blames=("attention",))

    def _ask(self, asked: Asked) -> None:
        fused = asked.fused
        self._place(asked.rows)
        if isinstance(fused, FusedAttention):
            self._attention(asked, fused)
        elif isinstance(fused, FusedProduct):
            self._product(asked, fused)
        else:
            self._other(asked)

    def finish(self) -> None:
        """Make the executor fit for decoding again: a step that nothing carries the number of, and NaN everywhere."""
        self._begin()
        self.executor.poison()

    # --- launching alone

    def _place(self, rows: Sequence[int]) -> None:
        """Tokens, positions and page tables; a graph's other rows are nobody's."""
        batch, ids = self.oracle.batch, self.oracle.ids
        if self._graph is None:
            self.executor._show({name: tables[0] for name, tables in batch.tables.items()})
            placed = [(ids[rows[0]], rows[0])]
        else:
            tables = {name: tables[0] for name, tables in batch.tables.items()}
            self._graph.place([DecodingRow(ids[row], row, tables) for row in rows])
            placed = [(ids[row], row) for row in rows] + [(0, 0)] * (self.n - len(rows))
        self._wanted_state = torch.tensor(placed, dtype=torch.int32, device=self.state.device)

    def _launch(self, launch: Launch) -> None:
        self.state[:, :2] = self._wanted_state
        settle(self.executor.device)
        self.executor.launch_all([launch])
        settle(self.executor.device)

    def _begin(self) -> int:
        """A new step; its parity."""
        self.state[:, 2] += 1
        return int(self.state[0, 2]) & 1

    def _hand(self, buffer: Tensor, values: Tensor, parity: int, planes: int = 1) -> None:
        """Values [rows, n] to a buffer of the launch: the first of its planes, zeros in the others and in padding."""
        whole = torch.zeros(self.n, buffer.numel() // self.n, device=buffer.device)
        flat = values.flatten(1)
        whole.view(self.n, planes, -1)[: len(flat), 0, : flat.shape[1]] = flat.float()
        stamped = whole.view(torch.int32) & ~1 | parity
        target = buffer if buffer.dim() == 2 else buffer.view(self.n, -1)
        target.view(torch.int32).copy_(stamped)

    def _spoil(self, buffer: Tensor, parity: int) -> None:
        """NaN with the parity of the step before."""
        buffer.view(torch.int32).fill_(0x7FC00000 | (1 - parity))

    def _taken(self, buffer: Tensor, n_rows: int, planes: int = 1) -> Tensor:
        """[rows, n] without the parity, planes added up."""
        rows = buffer if buffer.dim() == 2 else buffer.view(self.n, -1)
        values = (rows.contiguous().view(torch.int32) & ~1).view(torch.float32).double()
        return values.view(self.n, planes, -1).sum(1)[:n_rows]

    # --- each kind of call

    def _other(self, asked: Asked) -> None:
        """An embedding, per-layer inputs, logits."""
        fused, (launch,) = asked.fused, self.launches[id(asked.fused)]
        arguments, constants = launch.arguments, dict(launch.kernel.defines)
        valued, last = evaluate(self.oracle, fused.replaces, asked.probe.inputs, STEP), fused.replaces[-1]
        parity = self._begin()
        if isinstance(fused, FusedEmbed):
            out = arguments[2]
        elif isinstance(fused, FusedPerLayer):
            out = arguments[4]
            projected = asked.probe.inputs[buffer_of(fused.projected, "x")]
            self._hand(arguments[0], projected, parity, int(constants["PLANES"]))
        else:
            assert isinstance(fused, FusedLogits)
            out = arguments[2]
            self._hand(arguments[0], asked.probe.inputs[buffer_of(last, "x")], parity, int(constants["PLANES"]))
        self._spoil(out, parity)
        self._launch(launch)
        found = out.view(self.n, -1)[: len(asked.rows)] if isinstance(fused, FusedLogits) else None
        found = self._taken(out, len(asked.rows)) if found is None else found
        expected, allowed = (x.flatten(1) for x in valued.of(last))
        asked.look("result", makers(last, fused.replaces), found, expected, allowed)

    def _product(self, asked: Asked, fused: FusedProduct) -> None:
        parts, inputs, n = parts_of(fused), asked.probe.inputs, len(asked.rows)
        valued = evaluate(self.oracle, fused.replaces, inputs, STEP)
        waiting, unproven = list(fused.products), taken_out(fused)
        for i, launch in enumerate(self.launches[id(fused)]):
            arguments, constants = launch.arguments, dict(launch.kernel.defines)
            parity = self._begin()
            self._hand(arguments[3], inputs[parts.x], parity)
            if parts.delta is not None:
                self._hand(arguments[4], inputs[parts.delta], parity, int(constants["DELTA_PLANES"]))
                self._spoil(arguments[8], parity)
            if parts.factor is not None:
                self._hand(arguments[12], valued.values[parts.factor], parity)
            self._spoil(arguments[9], parity)
            self._launch(launch)
            if i == 0 and parts.summed is not None:
                expected, allowed = valued.of(parts.summed)
                summed = makers(parts.summed, fused.replaces)
                asked.look("the residual", summed, self._taken(arguments[8], n), expected, allowed)
            if fused.glu is not None:
                expected, allowed = valued.of(fused.glu)
                found = self._taken(arguments[9], n)[:, : expected.shape[1]]
                asked.look(
                    "gated values", makers(fused.glu, fused.replaces), found, expected, allowed, unproven=unproven
                )
                continue
            found, start = self._taken(arguments[9], n, int(constants["PARTS"])), 0
            for _ in range(n_matrices(launch)):
                call = waiting.pop(0)
                expected, allowed = valued.of(call)
                rows = found[:, start : start + expected.shape[1]]
                asked.look("a product", makers(call, fused.replaces), rows, expected, allowed, unproven=unproven)
                start += ceil_div(expected.shape[1], ROWS) * ROWS

    def _attention(self, asked: Asked, fused: FusedAttention) -> None:
        oracle, launches = self.oracle, self.launches[id(fused)]
        launch = launches[-1]
        arguments, constants = launch.arguments, dict(launch.kernel.defines)
        heads = heads_expected(oracle, fused, asked.probe.inputs, STEP)
        table, size = oracle.batch.tables[fused.cache.kind.name][0], oracle.plan.page_size
        pool = prepare_pages(oracle, fused, asked.rows, max(asked.rows) + 1, asked.probe.name == LOUD_EDGE)
        device_pool = self.executor.pools[fused.cache.kind.name][fused.cache.index]
        device_pool.copy_(pool)
        projected = [asked.probe.inputs[key] for key in projected_buffers(fused)]
        # Tokens of several sequences wait for no keys but their own, and here they share pages: a first pass writes
        # what a second one, which writes it again, reads. Only the last row's are sure to be written before that.
        is_shared = self.n > 1 and not self.of_one and fused.owns_kv
        for hidden in [asked.rows, asked.rows[-1:]] if is_shared else [asked.rows]:
            for row in hidden if fused.owns_kv else ():
                hide(device_pool, table, size, row, row + 1)
            parity = self._begin()
            self._hand_rows(arguments[0], projected, parity, int(constants["PLANES_IN"]))
            self._spoil(arguments[12], parity)
            for each in launches:
                self._launch(each)
        kept = kept_values(device_pool, fused.cache, table, size, max(asked.rows) + 1)
        asked.look_at_kept(heads, kept[list(asked.rows)])
        asked.look_at_mixed(heads, device_pool, self._taken(arguments[12], len(asked.rows)))

    def _hand_rows(self, buffer: Tensor, projected: Sequence[Tensor], parity: int, planes: int) -> None:
        """Rows of q, k and v side by side, each filled up to whole records."""
        padded = [torch.nn.functional.pad(x.flatten(1), (0, -x[0].numel() % ROWS)) for x in projected]
        self._hand(buffer, torch.cat(padded, dim=1), parity, planes)


def decode_rung(n_tokens: int, of_one: bool = False) -> str:
    """What the rung is called."""
    if n_tokens == 1:
        return "kernels of one token"
    return f"kernels of {n_tokens} tokens{' of one sequence' if of_one else ''}"


def n_matrices(launch: Launch) -> int:
    """Side by side in a product."""
    return sum(packed is not None for packed in launch.arguments[:3])


def launches_of(fused: Sequence[Fused], launches: Sequence[Launch]) -> dict[int, list[Launch]]:
    """Which launches are whose, by the identity of the fused call: a product may be several, attention two, all others
    are one."""
    waiting, found = list(launches), {}
    for call in fused:
        own = [waiting.pop(0)]
        if isinstance(call, FusedProduct) and not call.is_pair:
            while sum(map(n_matrices, own)) < len(call.products):
                own.append(waiting.pop(0))
        if isinstance(call, FusedAttention) and waiting[0].kernel.name == "attention":
            own.append(waiting.pop(0))
        found[id(call)] = own
    assert not waiting
    return found


def settle(device: torch.device) -> None:
    """Wait for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
