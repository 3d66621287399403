"""What a token should take: its bytes at the pace at which they can be read, and for each kind of launch a constant.

    a product     boundary of its kind + start of its format + bytes / (limit x efficiency x pace of its format)
    an attention  a curve over the bytes that it reads of the cache, through the depths that were measured
    all else      boundary of its kind + bytes / (limit x efficiency)

*Boundaries*, the *efficiency* and the share of *starts* are fitted to one profile. A boundary is what a launch costs
beyond its bytes: handing values over from kernel to kernel, the norm, coding activations, the last items. The
efficiency is the share of the stream limit at which the longest product, the head, really reads; its boundary is taken
to be that of qkv, which begins with a residual sum and a norm as well. *Pace* and *start* belong to a format: they are
what its products showed alone, in ``bench kernels``. A part of a start is hidden behind the waiting for inputs; what is
not is seen where matrices of one shape have several formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

import torch

from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.formats import get, stream
from bytefloor.ops.attention import band_length
from bytefloor.tools.profile_data import LayerCache, Link, Matrix, Profile, Span, StepProfile
from bytefloor.tools.profile_spans import packed_bytes

ALONE = {
    "Q2_K": (0.65, 1.5), "Q3_K": (0.74, 1.5), "Q4_K": (1.0, 0.3), "Q5_K": (1.0, 0.8), "Q6_K": (1.0, 1.2),
    "Q8_0": (1.0, 0.1), "Q4_0": (0.99, 0.2), "Q4_1": (1.0, 0.2), "Q5_0": (1.0, 0.6), "Q5_1": (1.0, 0.8),
    "BF16": (1.0, 0.0), "F16": (1.0, 0.1), "IQ4_NL": (0.87, 0.9), "IQ4_XS": (0.83, 0.7),
    "affine-2b-g64": (0.76, 1.8), "affine-3b-g64": (0.79, 1.4), "affine-4b-g32": (1.0, 0.1),
    "affine-4b-g64": (1.0, 0.3), "affine-4b-g128": (0.99, 0.5), "affine-5b-g64": (1.0, 0.9),
    "affine-6b-g64": (1.0, 0.6), "affine-8b-g64": (1.0, 0.1), "FP4-E2M1-g128": (0.87, 1.2),
    "FP8-E4M3-row": (1.0, 1.5), "NVFP4-modelopt": (0.83, 0.6),
}  # fmt: skip
"""Of a format's products alone, against those of BF16: pace, the share of their bytes a second, and start, how many us
more they take however many bytes they have. From matrices of 75 MB and 500 MB on an H200, in docs/results."""
ALIKE = (
    ("affine-2b", "affine-2b-g64"), ("affine-3b", "affine-3b-g64"), ("affine-4b", "affine-4b-g64"),
    ("affine-5b", "affine-5b-g64"), ("affine-6b", "affine-6b-g64"), ("affine-8b", "affine-8b-g64"),
    ("FP8", "FP8-E4M3-row"), ("mlx-mxfp8", "FP8-E4M3-row"), ("NVFP4", "NVFP4-modelopt"),
    ("mlx-nvfp4", "NVFP4-modelopt"), ("MXFP4", "FP4-E2M1-g128"), ("mlx-mxfp4", "FP4-E2M1-g128"),
)  # fmt: skip
"""Formats that were not measured alone go by one whose weights are unpacked in the same way."""
LONG = 4.0
"""Times as many bytes as a qkv has: a head of fewer says nothing of the efficiency."""
HICCUP = 3.0
HALF = 0.5
"""Of starts, where all matrices of a shape have one format: what whole tokens of nine mixtures of Gemma 4 12B show."""
LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.05, 1.15
TABLES = ("embedding", "per_layer_embedding")
Key = tuple[str, str]
"""Kind and name of a launch."""
CacheClass = tuple[int | None, int]
"""Window, and bytes of a position."""
Curve = tuple[tuple[float, float], ...]
"""(bytes, us) of rising bytes."""


@dataclass(frozen=True)
class FloorModel:
    """gb_s: the stream limit of the machine. efficiency, starts, boundaries_us, curves: fitted, see above.

    beside_us: the step's gaps. stretch: what the stamps added to all times, a factor. has_kernels: whether formats
    have paces and starts, which they have not for the reference executor.
    """

    gb_s: float
    efficiency: float
    starts: float
    boundaries_us: Mapping[Key, float]
    curves: Mapping[CacheClass, Curve]
    beside_us: float
    stretch: float
    has_kernels: bool
    matrices: Mapping[str, Matrix]
    caches: Mapping[int, LayerCache]
    kv: str

    def span_us(self, span: Span, formats: Mapping[str, str] | None = None) -> float:
        """Time in the chain. formats: of matrices by name, where they are not those of the profile."""
        if curve := self._curve(span):
            return _on(curve, span.streamed_bytes, self.gb_s)
        boundary = self.boundaries_us[span.kind, span.name]
        return boundary + self.start_us(span, formats) + self.bytes_us(span, formats) / self.efficiency

    def _curve(self, span: Span) -> Curve | None:
        if span.layer is None or not span.cache_bytes:
            return None
        return self.curves[cache_class(self.caches[span.layer], self.kv)]

    def bytes_us(self, span: Span, formats: Mapping[str, str] | None = None) -> float:
        """Of all that it reads, at the stream limit and at the pace of its formats."""
        whole = span.streamed_bytes / self.gb_s / 1e3
        found = [(self.matrices[name], _alone(self._format(name, formats))[0]) for name in span.weights]
        if not self.has_kernels or not found:
            return whole
        weights = sum(matrix.n * matrix.k for matrix, _ in found)
        return whole * sum(matrix.n * matrix.k / pace for matrix, pace in found) / weights

    def start_us(self, span: Span, formats: Mapping[str, str] | None = None) -> float:
        """Of a product, what its slowest format takes beside its bytes."""
        return self.starts * self.start_alone_us(span, formats)

    def start_alone_us(self, span: Span, formats: Mapping[str, str] | None = None) -> float:
        """The same where nothing is waited for."""
        if not self.has_kernels or not is_product(span):
            return 0.0
        return max(_alone(self._format(name, formats))[1] for name in span.weights)

    def _format(self, name: str, formats: Mapping[str, str] | None) -> str:
        return formats[name] if formats is not None else self.matrices[name].format

    def step_us(self, spans: Iterable[Span], formats: Mapping[str, str] | None = None) -> float:
        """Of a step without stamps."""
        return (sum(self.span_us(span, formats) for span in spans) + self.beside_us) / self.stretch


@dataclass(frozen=True)
class Prediction:
    """Of a token: bytes that the floor counts, the floor, and the time.

    us is None where no kernel has the formats, and where the reference executor is to have others: it decodes weights
    when it loads them and keeps a cache of floats, so that nothing that is stored changes its time.
    """

    needed_bytes: int
    floor_us: float
    us: float | None

    @property
    def tok_s(self) -> float | None:
        return None if self.us is None else 1e6 / self.us

    @property
    def floor_tok_s(self) -> float:
        return 1e6 / self.floor_us


def is_product(span: Span) -> bool:
    """Whether it reads matrices whole."""
    return any(not _is_lookup(span, name) for name in span.weights)


def _is_lookup(span: Span, name: str) -> bool:
    """A tied head is the embedding, read whole."""
    return name in TABLES and span.kind != "head"


def cache_class(cache: LayerCache, kv: str) -> CacheClass:
    """Layers whose attention costs the same."""
    return cache.window, cache.position_bytes[kv]


def _alone(format_name: str) -> tuple[float, float]:
    """(pace, start in us); those of BF16 for a format that nobody knows anything of."""
    if format_name in ALONE:
        return ALONE[format_name]
    return next((ALONE[known] for prefix, known in ALIKE if format_name.startswith(prefix)), ALONE["BF16"])


# --- fitting


def fit(profile: Profile) -> FloorModel:
    """The model of a profile's tokens. RequestError where it has none."""
    tokens = profile.tokens
    if not tokens:
        raise RequestError(f"{profile.model}: a profile without a token (-d) has nothing to fit a model to")
    caches = {cache.layer: cache for cache in profile.caches}
    first = tokens[0]
    empty = FloorModel(
        gb_s=profile.stream_gb_s,
        efficiency=1.0,
        starts=HALF,
        boundaries_us={},
        curves=_curves(tokens, caches, profile.kv),
        beside_us=first.gaps_us,
        stretch=first.sums_to,
        has_kernels=profile.executor == "kernels",
        matrices=profile.matrix_by_name,
        caches=caches,
        kv=profile.kv,
    )
    paced = replace(empty, efficiency=_efficiency(empty, first.links))
    started = replace(paced, starts=_starts(paced, first.links))
    return replace(started, boundaries_us=_boundaries(started, first.links))


