"""``bench kernels``: the products of a token one by one, each over weights that no L2 holds.

A kernel is timed as a token runs it: small models of the real shapes are opened by the device executor, and what is
launched are the executor's own launches, arguments included, of one product in all layers (or copies) by turns, many
times in one CUDA graph. Attention is not among them: layers share what its runs are merged from, and only the order of
a token keeps them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import ClassVar

import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.kernels import current, load_kernels
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.packed import matrix, padded_rows
from bytefloor.engine.planner import Launch
from bytefloor.engine.stream_limit import timed_us
from bytefloor.engine.synthetic import SHAPES, Shape, checkpoint_of
from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.formats import get, stream
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.fuse import FusedProduct, fuse_one_row
from bytefloor.model.step import Step
from bytefloor.tools.bench_rows import Measured, free_memory, measure_limit, origin, spread
from bytefloor.tools.instructions import instructions_a_byte

FORMATS = (
    "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS",
    "affine-2b-g64", "affine-3b-g64", "affine-4b-g32", "affine-4b-g64", "affine-4b-g128", "affine-5b-g64",
    "affine-6b-g64", "affine-8b-g64", "FP4-E2M1-g128", "FP8-E4M3-row", "NVFP4-modelopt",
)  # fmt: skip
MODELS = ("gemma4-12b", "llama31-8b", "qwen3-8b")
SIZES_MB = (30, 75, 500)
SIZE_K = 4096
"""Columns of the matrices that are named by their size."""
ROTATED_BYTES = 1_200_000_000
"""What a kernel reads before it meets the same bytes again: a twentieth of it can still be in an L2 of 60 MB."""
MOST_COPIES = 64
"""Small matrices stay in L2 then, as they do when a model runs."""
LEAST_LAUNCHES = 256
"""Of a graph, so that starting it does not count."""
WARM_UP = 3
CAPACITY = CHUNK = 64
ROLES = {"q": "qkv", "o": "o", "gate": "gate_up", "down": "down", "embedding": "head", "head": "head"}
"""The first weight of a product, and what the product is called."""


@dataclass(frozen=True)
class KernelOptions:
    """What to time; formats and shapes empty for all. rows: of activations, see ``bench_row_products``."""

    formats: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    repeats: int = 7
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class KernelRow(Measured):
    """One kernel at one shape. Times are medians of graphs of many launches.

    n, k: rows (of all matrices of the launch) and columns. file_bytes: as a file stores what is read; moved_bytes: as
    the device does. gb_s: file_bytes / us. n_copies: matrices that launches take by turns. instructions_a_byte: those
    of a warp's inner loop for each byte of moved weights.
    """

    COLUMNS: ClassVar = (
        "shape", "n", "k", "format", "file_bytes", "us", "us_spread", "gb_s", "share", "instructions_a_byte",
    )  # fmt: skip
    verb: str
    shape: str
    n: int
    k: int
    format: str
    file_bytes: int
    moved_bytes: int
    us: float
    us_spread: float | None
    gb_s: float
    share: float
    n_copies: int
    instructions_a_byte: float
    stream_gb_s: float
    card: str
    clock_mhz: int | None
    commit: str | None
    date: str


@dataclass(frozen=True)
class Case:
    """A small model, some of whose launches are timed.

    layers: those of the layers, and there are as many layers as rotation needs; otherwise the head's, of several
    models of one layer. size_mb: 10^6 bytes of the head, where the format decides its rows.
    """

    name: str
    shape: Shape
    layers: bool
    size_mb: int | None = None

    def shape_for(self, kind: str) -> Shape:
        """The model in a format."""
        if self.size_mb is None:
            return self.shape
        row_bytes = SIZE_K * get(kind).bits_per_weight / 8
        return replace(self.shape, vocabulary=round(self.size_mb * 1e6 / row_bytes / stream.ROWS) * stream.ROWS)


def make_cases() -> list[Case]:
    """Every model's layers and head, and the plain sizes."""
    cases = []
    for name in MODELS:
        shape = SHAPES[name]
        # Sliding and global layers by turns: both kinds get as many copies.
        period = 2 if shape.global_every else 1
        small = replace(shape, vocabulary=stream.ROWS * 16, is_tied=True, n_layers=period)
        cases.append(Case(name, replace(small, global_every=period if period > 1 else 0), layers=True))
        head = replace(_headed(shape.architecture, shape.width, shape.vocabulary), keys=shape.keys)
        cases.append(Case(f"{name}.head", head, layers=False))
    sizes = _headed("llama", SIZE_K, 0)
    return cases + [Case(f"{size}MB", sizes, layers=False, size_mb=size) for size in SIZES_MB]


