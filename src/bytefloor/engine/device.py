"""The device executor: one row of one sequence at a time, as a CUDA graph of the one-row list.

Weights live packed in stream forms and nowhere else. Lengths, positions and page tables are read from device memory, so
one capture serves every position; replaying it equals launching its kernels one by one.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.kernels import ARCHITECTURES, KernelSpec, load_kernels, spec
from bytefloor.engine.launches import Segment, plan_attention, plan_product
from bytefloor.engine.memory import check_memory
from bytefloor.errors import FileError, UnsupportedError
from bytefloor.formats import stream
from bytefloor.model.fuse import Fused, FusedAttention, FusedEmbed, FusedLogits, FusedProduct, fuse_one_row
from bytefloor.model.step import CacheKind, OpCall, Step
from bytefloor.model.weights import Weight

LOGITS_BLOCKS = 128
LOGITS_THREADS = 256
EMBED_THREADS = 128
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Launch:
    """One node of the graph."""

    part: str
    kernel: KernelSpec
    grid: tuple[int, int]
    arguments: tuple[Any, ...]


class DeviceExecutor:
    """Runs the one-row list of a step on a CUDA device.

    step: the plain list, with 16-bit activation codes and a bf16 cache.
    banned_ids: tokens that ``decode_greedy`` never takes.
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
    ) -> None:
        self.step, self.plan, self.device = step, plan, torch.device(device)
        self.fused = fuse_one_row(step)
        self.architecture = device_architecture(self.device)
        self._packed: dict[int, Tensor] = {}
        check_memory(self.weight_bytes(), self.cache_bytes(), self.device)
        self._pack_all(progress)
        self.pools = {kind.name: self._allocate(kind) for kind in step.kinds}
        self._state = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._host_state = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self.history = torch.zeros(plan.capacity + 1, dtype=torch.int32, device=self.device)
        self._tables = {
            kind.name: torch.zeros(plan.n_table(kind), dtype=torch.int32, device=self.device) for kind in step.kinds
        }
        self._shown_tables: dict[str, list[int]] = {}
        v = step.logits.shape[-1]
        assert isinstance(v, int)
        self._banned = torch.zeros(v, dtype=torch.uint8, device=self.device)
        if banned_ids:
            self._banned[torch.tensor(sorted(banned_ids), device=self.device)] = 1
        self._stream = torch.cuda.Stream(self.device)
        self.launches = _Planner(self).plan_all()
        kernels = load_kernels([launch.kernel for launch in self.launches], self.architecture)
        self._nodes = [(kernels[launch.kernel], launch) for launch in self.launches]
        self._graph = self._capture()

    # --- memory

    def _groups(self) -> list[list[Weight]]:
        """Matrices in the order of the list, gate and up together: they become one interleaved matrix."""
        groups: list[list[Weight]] = []
        for fused in self.fused:
            if isinstance(fused, FusedProduct):
                weights = [_matrix(call) for call in fused.products]
                groups += [weights] if fused.glu is not None else [[weight] for weight in weights]
            elif isinstance(fused, FusedEmbed):
                groups.append([_matrix(fused.call, "table")])
        return list({id(group[0]): group for group in groups}.values())

    def form_of(self, weight: Weight) -> stream.StreamForm:
        """The stream form of a matrix."""
        n, k = weight.shape
        return stream.choose(weight.stored.format_name, padded_rows(n), k)

    def weight_bytes(self) -> int:
        """Bytes of all packed matrices."""
        weights = (weight for group in self._groups() for weight in group)
        return sum(self.form_of(w).n_bytes(padded_rows(w.shape[0]), w.shape[1]) for w in weights)

    def moved_bytes(self) -> int:
        """Bytes of packed weights that one token streams: those of every product, each once."""
        products = (fused for fused in self.fused if isinstance(fused, FusedProduct))
        weights = (_matrix(call) for fused in products for call in fused.products)
        return sum(self.form_of(w).n_bytes(padded_rows(w.shape[0]), w.shape[1]) for w in weights)

    def cache_bytes(self) -> int:
        """Bytes of the page pools."""
        return sum(self.plan.n_bytes(kind, self.step.n_cache_layers[kind.name]) for kind in self.step.kinds)

    def _allocate(self, kind: CacheKind) -> Tensor:
        shape = (self.step.n_cache_layers[kind.name], self.plan.n_pages(kind), 2, kind.n_kv_heads)
        return torch.empty(*shape, self.plan.page_size, kind.head_size, dtype=torch.bfloat16, device=self.device)

    def _pack_all(self, progress: Progress | None) -> None:
        groups = self._groups()
        total, done = sum(w.n_bytes for group in groups for w in group), 0
        for group in groups:
            forms = {self.form_of(weight).name for weight in group}
            if len(forms) > 1:
                raise UnsupportedError(
                    f"{group[0].name}: gate and up have different formats: {', '.join(sorted(forms))}"
                )
            stored = [{name: part.to(self.device) for name, part in w.stored.read().items()} for w in group]
            parts = stored[0] if len(stored) == 1 else {k: _alternate([s[k] for s in stored]) for k in stored[0]}
            _refuse_bad_scales(group[0], parts)
            padded = {name: _pad_rows(part) for name, part in parts.items()}
            self._packed[id(group[0])] = self.form_of(group[0]).pack(padded).contiguous().view(-1)
            done += sum(weight.n_bytes for weight in group)
            if progress is not None:
                progress(done, total)

    def packed(self, weight: Weight) -> Tensor:
        """The packed bytes of a matrix (of gate and up together, for gate)."""
        return self._packed[id(weight)]

    # --- running

    def launch_all(self) -> None:
        """Every kernel of the list on the executor's stream, one by one."""
        stream_handle = torch.cuda.current_stream(self.device).cuda_stream
        for kernel, launch in self._nodes:
            kernel.launch(stream_handle, launch.grid, launch.arguments)

    def _capture(self) -> torch.cuda.CUDAGraph:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), torch.cuda.graph(graph, stream=self._stream):
            self.launch_all()
        return graph

    def _set_state(self, token: int, position: int) -> None:
        self._stream.synchronize()
        self._host_state[0], self._host_state[1] = token, position
        self._state.copy_(self._host_state, non_blocking=True)

    def _show_tables(self, batch: Batch) -> None:
        for name, rows in batch.tables.items():
            if self._shown_tables.get(name) != rows[0]:
                self._tables[name].copy_(torch.tensor(rows[0], dtype=torch.int32))
                self._shown_tables[name] = rows[0]

    @torch.inference_mode()
    def run(self, batch: Batch, is_eager: bool = False) -> Tensor:
        """Logits float32 [R, V] of the wanted rows, one row after another. One sequence a batch."""
        if any(sequence != 0 for sequence in batch.sequence):
            raise UnsupportedError("the device executor takes one sequence at a time")
        with torch.cuda.stream(self._stream):
            for copy in batch.copies:
                self.pools[copy.kind][:, copy.target] = self.pools[copy.kind][:, copy.source]
            self._show_tables(batch)
            found = []
            for row, (token, position) in enumerate(zip(batch.tokens, batch.slots, strict=True)):
                self._set_state(token, position)
                self.launch_all() if is_eager else self._graph.replay()
                if row in batch.wanted:
                    found.append(self.logits.clone())
        self._stream.synchronize()
        return torch.stack(found) if found else torch.empty(0, self.logits.shape[0], device=self.device)

    @torch.inference_mode()
    def decode_greedy(self, batch: Batch, n_tokens: int) -> Tensor:
        """n_tokens best tokens in a row after the batch's one row, int32 on the device.

        Each token goes from the device to the device; the host only starts replays. The batch's tables must hold pages
        for all of them.
        """
        with torch.cuda.stream(self._stream):
            self._show_tables(batch)
            self._set_state(batch.tokens[-1], batch.slots[-1])
            for _ in range(n_tokens):
                self._graph.replay()
        start = batch.slots[-1]
        self._stream.synchronize()
        return self.history[start : start + n_tokens]

    def host_us(self, n: int = 20) -> float:
        """Microseconds the host takes to start one token: what must stay below the device's time for one."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        with torch.cuda.stream(self._stream):
            for _ in range(n):
                self._graph.replay()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        return elapsed / n * 1e6

    def poison(self, value: float = float("nan")) -> None:
        """Fill the cache and every buffer that a step writes: a test's way to see what is read before it is written."""
        for pool in self.pools.values():
            pool.fill_(value)
        for buffer in self.buffers:
            buffer.fill_(value)

    logits: Tensor
    buffers: list[Tensor]