def _efficiency(model: FloorModel, links: Sequence[Link]) -> float:
    """By what the head takes more than a qkv, over what its bytes take more; 1 where it is not much longer."""
    of_head, of_qkv = (
        [link for link in links if link.span.kind == kind and is_product(link.span)] for kind in ("head", "qkv")
    )
    if not of_head or not of_qkv:
        return 1.0
    bytes_us, us = (
        [median(of(link) for link in found) for found in (of_head, of_qkv)]
        for of in (lambda link: model.bytes_us(link.span), lambda link: link.us - model.start_us(link.span))
    )
    if bytes_us[0] < LONG * bytes_us[1] or us[0] <= us[1]:
        return 1.0
    found = (bytes_us[0] - bytes_us[1]) / (us[0] - us[1])
    return min(max(found, LEAST_EFFICIENCY), MOST_EFFICIENCY)


def _starts(model: FloorModel, links: Sequence[Link]) -> float:
    """By how much more products take than others of their shape whose formats start sooner: least squares, 0 to 1."""
    alike: dict[tuple[str, int], list[Link]] = {}
    for link in links:
        if is_product(link.span):
            n_weights = sum(model.matrices[name].n * model.matrices[name].k for name in link.span.weights)
            alike.setdefault((link.span.kind, n_weights), []).append(link)
    above, below = 0.0, 0.0
    for of_one in alike.values():
        found = [
            (model.start_alone_us(link.span), link.us - model.bytes_us(link.span) / model.efficiency)
            for link in _without_hiccups(of_one)
        ]
        middle = mean(start for start, _ in found)
        above += sum((start - middle) * rest for start, rest in found)
        below += sum((start - middle) ** 2 for start, _ in found)
    return min(max(above / below, 0.0), 1.0) if below > 0 else HALF


