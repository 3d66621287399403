"""What a profile is: every launch of a token or of a chunk, its bytes and its times, and the file they are kept in.

Kernels of a token overlap: the next one is there early and waits for values. So a span's own time is counted along the
chain: from the end of all spans before it to its own. The chain's times and the two gaps at the ends make up the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from bytefloor.errors import FileError

VERSION = 1
Kind = Literal[
    "embedding", "per_layer", "norm", "qkv", "attention", "o", "gate_up", "down", "head", "sampling", "torch"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order of a token. norm: norms, sums and gates that are kernels or ops of their own. per_layer: everything of
an E model's per-layer inputs. sampling: what takes the best token of the head's sums. torch: torch operations between
kernels, where they belong to no other kind."""


@dataclass(frozen=True)
class Matrix:
    """A matrix that products read or rows are looked up in: its name as in ``Weight.name``, [n, k], stored bytes."""

    name: str
    n: int
    k: int
    format: str
    n_bytes: int


@dataclass(frozen=True)
class LayerCache:
    """What a layer reads of a cache: bytes of a position, by what a cache may keep, and the window, if there is one."""

    layer: int
    window: int | None
    position_bytes: dict[str, int]


@dataclass(frozen=True)
class Span:
    """One launch on a device, or one call of an op.

    part: as in ``OpCall.part`` (``layers.3.mlp``). layer: its number, None outside layers. name: of the kernel or the
    op. weights: names of its matrices, formats: theirs, each once.
    file_bytes: of weights, in the file's encoding; moved_bytes: what the layout in memory makes of them; cache_bytes:
    of the cache that is read, as ``Step.token_bytes`` counts it. flops: multiplications and additions.
    start_us: its first block is there. ready_us: its inputs are there, so that the first multiplication can be done.
    end_us: its last value is handed over. All from the beginning of the step.
    """

    index: int
    part: str
    layer: int | None
    kind: Kind
    name: str
    weights: tuple[str, ...]
    formats: tuple[str, ...]
    file_bytes: int
    moved_bytes: int
    cache_bytes: int
    flops: int
    start_us: float = 0.0
    ready_us: float = 0.0
    end_us: float = 0.0

    @property
    def streamed_bytes(self) -> int:
        """All that it really reads of weights and cache."""
        return self.moved_bytes + self.cache_bytes

    @property
    def needed_bytes(self) -> int:
        """What the floor counts of it."""
        return self.file_bytes + self.cache_bytes

    def timed(self, start_us: float, ready_us: float, end_us: float) -> Span:
        """The same, measured; kept to the nanosecond."""
        return replace(self, start_us=round(start_us, 3), ready_us=round(ready_us, 3), end_us=round(end_us, 3))


@dataclass(frozen=True)
class Link:
    """A span in the chain. wait_us: from the end before it until its inputs are there (hand-over, norm and coding of
    activations); work_us: from then to its end. begin_us: that end before it."""

    span: Span
    begin_us: float
    wait_us: float
    work_us: float

    @property
    def us(self) -> float:
        return self.wait_us + self.work_us


@dataclass(frozen=True)
class StepProfile:
    """A token, or a chunk of a prompt.

    rows: 1 of a token. depth: positions in the cache before it. spans: times are medians over the repeats.
    wall_us: the step without any stamps; profiled_us: with them, from one step's beginning to the next one's.
    sampling_us: what a sampled token costs more than a greedy one; None where that was not measured.
    spread: (largest - smallest) / median of wall_us over the repeats; None of a single one.
    """

    kind: Literal["token", "chunk"]
    rows: int
    depth: int
    spans: tuple[Span, ...]
    wall_us: float
    profiled_us: float
    sampling_us: float | None
    n_repeats: int
    spread: float | None

    def __post_init__(self) -> None:
        if not self.spans:
            raise ValueError("a step without spans")
        if not min(self.wall_us, self.profiled_us) > 0:
            raise ValueError("a step that takes no time")

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The spans along the chain."""
        first = self.spans[0].start_us
        ends = accumulate((span.end_us for span in self.spans), max, initial=first)
        return tuple(_link(span, end) for span, end in zip(self.spans, ends, strict=False))

    @property
    def begin_us(self) -> float:
        """The gap before the first block of the first span."""
        return self.spans[0].start_us

    @property
    def end_us(self) -> float:
        """The gap behind the last value of the last span."""
        return self.profiled_us - max(span.end_us for span in self.spans)

    @property
    def gaps_us(self) -> float:
        """Both."""
        return self.begin_us + self.end_us

    @property
    def overhead(self) -> float:
        """What the stamps cost, as a share of the step without them."""
        return self.profiled_us / self.wall_us - 1

    @property
    def sums_to(self) -> float:
        """All parts together over the step's time without stamps: 1 where nothing is lost or counted twice."""
        return (sum(link.us for link in self.links) + self.gaps_us) / self.wall_us

    @property
    def n_launches(self) -> int:
        """Kernels, or calls of ops; operations of torch between kernels are not among them."""
        return sum(span.kind != "torch" for span in self.spans)

    @property
    def needed_bytes(self) -> int:
        """What the floor counts."""
        return sum(span.needed_bytes for span in self.spans)

    @property
    def streamed_bytes(self) -> int:
        """What is really read."""
        return sum(span.streamed_bytes for span in self.spans)

    @property
    def flops(self) -> int:
        return sum(span.flops for span in self.spans)

    def floor_us(self, gb_s: float) -> float:
        """The time of the needed bytes alone, at so many 10^9 bytes a second."""
        return self.needed_bytes / gb_s / 1e3

    def links_by_kind(self) -> dict[Kind, list[Link]]:
        """Those kinds that there are, in the order of a token."""
        return {kind: found for kind in KINDS if (found := [link for link in self.links if link.span.kind == kind])}

    @property
    def title(self) -> str:
        """As people say it."""
        rows = "token" if self.kind == "token" else f"chunk of {self.rows:,} rows"
        return f"{rows} at depth {self.depth:,}"


