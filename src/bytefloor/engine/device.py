"""The device executor: the next token of one sequence, or of several, as a CUDA graph; prompts many rows at a time.

Weights live packed in stream forms and nowhere else. Lengths, positions and page tables are read from device memory, so
one capture serves every position; replaying it equals launching its kernels one by one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch, PageCopy, part_of
from bytefloor.engine.batch_loop import BatchLoop
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.decode_loop import DecodeLoop, Trunk
from bytefloor.engine.device_batch import BatchGraph, DecodingRow, draft_sizes_for, sizes_for
from bytefloor.engine.device_highest import DeviceHighest, highest_specs
from bytefloor.engine.device_memory import allocate, for_tokens
from bytefloor.engine.device_sampler import sampler_bytes
from bytefloor.engine.device_support import check_list, device_architecture
from bytefloor.engine.kernels import current, load_kernels
from bytefloor.engine.memory import MemoryPlan, check_memory, place_table
from bytefloor.engine.packed import PackedWeights
from bytefloor.engine.planner import DeviceMemory, Launch, LaunchPlanner
from bytefloor.engine.progress import COMPILING, Progress, Silent
from bytefloor.engine.prompt import PromptRunner
from bytefloor.engine.row_planner import RowPlanner
from bytefloor.engine.row_sampler import RowLogits, RowSampler, as_rows, row_sampler_bytes, row_sampler_specs
from bytefloor.engine.scratch import Rehearsal
from bytefloor.errors import CapacityError, UnsupportedError
from bytefloor.model.fuse import Fused, fuse_one_row
from bytefloor.model.step import Step

MOST_ROWS_ONE_BY_ONE = 1
"""Rows of a sequence that go through the decode graph one after another; more are cheaper together."""


class DeviceExecutor:
    """Runs a step on a CUDA device.

    step: the plain list, with 16-bit activation codes and a cache of bf16, int8 or fp8.
    banned_ids: tokens that ``decode_greedy`` never takes. advice: ends the error of a model that does not fit.
    draft_rows: the most rows of one sequence, all wanted, that are to get the bits which each gets alone: 1, 4, 8, 16.

    What needs no memory comes first: plan, refuse, compile. Then memory is taken and weights are packed.
    UnsupportedError when a weight's format, a shape or the device has no kernel: whoever asked may take the reference
    executor then, and must say so.
    """

    def __init__(
        self,
        step: Step,
        plan: CachePlan,
        *,
        device: torch.device | str = "cuda",
        banned_ids: frozenset[int] = frozenset(),
        progress: Progress | None = None,
        advice: str = "",
        draft_rows: int = 1,
    ) -> None:
        self.step, self.plan, self.device = step, plan, torch.device(device)
        progress = progress or Silent()
        self.architecture = device_architecture(self.device)
        check_list(step)
        fused = fuse_one_row(step)
        self.weights = PackedWeights(fused, self.device)
        launches, memory_plan = self._rehearse(fused, draft_rows, progress)
        self.memory_plan = place_table(memory_plan)
        if self.memory_plan.on_host:
            self.weights.keep_table_on_host()
        check_memory(self.memory_plan, progress, advice)
        finders = highest_specs(self._n_vocabulary)
        specs = [*(launch.kernel for launch in launches), *self._row_specs, *finders.values()]
        specs += row_sampler_specs(self._n_vocabulary) if self._most_drawn > 1 else []
        with current(self.device):
            kernels = load_kernels(specs, self.architecture, partial(progress.advance, COMPILING))
        self.weights.allocate()
        self._stream = torch.cuda.Stream(self.device)
        self._banned_ids = banned_ids
        self._memory = allocate(step, plan, self.device, banned_ids)
        # Pinned, so that the copy to the device does not wait.
        self._host_state = torch.zeros(3, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._shown_tables: dict[str, list[int]] = {}
        planner = LaunchPlanner(fused, self.weights, self._memory)
        self.launches = planner.plan_all()
        self._written = planner.written
        batches, drafts = (self._plan_graphs(fused, of_one) for of_one in (False, True))
        self.weights.pack(progress)
        torch.cuda.empty_cache()  # what packing took is of no size and stream that a prompt could use again
        self._highest = DeviceHighest(self._n_vocabulary, {key: kernels[spec] for key, spec in finders.items()})
        self._kernels = kernels
        self._graph = self._capture(self.launches)
        self._batches, self._drafts = self._capture_all(batches), self._capture_all(drafts)
        self._prompts = PromptRunner(self._plan_rows(fused, self._memory), kernels, self._stream)
        if plan.n_sequences > 1:
            with torch.cuda.stream(self._stream), torch.inference_mode():
                self._prompts.record_all(range(max(self._batches, default=0) + 1, plan.n_sequences + 1))

    @property
    def most_draft_rows(self) -> int:
        """Rows of a sequence, all wanted, that get the bits which each gets alone."""
        return max(self.draft_sizes, default=1)

    @property
    def _most_drawn(self) -> int:
        """Rows whose tokens the device may be asked for at once."""
        return max(self.plan.n_sequences, self.most_draft_rows)

    def _plan_graphs(self, fused: Sequence[Fused], of_one: bool) -> list[tuple[LaunchPlanner, list[Launch]]]:
        """Of several sequences' rows, for each number that there is a graph for; or of one sequence's."""
        sizes = self.draft_sizes if of_one else self.batch_sizes
        planners = [LaunchPlanner(fused, self.weights, for_tokens(self._memory, size), of_one) for size in sizes]
        return [(planner, planner.plan_all()) for planner in planners]

    def _capture_all(self, planned: Sequence[tuple[LaunchPlanner, list[Launch]]]) -> dict[int, BatchGraph]:
        return {
            one.n_tokens: BatchGraph(one.memory, launches, one.written, self._capture(launches).replay)
            for one, launches in planned
        }

    # --- memory

    @property
    def pools(self) -> dict[str, Tensor]:
        """The pages of each cache kind, [layers, pages, ...], see ops/pages.py."""
        return self._memory.pools

    @property
    def _n_vocabulary(self) -> int:
        v = self.step.logits.shape[-1]
        assert isinstance(v, int)
        return v

    @property
    def history(self) -> Tensor:
        """The token that followed each position, int32."""
        return self._memory.history

    def moved_bytes(self) -> int:
        """Bytes of packed weights that one token streams."""
        return self.weights.moved_bytes()

    def cache_bytes(self) -> int:
        """Bytes of the page pools."""
        return sum(self.plan.n_bytes(kind, self.step.n_cache_layers[kind.name]) for kind in self.step.kinds)

    def _rehearse(self, fused: Sequence[Fused], draft_rows: int, progress: Progress) -> tuple[list[Launch], MemoryPlan]:
        """The launches and all bytes, from planning without memory; which numbers of tokens there are graphs for."""
        sizes: dict[bool, tuple[int, ...]] = {False: (), True: ()}
        with Rehearsal() as rehearsal:
            memory = allocate(self.step, self.plan, self.device, frozenset())
            launches = LaunchPlanner(fused, self.weights, memory).plan_all()
            n_bytes = rehearsal.n_bytes
            for of_one, wanted in ((False, sizes_for(self.plan.n_sequences)), (True, draft_sizes_for(draft_rows))):
                for size in wanted:
                    try:
                        launches += LaunchPlanner(fused, self.weights, for_tokens(memory, size), of_one).plan_all()
                    except UnsupportedError as error:
                        whose = "tokens of a draft" if of_one else "sequences"
                        most = max(sizes[of_one], default=1)
                        progress.note(f"no more than {most} {whose} a pass over the weights: {error}")
                        break
                    sizes[of_one] += (size,)
                    n_bytes = rehearsal.n_bytes
            before = rehearsal.n_bytes
            rows = self._plan_rows(fused, memory)
            n_bytes += rehearsal.n_bytes - before
        self.batch_sizes, self.draft_sizes = sizes[False], sizes[True]
        self._row_specs = rows.specs()
        beside_cache = n_bytes - self.cache_bytes()
        # A request's sampler stays while the next prompt runs.
        running = rows.running_bytes() + sampler_bytes(self._n_vocabulary, self.plan.capacity)
        # Logits of sequences that decode together wait for a prompt beside them, and are stacked then.
        running += 2 * max(self.batch_sizes, default=0) * self._n_vocabulary * 4
        if self._most_drawn > 1:
            running += row_sampler_bytes(self._n_vocabulary, self._most_drawn)
        if self.plan.n_sequences > 1:
            running += rows.decoding_bytes()
        scratch = beside_cache + max(self.weights.packing_bytes(), running)
        weights, table, kv = self.weights.n_bytes(), self.weights.table_bytes(), _kv(self.step)
        n_positions = self.plan.most_positions
        return launches, MemoryPlan(
            self.device, weights, self.cache_bytes(), scratch, n_positions, kv, table, budget=self.plan.budget
        )

    def _plan_rows(self, fused: Sequence[Fused], memory: DeviceMemory) -> RowPlanner:
        most_rows = max(min(self.plan.chunk, self.plan.n_sequences * self.plan.capacity), self.plan.n_sequences)
        return RowPlanner(fused, self.weights, self.plan, memory.pools, most_rows, self.device)

    # --- running

    def launch_all(self, launches: Sequence[Launch] | None = None) -> None:
        """Every kernel of a list, that of one token where none is given, on the current stream, one by one."""
        stream_handle = torch.cuda.current_stream(self.device).cuda_stream
        for launch in self.launches if launches is None else launches:
            self._kernels[launch.kernel].launch(stream_handle, launch.grid, launch.arguments)

    def _capture(self, launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), torch.cuda.graph(graph, stream=self._stream):
            self.launch_all(launches)
        return graph

    def _set_state(self, token: int, position: int, dropped: int = 0) -> None:
        self._stream.synchronize()
        was_dropped = int(self._host_state[2])
        self._host_state[0], self._host_state[1], self._host_state[2] = token, position, dropped
        self._memory.state[:2].copy_(self._host_state[:2], non_blocking=True)
        if dropped != was_dropped:
            self._memory.state[3:].copy_(self._host_state[2:], non_blocking=True)

    def _prepare(self, batch: Batch) -> None:
        """Pages that must be copied before they are written, and the tables of one sequence where they changed."""
        self._copy_pages(batch.copies)
        self._show({name: rows[0] for name, rows in batch.tables.items()})

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self.pools[copy.kind][:, copy.target] = self.pools[copy.kind][:, copy.source]

    def _show(self, tables: dict[str, list[int]]) -> None:
        for name, table in tables.items():
            if self._shown_tables.get(name) != table:
                pinned = torch.tensor(table, dtype=torch.int32, pin_memory=self.device.type == "cuda")
                self._memory.tables[name].copy_(pinned, non_blocking=True)
                self._shown_tables[name] = table

    @torch.inference_mode()
    def run(self, batch: Batch, is_eager: bool = False) -> Tensor:
        """Logits float32 [R, V] of the wanted rows.

        Sequences with a row each go together by a graph, as many as it has rows; the rows of all others, prompts that
        is, go together as well. The host does not wait: what it does with the logits on the current stream does.
        """
        current_stream = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current_stream)  # memory that is free again may still be read there
        with torch.cuda.stream(self._stream):
            self._prepare(batch)
            is_one = len(set(batch.sequence)) <= 1
            logits = self._run_alone(batch, is_eager) if is_one else self._run_sequences(batch, is_eager)
        current_stream.wait_stream(self._stream)
        return logits

    @torch.inference_mode()
    def sum_hidden(self, batch: Batch) -> Tensor:
        """Float64 [B, D]: of each sequence the sum over its rows of what the head would get, in bf16.

        Always by the road of many rows: decoding keeps what its head gets in blocks, and nowhere else.
        """
        with torch.cuda.stream(self._stream):
            self._prepare(batch)
            sums = self._prompts.sum_hidden(batch)
        self._stream.synchronize()
        return sums

    def _run_sequences(self, batch: Batch, is_eager: bool) -> Tensor:
        """The same of several sequences."""
        found: dict[int, Tensor] = {}
        rows_of: dict[int, list[int]] = {}
        for row, sequence in enumerate(batch.sequence):
            rows_of.setdefault(sequence, []).append(row)
        single = [rows[0] for rows in rows_of.values() if len(rows) == 1]
        # One by itself is cheaper alone; more than a graph holds are cheaper in one pass over the weights.
        together = single if 1 < len(single) <= max(self._batches, default=0) else []
        if together:
            found |= self._run_together(batch, together, is_eager)
        others = [rows for rows in rows_of.values() if rows[0] not in together]
        wanted = set(batch.wanted)
        drafted = [rows for rows in others if 1 < len(rows) <= self.most_draft_rows and wanted.issuperset(rows)]
        alone = others if is_eager else [*([single] if len(single) == 1 else []), *drafted]
        for rows in alone:
            part = part_of(batch, rows)
            self._show({name: tables[0] for name, tables in part.tables.items()})
            found |= dict(zip((rows[row] for row in part.wanted), self._run_alone(part, is_eager), strict=True))
        rows = [row for of_one in others if of_one not in alone for row in of_one]
        if rows:
            part = part_of(batch, rows)
            found |= dict(zip((rows[row] for row in part.wanted), self._prompts.run(part), strict=True))
        return self._stacked([found[row] for row in batch.wanted])

    def _stacked(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(rows)) if rows else torch.empty(0, self._n_vocabulary, device=self.device)

    def _run_together(self, batch: Batch, rows: Sequence[int], is_eager: bool) -> dict[int, Tensor]:
        """Logits of rows of as many sequences, by row."""
        graph = self._place(batch, rows)
        self.launch_all(graph.launches) if is_eager else graph.replay()
        return dict(zip(rows, graph.memory.logits[: len(rows)].clone(), strict=True))

    def _place(
        self, batch: Batch, rows: Sequence[int], tokens: Tensor | None = None, of_one: bool = False
    ) -> BatchGraph:
        """The graph that has room for these rows, with them in it. tokens: see ``BatchGraph.place``."""
        graphs = self._drafts if of_one else self._batches
        graph = next(graph for size, graph in sorted(graphs.items()) if size >= len(rows))
        decoding = [
            DecodingRow(
                batch.tokens[row],
                batch.positions[row],
                {name: tables[batch.sequence[row]] for name, tables in batch.tables.items()},
                batch.positions[row] - batch.slots[row],
            )
            for row in rows
        ]
        graph.place(decoding, tokens)
        return graph

    def _run_alone(self, batch: Batch, is_eager: bool) -> Tensor:
        """Logits of the wanted rows of one sequence, whose tables are shown."""
        n = len(batch.tokens)
        if 1 < n <= self.most_draft_rows and len(batch.wanted) == n:
            graph = self._place(batch, range(n), of_one=True)
            self.launch_all(graph.launches) if is_eager else graph.replay()
            return graph.memory.logits[:n].clone()
        if n > MOST_ROWS_ONE_BY_ONE and not is_eager:
            return self._prompts.run(batch)
        found: dict[int, Tensor] = {}
        if batch.evicting:
            raise UnsupportedError("rows one by one choose nothing: a prompt that is cut goes by the road of many rows")
        for row, (token, position, slot) in enumerate(zip(batch.tokens, batch.positions, batch.slots, strict=True)):
            self._set_state(token, position, position - slot)
            self.launch_all() if is_eager else self._graph.replay()
            if row in batch.wanted:
                found[row] = self._memory.logits.clone()
        return self._stacked([found[row] for row in batch.wanted])

    @torch.inference_mode()
    def decode_greedy(self, batch: Batch, n_tokens: int) -> Tensor:
        """n_tokens best tokens in a row after the batch's one row, int32 on the device.

        Each token goes from the device to the device; the host only starts replays. The batch's tables must hold pages
        for all of them.
        """
        self._check_room(batch, n_tokens)
        with torch.cuda.stream(self._stream):
            self._prepare(batch)
            self._set_state(batch.tokens[-1], batch.positions[-1], batch.positions[-1] - batch.slots[-1])
            for _ in range(n_tokens):
                self._graph.replay()
        start = batch.positions[-1]
        self._stream.synchronize()
        return self.history[start : start + n_tokens]

    def _check_room(self, batch: Batch, n_tokens: int) -> None:
        end = max(batch.positions) + n_tokens
        if end > self.plan.capacity:
            raise CapacityError(f"{n_tokens} tokens would reach {end} positions, capacity is {self.plan.capacity}")

    @torch.inference_mode()
    def decode_greedy_together(self, batch: Batch, n_tokens: int) -> Tensor:
        """The same for as many sequences as one graph holds, a row each: int32 [sequences, n_tokens]."""
        n, most = len(batch.tokens), max(self._batches, default=0)
        if n > most or len(set(batch.sequence)) != n:
            raise UnsupportedError(f"{n} rows together: expected one of each of at most {most} sequences")
        self._check_room(batch, n_tokens)
        with torch.cuda.stream(self._stream):
            self._prepare(batch)
            graph = self._place(batch, range(n))
            for _ in range(n_tokens):
                graph.replay()
        self._stream.synchronize()
        history = graph.memory.history
        return torch.stack([history[row, start : start + n_tokens] for row, start in enumerate(batch.positions)])

    def make_loop(self) -> DecodeLoop:
        """Decoding with the sampling on the device. Whoever asked keeps it: here it would keep the executor alive."""
        return DecodeLoop(
            Trunk(
                memory=self._memory,
                stream=self._stream,
                banned_ids=self._banned_ids,
                show=self._prepare,
                place=self._set_state,
                replay=self._graph.replay,
                highest=self._highest,
            )
        )

    def make_batch_loop(self) -> BatchLoop | None:
        """The same of several sequences."""
        if self._most_drawn == 1:
            return None
        kernels = {each: self._kernels[each] for each in row_sampler_specs(self._n_vocabulary)}
        sampler = RowSampler(self._memory.banned, self._most_drawn, kernels)
        return BatchLoop(self._start_together, self._copy_pages, sampler, self._banned_ids, self._stream, self.device)

    def _start_together(self, batch: Batch, tokens: Tensor | None) -> RowLogits:
        """Logits of a row of each sequence, for which nobody waits. tokens: int64 on the device, for those of batch."""
        self._copy_pages(batch.copies)
        n = len(batch.tokens)
        if n > max(self._batches, default=0):
            return self._prompts.decode(batch, tokens)
        graph = self._place(batch, range(n), tokens)
        graph.replay()
        return as_rows(graph.memory.logits[:n])

    def host_us(self, n: int = 20) -> float:
        """Microseconds the host takes to start one token: what must stay below the device's time for one.

        Writes over the first positions of whatever the tables show.
        """
        n = min(n, self.plan.capacity)
        with torch.cuda.stream(self._stream):
            self._set_state(0, 0)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        with torch.cuda.stream(self._stream):
            for _ in range(n):
                self._graph.replay()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        return elapsed / n * 1e6

    def repeat_step(self) -> None:
        """The values of the last step pass for those of this one: launches by themselves, in any order, wait for none.

        For timing products alone. Attention is not to be launched so, see ``tools/bench_kernels.py``.
        """
        self._memory.state[2] -= 1

    def poison(self) -> None:
        """NaN in the cache, of codes in their scales, and in every float that a step writes: a test's way to see what
        is read before it is written.

        With the parity of the last step, so that none passes for written in the next, see ops/handover.cuh.
        """
        nan = 0x7FC00000 | (int(self._memory.state[2]) - 1) % 2
        for pool in self.pools.values():
            pool.view(torch.uint8).fill_(0xFF)
        for buffer in (*self._written, self._memory.logits):
            buffer.view(torch.int32).fill_(nan)
        for batch in (*self._batches.values(), *self._drafts.values()):
            batch.poison()
        # A fill that came late would take back a parity that a running step has given.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))


def _kv(step: Step) -> str:
    """What the cache keeps: the same in all layers, which ``check_list`` sees to."""
    return step.storage