def _headed(architecture: str, width: int, n_rows: int) -> Shape:
    """A model that is little more than its head."""
    return Shape(architecture, width, 256, 1, 4, 4, 64, n_rows, 131072, True, global_head_size=64)


@dataclass(frozen=True)
class Timed:
    """A launch's shape and bytes: what of a row is known without a device."""

    shape: str
    n: int
    k: int
    format: str
    file_bytes: int
    moved_bytes: int


def describe(case: Case, step: Step) -> list[tuple[str, Timed]]:
    """(part of the list, what it is) of every product in its order."""
    products = [call for call in fuse_one_row(step) if isinstance(call, FusedProduct)]
    return [(call.part, describe_product(case, call)) for call in products]


def describe_product(case: Case, fused: FusedProduct) -> Timed:
    """One of them."""
    weights = [matrix(call) for call in fused.products]
    role, k = ROLES[weights[0].name.rpartition(".")[2]], weights[0].shape[1]
    n_moved = sum(
        form_of(w.stored.format_name, padded_rows(w.shape[0]), k).n_bytes(padded_rows(w.shape[0]), k) for w in weights
    )
    name = case.name if role == "head" else _name(case, role, fused.part)
    n_rows, n_bytes = sum(w.shape[0] for w in weights), sum(w.n_bytes for w in weights)
    return Timed(name, n_rows, k, weights[0].stored.format_name, n_bytes, n_moved)


def form_of(kind: str, n: int, k: int) -> stream.StreamForm:
    """The stream form of a synthetic matrix: affine ones have bf16 scales."""
    return stream.choose(kind, n, k, torch.bfloat16 if kind.startswith("affine") else None)


def _name(case: Case, role: str, part: str) -> str:
    """``llama31-8b.qkv``, or ``gemma4-12b.qkv.global`` where layers differ."""
    if not case.shape.global_every or role in ("gate_up", "down"):
        return f"{case.name}.{role}"
    layer = int(part.split(".")[1])
    return f"{case.name}.{role}.{'global' if (layer + 1) % case.shape.global_every == 0 else 'sliding'}"


def bench_kernels(options: KernelOptions) -> Iterator[KernelRow]:
    """Rows as they are measured. RequestError for formats and shapes that do not exist, with those that do."""
    formats, is_wanted = choose_formats(options.formats), choose_shapes(options.shapes)
    device = choose_card()
    stream_gb_s = measure_limit(device).gb_s
    for case in make_cases():
        for kind in formats:
            yield from _Bench(case, kind, device, is_wanted, options.repeats, stream_gb_s).rows()


def choose_formats(asked: Sequence[str]) -> Sequence[str]:
    """Those asked for, or all."""
    for kind in asked:
        if kind not in FORMATS:
            raise RequestError(f"-f {kind}: expected {', '.join(FORMATS)}")
    return asked or FORMATS


def choose_card() -> torch.device:
    """The CUDA device. UnsupportedError where there is none: a CPU has no kernels to time."""
    if not torch.cuda.is_available():
        raise UnsupportedError("bench kernels needs a CUDA device; torch sees none here")
    return torch.device("cuda")


def choose_shapes(words: Sequence[str]) -> Callable[[str], bool]:
    """Whether a shape is asked for: by its name, or by words of it with dots between."""
    names = {timed.shape for case in make_cases() for timed in list_products(case, "BF16")}

    def has(name: str, word: str) -> bool:
        return f".{word}." in f".{name}."

    for word in words:
        if not any(has(name, word) for name in names):
            raise RequestError(f"-s {word}: no such shape; there are {', '.join(sorted(names))}")
    return lambda name: not words or any(has(name, word) for word in words)


def step_of(shape: Shape, kind: str, device: torch.device | str) -> Step:
    """The list of a model of that shape, all of whose matrices have one format."""
    model = load_model(checkpoint_of("bench", shape, kind, device))
    return build_step(model.config, model.weights, DEVICE_ROUNDING)


def list_products(case: Case, kind: str) -> list[Timed]:
    """The products of the case."""
    described = describe(case, step_of(case.shape_for(kind), kind, "cpu"))
    return list(dict.fromkeys(timed for part, timed in described if (part != "head") == case.layers))