def _boundaries(model: FloorModel, links: Sequence[Link]) -> dict[Key, float]:
    """Of each kind and kernel the mean of what is left beside start and bytes."""
    found: dict[Key, list[Link]] = {}
    for link in links:
        found.setdefault((link.span.kind, link.span.name), []).append(link)
    return {
        key: mean(
            link.us - model.start_us(link.span) - model.bytes_us(link.span) / model.efficiency
            for link in _without_hiccups(of_one)
        )
        for key, of_one in found.items()
    }


def _without_hiccups(links: Sequence[Link]) -> list[Link]:
    """Those that took no more than three times what is usual among them."""
    usual = median(link.us for link in links)
    return [link for link in links if link.us <= HICCUP * usual]


def _curves(tokens: Sequence[StepProfile], caches: Mapping[int, LayerCache], kv: str) -> dict[CacheClass, Curve]:
    """Of each class of layers, through what its attentions took at each number of bytes."""
    found: dict[CacheClass, dict[int, list[Link]]] = {}
    for token in tokens:
        for link in token.links:
            layer = link.span.layer
            if layer is not None and link.span.cache_bytes:
                by_bytes = found.setdefault(cache_class(caches[layer], kv), {})
                by_bytes.setdefault(link.span.streamed_bytes, []).append(link)
    return {
        key: tuple((n, mean(link.us for link in _without_hiccups(by_bytes[n]))) for n in sorted(by_bytes))
        for key, by_bytes in found.items()
    }