def _link(span: Span, begin_us: float) -> Link:
    us = max(0.0, span.end_us - begin_us)
    wait_us = min(max(0.0, span.ready_us - begin_us), us)
    return Link(span, begin_us, wait_us, us - wait_us)


@dataclass(frozen=True)
class Profile:
    """Steps of one model, one cache and one machine.

    format: the one that most bytes have. executor: kernels, or reference. stream_gb_s: 10^9 bytes a second that this
    machine reads, measured in the same run; peak_tflops: of its tensor cores, None where there are none.
    context: positions that the model was made for; capacity: those that there was room for.
    family, n_layers, n_gqa (query heads a KV head, in the first layer), matrices and caches: what the bytes of other
    formats of this model follow from. A head that is the embedding is one matrix.
    """

    model: str
    family: str
    format: str
    kv: str
    executor: str
    stream_gb_s: float
    peak_tflops: float | None
    context: int
    capacity: int
    card: str
    clock_mhz: int | None
    commit: str | None
    date: str
    notes: tuple[str, ...]
    n_layers: int
    n_gqa: int
    matrices: tuple[Matrix, ...]
    caches: tuple[LayerCache, ...]
    steps: tuple[StepProfile, ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a profile without steps")
        if not self.stream_gb_s > 0:
            raise ValueError("a machine that reads nothing")
        if any(self.kv not in cache.position_bytes for cache in self.caches):
            raise ValueError(f"a cache of {self.kv}, of which no layer says what a position takes")
        names, layers = {matrix.name for matrix in self.matrices}, {cache.layer for cache in self.caches}
        for span in (span for step in self.steps for span in step.spans):
            if missing := set(span.weights) - names:
                raise ValueError(f"{span.part} reads {sorted(missing)[0]}, which is not among the matrices")
            if span.cache_bytes and span.layer not in layers:
                raise ValueError(f"{span.part} reads a cache, but layer {span.layer} has no cache")

    @property
    def tokens(self) -> tuple[StepProfile, ...]:
        """By depth."""
        return tuple(sorted((step for step in self.steps if step.kind == "token"), key=lambda step: step.depth))

    @property
    def chunks(self) -> tuple[StepProfile, ...]:
        return tuple(step for step in self.steps if step.kind == "chunk")

    @property
    def matrix_by_name(self) -> Mapping[str, Matrix]:
        return {matrix.name: matrix for matrix in self.matrices}


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def read_profile(path: Path) -> Profile:
    """FileError for a file that is none, or of another version; it says where it is wrong."""
    data = path.read_bytes()
    try:
        found: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: no profile: {error}") from None
    version = found.get("version") if isinstance(found, dict) else None
    if version is None:
        raise FileError(f"{path}: no profile: expected an object with a version, as bytefloor profile --save writes it")
    if version != VERSION:
        raise FileError(f"{path}: a profile of version {version}, expected {VERSION}")
    try:
        return msgspec.json.decode(data, type=Profile)
    except msgspec.ValidationError as error:
        raise FileError(f"{path}: no profile: {error}") from None


def total_us(links: Iterable[Link]) -> float:
    """Along the chain."""
    return sum(link.us for link in links)