class _Bench:
    """One case in one format."""

    def __init__(
        self,
        case: Case,
        kind: str,
        device: torch.device,
        is_wanted: Callable[[str], bool],
        repeats: int,
        stream_gb_s: float,
    ) -> None:
        self.case, self.kind, self.device, self.repeats, self.stream_gb_s = case, kind, device, repeats, stream_gb_s
        self.products = [t for t in list_products(case, kind) if is_wanted(t.shape)]

    def rows(self) -> Iterator[KernelRow]:
        """One for each product that is asked for."""
        if not self.products:
            return
        executors = self._open(count_copies(self.products))
        for executor in executors:
            _run_a_token(executor)
        pairs = [pair for executor in executors for pair in self._launches(executor)]
        for timed in self.products:
            launches = [launch for found, launch in pairs if found == timed]
            architecture = executors[0].architecture
            times_us = time_launches(launches, architecture, self.device, self.repeats)
            issued = instructions_a_byte(form_of(timed.format, stream.ROWS, timed.k), architecture)
            yield self._row(timed, times_us, len(launches), issued)

    def _open(self, n_copies: int) -> list[DeviceExecutor]:
        """One model of many layers, or many of one layer."""
        free_memory(self.device)
        shape, plan = self.case.shape_for(self.kind), CachePlan(CAPACITY, CHUNK)
        n_models = 1 if self.case.layers else n_copies
        if self.case.layers:
            shape = replace(shape, n_layers=(n_copies + 1) * shape.n_layers)
        return [
            DeviceExecutor(step_of(shape, self.kind, self.device), plan, device=self.device) for _ in range(n_models)
        ]

    def _launches(self, executor: DeviceExecutor) -> list[tuple[Timed, Launch]]:
        """The executor's own launches of products, each with what it is.

        Not those of the first layers: no sum of planes precedes them, so they have other kernels than all the others.
        """
        launches = [launch for launch in executor.launches if launch.kernel.name == "product"]
        n_first = self.case.shape.n_layers if self.case.layers else 0
        first = tuple(f"layers.{i}." for i in range(n_first))
        pairs = zip(describe(self.case, executor.step), launches, strict=True)
        return [(timed, launch) for (part, timed), launch in pairs if not part.startswith(first)]

    def _row(self, timed: Timed, times_us: Sequence[float], n_copies: int, issued: float) -> KernelRow:
        us = median(times_us)
        gb_s = timed.file_bytes / us / 1e3
        return KernelRow(
            verb="kernel",
            **vars(timed),
            us=round(us, 3),
            us_spread=spread(times_us),
            gb_s=round(gb_s, 1),
            share=round(gb_s / self.stream_gb_s, 4),
            n_copies=n_copies,
            instructions_a_byte=round(issued, 4),
            stream_gb_s=round(self.stream_gb_s, 1),
            **origin(self.device),
        )


def count_copies(products: Sequence[Timed]) -> int:
    """Matrices of each product that launches take by turns."""
    return min(MOST_COPIES, max(2, math.ceil(ROTATED_BYTES / min(timed.file_bytes for timed in products))))


def _run_a_token(executor: DeviceExecutor) -> None:
    """Buffers with values like a model's, which then stand ready for launches in any order."""
    for pool in executor.pools.values():
        pool.normal_()
    kinds = executor.step.kinds
    cache = SequenceCache(executor.plan, kinds, make_pools(executor.plan, kinds))
    batch = Batch()
    cache.append_rows(batch, [1], [0])
    executor.run(batch)
    executor.repeat_step()


def time_launches(launches: Sequence[Launch], architecture: str, device: torch.device, repeats: int) -> list[float]:
    """Microseconds a launch, of each of several replays of one graph of many."""
    return time_graph(prepare(launches, architecture, device), device, repeats)


def prepare(launches: Sequence[Launch], architecture: str, device: torch.device) -> list[Callable[[], None]]:
    """What puts each of them on the current stream."""
    with current(device):
        kernels = load_kernels([launch.kernel for launch in launches], architecture)

    def start(launch: Launch) -> None:
        handle = torch.cuda.current_stream(device).cuda_stream
        kernels[launch.kernel].launch(handle, launch.grid, launch.arguments)

    return [partial(start, launch) for launch in launches]


def time_graph(
    starts: Sequence[Callable[[], None]], device: torch.device, repeats: int, n_least: int = LEAST_LAUNCHES
) -> list[float]:
    """Microseconds of each start, which may be several kernels, of several replays of one graph of n_least or more."""
    n_rounds = math.ceil(n_least / len(starts))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
        for _ in range(n_rounds):
            for start in starts:
                start()
    for _ in range(WARM_UP):
        graph.replay()
    return [timed_us(device, graph.replay) / (n_rounds * len(starts)) for _ in range(repeats)]