def _matrix(call: OpCall, operand: str = "weight") -> Weight:
    weight = call.operands[operand]
    assert isinstance(weight, Weight)
    return weight


def _alternate(rows: Sequence[Tensor]) -> Tensor:
    """Rows of several matrices by turns: gate 0, up 0, gate 1, up 1, ..."""
    return torch.stack(list(rows), dim=1).flatten(0, 1)


def padded_rows(n: int) -> int:
    """Rows of a packed matrix: whole records."""
    return -(-n // stream.ROWS) * stream.ROWS


def _pad_rows(part: Tensor) -> Tensor:
    """Rows of zero bytes up to whole records; every format reads them as zeros."""
    missing = padded_rows(part.shape[0]) - part.shape[0]
    return part if missing == 0 else torch.cat((part, part.new_zeros(missing, *part.shape[1:])))


def _refuse_bad_scales(weight: Weight, parts: dict[str, Tensor]) -> None:
    """What decoding would refuse, packing must not let through: one pass over the decoded values finds it."""
    values = weight.stored.require_format().decode(parts)
    if not bool(torch.isfinite(values).all()):
        raise FileError(f"tensor {weight.stored.name} holds values that are not finite")


def device_architecture(device: torch.device) -> str:
    """The compiler's name of the device. UnsupportedError for one without bulk copies, and without the compiler."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        raise UnsupportedError("no CUDA compiler: cuda-core is not installed (pip install 'bytefloor[cuda]')")
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}a"
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}) has no decode kernels yet")
    return name


class _Planner:
    """Turns fused calls into launches and gives them buffers."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self.x = executor
        self.written: list[Tensor] = []
        self.n_multiprocessors = torch.cuda.get_device_properties(executor.device).multi_processor_count
        width = executor.step.calls[0].sizes["D"]
        assert isinstance(width, int)
        # A kernel reads one residual while its first block writes the next: two, by turns.
        self.residuals = [self._floats(width), self._floats(width)]
        self.result: Tensor | None = None
        self.planes = 1
        # Codes, scales and counters of the GLU that the next product takes, if that is what comes next.
        self.codes: tuple[Tensor, Tensor, Tensor] | None = None
        self.counters = torch.zeros(256, dtype=torch.int32, device=executor.device)
        self.parts = self._floats(1)
        self.part_sums = self._floats(256 * 256)
        self.vectors: dict[int, Tensor] = {}
        self.frequencies: dict[tuple[float, ...], Tensor] = {}

    def _floats(self, n: int) -> Tensor:
        self.written.append(torch.zeros(n, dtype=torch.float32, device=self.x.device))
        return self.written[-1]

    def plan_all(self) -> list[Launch]:
        self._reserve_parts()
        launches = [self._plan(fused) for fused in self.x.fused]
        self.x.buffers = self.written
        return launches

    def _reserve_parts(self) -> None:
        """Attention's scratch, as large as the largest layer needs; its size does not depend on planes."""
        plans = [
            plan_attention(fused, self._n_heads(fused), 1, 1.0, self.x.plan)
            for fused in self.x.fused
            if isinstance(fused, FusedAttention)
        ]
        self.parts = self._floats(max(plan.part_floats for plan in plans))

    @staticmethod
    def _n_heads(fused: FusedAttention) -> int:
        n_heads = fused.attention.sizes["H"]
        assert isinstance(n_heads, int)
        return n_heads

    def _plan(self, fused: Fused) -> Launch:
        if isinstance(fused, FusedEmbed):
            return self._embed(fused)
        if isinstance(fused, FusedProduct):
            return self._product(fused)
        if isinstance(fused, FusedAttention):
            return self._attention(fused)
        return self._logits(fused)

    def _vector(self, weight: Weight | None) -> Tensor | None:
        if weight is None:
            return None
        if id(weight) not in self.vectors:
            self.vectors[id(weight)] = weight.load().to(self.x.device).contiguous()
        return self.vectors[id(weight)]

    def _norm_weight(self, call: OpCall | None) -> Tensor | None:
        weight = None if call is None else call.operands.get("weight")
        return self._vector(weight) if isinstance(weight, Weight) else None

    def _embed(self, fused: FusedEmbed) -> Launch:
        table = _matrix(fused.call, "table")
        v, d = table.shape
        form = self.x.form_of(table)
        kernel = spec("embed", EMBED_THREADS, FORM=form.name, D=d, V=v, SCALE=float(fused.call.attributes["scale"]))
        grid = (-(-d // EMBED_THREADS), 1)
        return Launch("embedding", kernel, grid, (self.x.packed(table), self.x._state, self.residuals[0]))

    def _product(self, fused: FusedProduct) -> Launch:
        weights = [_matrix(call) for call in fused.products]
        k = weights[0].shape[1]
        if fused.glu is not None:
            segments, packed = (
                [Segment(self.x.form_of(weights[0]), 2 * weights[0].shape[0])],
                [self.x.packed(weights[0])],
            )
        else:
            segments = [Segment(self.x.form_of(weight), padded_rows(weight.shape[0])) for weight in weights]
            packed = [self.x.packed(weight) for weight in weights]
        eps = fused.norm.attributes["eps"] if fused.norm is not None else 0.0
        delta_planes = self.planes if fused.has_delta else 0
        takes_codes = self.codes is not None
        plan = plan_product(fused, segments, k, delta_planes, eps, self.n_multiprocessors, takes_codes)
        n_out = sum(segment.n for segment in segments) // (2 if fused.glu is not None else 1)
        out = self._floats(plan.planes * n_out)
        x_in = self.residuals[0] if fused.norm is not None else self.result
        arguments = (
            *packed,
            *[None] * (3 - len(packed)),
            x_in,
            self.result if fused.has_delta else None,
            self._norm_weight(fused.post_norm),
            self._norm_weight(fused.norm),
            self._vector(fused.scalar),
            self.residuals[1] if fused.has_delta else None,
            out,
            *self._codes_of(fused, n_out),
        )
        if fused.has_delta:
            self.residuals.reverse()
        self.result, self.planes = out, plan.planes
        return Launch(fused.part, plan.kernel, (plan.n_blocks, 1), arguments)

    def _codes_of(self, fused: FusedProduct, n_out: int) -> tuple[Tensor | None, ...]:
        """Where a GLU leaves its codes, or where a product finds those of the last one."""
        if fused.glu is None:
            found, self.codes = self.codes, None
            return found or (None, None, None)
        codes = torch.zeros(2 * n_out, dtype=torch.int8, device=self.x.device)
        counters = torch.zeros(n_out // 32, dtype=torch.int32, device=self.x.device)
        self.codes = (codes, self._floats(n_out // 32 * 4), counters)
        return self.codes

    def _attention(self, fused: FusedAttention) -> Launch:
        eps = fused.q_norm.attributes["eps"] if fused.q_norm is not None else 1e-6
        n_heads = self._n_heads(fused)
        plan = plan_attention(fused, n_heads, self.planes, eps, self.x.plan)
        kind = fused.cache.kind
        out = self._floats(n_heads * kind.head_size)
        table = self.x._tables[kind.name]
        arguments = (
            self.result,
            self._norm_weight(fused.q_norm),
            self._norm_weight(fused.k_norm),
            self._rope(fused),
            self.x.pools[kind.name][fused.cache.index],
            table,
            table.shape[0],
            self.x._state,
            self.parts,
            self.part_sums,
            self.counters,
            out,
        )
        self.result, self.planes = out, 1
        return Launch(fused.part, plan.kernel, (plan.max_runs, plan.n_head_groups), arguments)

    def _rope(self, fused: FusedAttention) -> Tensor | None:
        if fused.rope is None:
            return None
        table = fused.rope.attributes["inverse_frequencies"]
        if table not in self.frequencies:
            self.frequencies[table] = torch.tensor(table, dtype=torch.float64, device=self.x.device)
        return self.frequencies[table]

    def _logits(self, fused: FusedLogits) -> Launch:
        v = self.x._banned.shape[0]
        kernel = spec(
            "logits",
            LOGITS_THREADS,
            V=v,
            ROWS=padded_rows(v),
            PLANES=self.planes,
            CAP=float(fused.cap),
            BLOCKS=LOGITS_BLOCKS,
        )
        self.x.logits = self._floats(v)
        bests = self._floats(2 * LOGITS_BLOCKS)
        counter = self.counters[255:]
        arguments = (self.result, self.x._banned, self.x.logits, bests, counter, self.x._state, self.x.history)
        return Launch("head", kernel, (LOGITS_BLOCKS, 1), arguments)
