"""``bench kernels --rows``: products of many rows of activations two ways, each over weights that no L2 holds.

``fused``: the kernel ``product_rows``, launched as a chunk of a prompt launches it. ``unpack+cublas``, what it has to
beat: ``ops/unpack_bf16.cu`` writes the matrices of the launch to memory as bf16, and torch.mm multiplies with them. It
leaves out GLU and rounds its sums to bf16, which is in its favour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import ClassVar

import torch
from torch import Tensor

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.device import device_architecture
from bytefloor.engine.kernels import spec
from bytefloor.engine.launches import Card
from bytefloor.engine.packed import PackedWeights, matrix
from bytefloor.engine.planner import Launch
from bytefloor.engine.progress import Silent
from bytefloor.engine.row_planner import BLOCKS_A_MULTIPROCESSOR, UNPACK_THREADS
from bytefloor.engine.row_products import RowProduct, pad_rows
from bytefloor.engine.tensor_peak import tflops
from bytefloor.errors import UnsupportedError
from bytefloor.formats.lanes import STEP, StreamForm
from bytefloor.model.fuse import FusedProduct, fuse_one_row
from bytefloor.model.step import Step
from bytefloor.ops.row_tiles import to_row_tiles
from bytefloor.tools.bench_kernels import (
    LEAST_LAUNCHES,
    Case,
    KernelOptions,
    Timed,
    choose_card,
    choose_formats,
    choose_shapes,
    count_copies,
    describe_product,
    list_products,
    make_cases,
    prepare,
    step_of,
    time_graph,
)
from bytefloor.tools.bench_rows import Measured, free_memory, measure_limit, measure_peak, origin, say, spread

LEAST_OPERATIONS = 10**13
"""Of a graph, so that starting it does not count: some 20 ms."""
FUSED, CUBLAS = "fused", "unpack+cublas"


@dataclass(frozen=True)
class RowsRow(Measured):
    """A product of many rows. Times are medians of graphs of several products.

    n, k: rows (of all matrices of the launch) and columns of W. rows: of activations, as asked for. route: FUSED or
    CUBLAS.
    file_bytes, moved_bytes: of the weights, as a file and as the device stores them. tflops: 10^12 multiplications and
    additions a second, of rows that were asked for; share_of_peak: of peak_tflops, which cuBLAS reached with bf16
    matrices in this run. gb_s: file_bytes / us. n_copies: of the matrices, which products take by turns.
    """

    COLUMNS: ClassVar = (
        "shape", "n", "k", "format", "rows", "route", "us", "us_spread", "tflops", "share_of_peak", "gb_s",
    )  # fmt: skip
    verb: str
    shape: str
    n: int
    k: int
    format: str
    rows: int
    route: str
    file_bytes: int
    moved_bytes: int
    us: float
    us_spread: float | None
    tflops: float
    peak_tflops: float | None
    share_of_peak: float | None
    gb_s: float
    n_copies: int
    stream_gb_s: float
    card: str
    clock_mhz: int | None
    commit: str | None
    date: str


@dataclass(frozen=True)
class Matrices:
    """One copy of what a launch multiplies with: matrices side by side, each packed in its form, with ``sizes`` rows.

    activation: of GLU, where gate and up lie by turns in one matrix.
    """

    packed: tuple[Tensor, ...]
    forms: tuple[StreamForm, ...]
    sizes: tuple[int, ...]
    k: int
    activation: str | None


def matrices_of(fused: FusedProduct, weights: PackedWeights) -> Matrices:
    """Of a product of the list, whose weights are packed."""
    found, activation = [matrix(call) for call in fused.products], None
    if fused.is_pair:
        assert fused.glu is not None
        found, activation = found[:1], fused.glu.attributes["activation"]
    return Matrices(
        packed=tuple(weights.packed(weight) for weight in found),
        forms=tuple(weights.form_of(weight) for weight in found),
        sizes=tuple(weight.shape[0] * len(fused.products) // len(found) for weight in found),
        k=found[0].shape[1],
        activation=activation,
    )


def bench_row_products(options: KernelOptions) -> Iterator[RowsRow]:
    """Rows as they are measured. RequestError for formats and shapes that do not exist, with those that do;
    UnsupportedError for a card that has no kernels.
    """
    formats, is_wanted = choose_formats(options.formats), choose_shapes(options.shapes)
    device = choose_card()
    device_architecture(device)  # refuses a card without kernels before anything is measured
    stream_gb_s, peak_tflops = measure_limit(device).gb_s, measure_peak(device)
    for case in make_cases():
        for kind in formats:
            yield from _Bench(case, kind, device, is_wanted, options, stream_gb_s, peak_tflops).rows()


class _Bench:
    """One case in one format."""

    def __init__(
        self,
        case: Case,
        kind: str,
        device: torch.device,
        is_wanted: Callable[[str], bool],
        options: KernelOptions,
        stream_gb_s: float,
        peak_tflops: float | None,
    ) -> None:
        self.case, self.kind, self.device, self.options = case, kind, device, options
        self.stream_gb_s, self.peak_tflops = stream_gb_s, peak_tflops
        self.products = [timed for timed in list_products(case, kind) if is_wanted(timed.shape)]

    def rows(self) -> Iterator[RowsRow]:
        """Two for each product and number of rows that is asked for."""
        if not self.products:
            return
        pairs = self._open(count_copies(self.products))
        for timed in self.products:
            copies = [found for what, found in pairs if what == timed]
            for n_rows in self.options.rows:
                for route, make in ((FUSED, fused_starts), (CUBLAS, cublas_starts)):
                    try:
                        starts = make(copies, n_rows, self.device)
                    except UnsupportedError as error:
                        say([f"{timed.shape}, {timed.format}, {n_rows} rows: {error}"])
                        continue
                    yield self._row(timed, n_rows, route, self._time(timed, n_rows, starts), len(copies))

    def _open(self, n_copies: int) -> list[tuple[Timed, Matrices]]:
        """Packed weights of one model of many layers, or of many of one layer."""
        free_memory(self.device)
        shape, n_models = self.case.shape_for(self.kind), n_copies
        if self.case.layers:
            shape, n_models = replace(shape, n_layers=n_copies * shape.n_layers), 1
        steps = (step_of(shape, self.kind, self.device) for _ in range(n_models))
        return [pair for step in steps for pair in open_products(self.case, step, self.device)]

    def _time(self, timed: Timed, n_rows: int, starts: Sequence[Callable[[], None]]) -> list[float]:
        n_least = min(LEAST_LAUNCHES, math.ceil(LEAST_OPERATIONS / _n_operations(timed, n_rows)))
        return time_graph(starts, self.device, self.options.repeats, n_least)

    def _row(self, timed: Timed, n_rows: int, route: str, times_us: Sequence[float], n_copies: int) -> RowsRow:
        us = median(times_us)
        speed, peak = tflops(_n_operations(timed, n_rows), us), self.peak_tflops
        return RowsRow(
            verb="kernel_rows",
            **vars(timed),
            rows=n_rows,
            route=route,
            us=round(us, 3),
            us_spread=spread(times_us),
            tflops=round(speed, 2),
            peak_tflops=None if peak is None else round(peak, 1),
            share_of_peak=None if peak is None else round(speed / peak, 4),
            gb_s=round(timed.file_bytes / us / 1e3, 1),
            n_copies=n_copies,
            stream_gb_s=round(self.stream_gb_s, 1),
            **origin(self.device),
        )


def _n_operations(timed: Timed, n_rows: int) -> int:
    return 2 * timed.n * timed.k * n_rows


def open_products(case: Case, step: Step, device: torch.device) -> list[tuple[Timed, Matrices]]:
    """The products of a case, each with what it is, packed on the device."""
    fused = fuse_one_row(step)
    weights = PackedWeights(fused, device)
    weights.allocate()
    weights.pack(Silent())
    return [
        (describe_product(case, call), matrices_of(call, weights))
        for call in fused
        if isinstance(call, FusedProduct) and (call.part != "head") == case.layers
    ]


def fused_starts(copies: Sequence[Matrices], n_rows: int, device: torch.device) -> list[Callable[[], None]]:
    """What starts the kernel over each copy. UnsupportedError where there is none."""
    return prepare(fused_launches(copies, n_rows, device), device_architecture(device), device)


def fused_launches(copies: Sequence[Matrices], n_rows: int, device: torch.device) -> list[Launch]:
    """As ``RowPlanner`` plans them for a chunk of so many rows, over random activations."""
    own, card, pitch = copies[0], _card(device), pad_rows(n_rows)
    sizes, k, n, missing = own.sizes, own.k, sum(own.sizes), 3 - len(own.sizes)
    product = RowProduct(tuple(own.forms), tuple(sizes), k, own.activation)
    kernel, splits = product.kernel(pitch, card), product.splits(pitch, card)
    tiles = to_row_tiles(_random_rows(pitch, k, device), pitch)
    if own.activation is None:
        out, stride = torch.empty(splits * pitch * n, device=device), n
    else:
        stride = pitch
        out = torch.empty(ceil_div(n // 2, STEP) * STEP * pitch, dtype=torch.bfloat16, device=device)
    grid = product.n_blocks(splits, pitch, card), 1
    rest = (out, pitch, pitch, stride, ceil_div(k, STEP), splits, False)
    return [
        Launch(FUSED, kernel, grid, (tiles, *copy.packed, *[None] * missing, *sizes, *[0] * missing, *rest))
        for copy in copies
    ]


def cublas_starts(copies: Sequence[Matrices], n_rows: int, device: torch.device) -> list[Callable[[], None]]:
    """What unpacks each copy into one scratch matrix and multiplies that."""
    k, n = copies[0].k, sum(copies[0].sizes)
    scratch = torch.empty(n, k, dtype=torch.bfloat16, device=device)
    x, y = _random_rows(n_rows, k, device), torch.empty(n_rows, n, dtype=torch.bfloat16, device=device)

    def run(unpack: Sequence[Callable[[], None]]) -> None:
        for start in unpack:
            start()
        torch.mm(x, scratch.T, out=y)

    launches = [unpack_launches(copy, scratch) for copy in copies]
    prepared = iter(prepare([each for of_one in launches for each in of_one], device_architecture(device), device))
    starts: list[Callable[[], None]] = [partial(run, [next(prepared) for _ in of_one]) for of_one in launches]
    starts[0]()  # cuBLAS makes ready what it cannot while a graph is captured
    return starts


def unpack_launches(own: Matrices, scratch: Tensor) -> list[Launch]:
    """Each matrix of a copy to its rows of the scratch matrix, bf16 [N, K]; gate and up alternate as packed."""
    grid = (_card(scratch.device).n_multiprocessors * BLOCKS_A_MULTIPROCESSOR, 1)
    launches, first = [], 0
    for packed, form, n in zip(own.packed, own.forms, own.sizes, strict=True):
        kernel = spec("unpack_bf16", UNPACK_THREADS, FORM=form.name, K=own.k)
        launches.append(Launch(CUBLAS, kernel, grid, (packed, n, scratch[first : first + n])))
        first += n
    return launches


def _random_rows(n: int, k: int, device: torch.device) -> Tensor:
    """bf16 [n, k]: zeros would take less power."""
    return torch.randn(n, k, generator=torch.Generator(device).manual_seed(1), device=device).to(torch.bfloat16)


def _card(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)