def _on(curve: Curve, n_bytes: float, gb_s: float) -> float:
    """Between two points a straight line, before the first its time, behind the last no faster than the limit."""
    if n_bytes <= curve[0][0]:
        return curve[0][1]
    for (x, y), (then_x, then_y) in pairwise(curve):
        if n_bytes <= then_x:
            return y + (then_y - y) * (n_bytes - x) / (then_x - x)
    (x, y), slope = curve[-1], 1 / gb_s / 1e3
    if len(curve) > 1:
        slope = max(slope, (y - curve[-2][1]) / (x - curve[-2][0]))
    return y + slope * (n_bytes - x)


# --- predicting


def predict(
    profile: Profile,
    model: FloorModel,
    formats: Mapping[str, str] | None = None,
    depth: int = 0,
    kv: str | None = None,
) -> Prediction:
    """A token of the same model in other formats (of each matrix by name), at a depth, with another cache.

    model: fitted to the profile.
    """
    token = profile.tokens[0]
    kv = kv or profile.kv
    formats = formats or {matrix.name: matrix.format for matrix in profile.matrices}
    floor = sum(_needed(model, span, formats, depth, kv) for span in token.spans)
    floor_us = floor / profile.stream_gb_s / 1e3
    is_same = kv == profile.kv and all(formats[matrix.name] == matrix.format for matrix in profile.matrices)
    if not model.has_kernels and not is_same:
        return Prediction(floor, floor_us, None)
    try:
        spans = [_recast(model, span, formats, depth, kv) for span in token.spans]
    except UnsupportedError:
        return Prediction(floor, floor_us, None)
    return Prediction(floor, floor_us, model.step_us(spans, formats))


def _needed(model: FloorModel, span: Span, formats: Mapping[str, str], depth: int, kv: str) -> int:
    """Bytes that the floor counts of a span in other formats."""
    changed = span.file_bytes
    for name in span.weights:
        matrix = model.matrices[name]
        rows = matrix.n if _is_lookup(span, name) else 1
        changed += file_bytes(matrix, formats[name]) // rows - matrix.n_bytes // rows
    return changed + _cache_bytes(model, span, depth, kv)


def _cache_bytes(model: FloorModel, span: Span, depth: int, kv: str) -> int:
    if span.layer is None or not span.cache_bytes:
        return 0
    cache = model.caches[span.layer]
    return band_length(depth + 1, cache.window) * cache.position_bytes[kv]


def _recast(model: FloorModel, span: Span, formats: Mapping[str, str], depth: int, kv: str) -> Span:
    """A span with the bytes that it moves in other formats."""
    moved = span.moved_bytes
    for name in span.weights:
        matrix = model.matrices[name]
        if formats[name] != matrix.format:
            rows = matrix.n if _is_lookup(span, name) else 1
            moved += moved_bytes(matrix, formats[name]) // rows - moved_bytes(matrix, matrix.format) // rows
    return replace(span, moved_bytes=moved, cache_bytes=_cache_bytes(model, span, depth, kv))


def file_bytes(matrix: Matrix, format_name: str) -> int:
    """Of a matrix in a file, in any format; scales of whole rows included."""
    if format_name == matrix.format:
        return matrix.n_bytes
    scales = 4 * matrix.n if format_name == "FP8-E4M3-row" else 0
    return int(matrix.n * matrix.k * get(format_name).bits_per_weight) // 8 + scales


def moved_bytes(matrix: Matrix, format_name: str) -> int:
    """Of a matrix on a device; affine scales are taken for 16 bits. UnsupportedError where no kernel has the format."""
    return packed_bytes(
        stream.choose(format_name, -(-matrix.n // 16) * 16, matrix.k, torch.bfloat16), (matrix.n, matrix.k)
    )
