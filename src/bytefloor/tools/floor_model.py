"""What a token should take: its weights at the pace at which they can be read, and for each kind of launch a constant.

    us = boundary(kind, cache of its layer) + start(format) + bytes of weights / (limit x pace(format))

A *boundary* is fitted to one profile: what a launch takes beyond its weights. That is handing values over from kernel
to kernel, the norm, coding activations, the last items; of an attention it is all of it. Kernels that follow fetch
before it is their turn, and what they fetch passes beside the one that is running: so boundaries of all kinds in a
layer are curves over the bytes that its attention reads of the cache, straight between the depths that were measured.

*Pace* and *start* belong to a format: what its products showed alone, in ``bench kernels``. Where a profile has a long
product, its head, that format's pace is what was seen there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Times as many bytes as a qkv has: a head of fewer says nothing of a pace."""
HICCUP = 3.0
LEAST_PACE, MOST_PACE = 0.05, 1.15
TABLES = ("embedding", "per_layer_embedding")
CacheClass = tuple[int | None, int]
"""Window, and bytes of a position."""
Key = tuple[str, str, CacheClass | None]
"""Kind and name of a launch, and what its layer keeps; None outside layers."""
Curve = tuple[tuple[float, float], ...]
"""(bytes, us) of rising bytes."""


@dataclass(frozen=True)
class FloorModel:
    """gb_s: the stream limit of the machine. paces, boundaries: fitted, see above.

    paces: of formats whose pace this profile shows; the key None is of all, for the reference executor, whose formats
    differ in nothing once they are decoded. beside_us: the step's gaps. stretch: what the stamps added to all times, a
    factor. has_kernels: whether formats have paces and starts.
    """

    gb_s: float
    paces: Mapping[str | None, float]
    boundaries: Mapping[Key, Curve]
    beside_us: float
    stretch: float
    has_kernels: bool
    matrices: Mapping[str, Matrix]
    caches: Mapping[int, LayerCache]
    kv: str

    def span_us(self, span: Span, depth: int, formats: Mapping[str, str] | None = None, kv: str | None = None) -> float:
        """Time in the chain, of a token at a depth. formats, kv: where they are not those of the profile."""
        read = self.layer_bytes(span.layer, depth, kv or self.kv)
        boundary = _on(self.boundaries[self.key(span)], read, self.gb_s if span.cache_bytes else None)
        return boundary + self.start_us(span, formats) + self.weights_us(span, formats)

    def key(self, span: Span) -> Key:
        """What its boundary goes by."""
        known = span.layer is not None and span.layer in self.caches
        return span.kind, span.name, self._class(span.layer) if known else None

    def _class(self, layer: int | None) -> CacheClass:
        """Layers whose launches cost the same."""
        assert layer is not None
        return self.caches[layer].window, self.caches[layer].position_bytes[self.kv]

    def layer_bytes(self, layer: int | None, depth: int, kv: str) -> int:
        """Of the cache, what the layer's attention reads; 0 outside layers."""
        if layer is None or layer not in self.caches:
            return 0
        cache = self.caches[layer]
        return band_length(depth + 1, cache.window) * cache.position_bytes[kv]

    def weights_us(self, span: Span, formats: Mapping[str, str] | None = None) -> float:
        """Of what it reads beside the cache, at the pace of its formats."""
        found = [(self.matrices[name], self.pace(self._format(name, formats))) for name in span.weights]
        whole = span.moved_bytes / self.gb_s / 1e3
        if not found:
            return whole
        weights = sum(matrix.n * matrix.k for matrix, _ in found)
        return whole * sum(matrix.n * matrix.k / pace for matrix, pace in found) / weights

    def pace(self, format_name: str) -> float:
        """Share of the stream limit at which a long product reads."""
        if not self.has_kernels:
            return self.paces.get(None, 1.0)
        return self.paces.get(format_name, _alone(format_name)[0])

    def start_us(self, span: Span, formats: Mapping[str, str] | None = None) -> float:
        """Of a product, what its slowest format takes beside its bytes."""
        if not self.has_kernels or not is_product(span):
            return 0.0
        return max(_alone(self._format(name, formats))[1] for name in span.weights)

    def _format(self, name: str, formats: Mapping[str, str] | None) -> str:
        return formats[name] if formats is not None else self.matrices[name].format


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
    first = tokens[0]
    empty = FloorModel(
        gb_s=profile.stream_gb_s,
        paces={},
        boundaries={},
        beside_us=first.gaps_us,
        stretch=first.sums_to,
        has_kernels=profile.executor == "kernels",
        matrices=profile.matrix_by_name,
        caches={cache.layer: cache for cache in profile.caches},
        kv=profile.kv,
    )
    paced = replace(empty, paces=_paces(empty, first.links))
    return replace(paced, boundaries=_boundaries(paced, tokens))


def _paces(model: FloorModel, links: Sequence[Link]) -> dict[str | None, float]:
    """Of the head's format: what its bytes take, beside what it takes more than the boundary of a qkv, which begins
    with a residual sum and a norm as well. Nothing where it is not much longer than a qkv."""
    of_head, of_qkv = (
        [link for link in links if link.span.kind == kind and is_product(link.span)] for kind in ("head", "qkv")
    )
    if not of_head or not of_qkv:
        return {}
    head = of_head[0].span
    if head.moved_bytes < LONG * median(link.span.moved_bytes for link in of_qkv):
        return {}
    boundary = median(_boundary_us(model, link) for link in of_qkv)
    us = median(link.us for link in of_head) - boundary - model.start_us(head)
    if us <= 0:
        return {}
    found = min(max(head.moved_bytes / model.gb_s / 1e3 / us, LEAST_PACE), MOST_PACE)
    return {model.matrices[head.weights[0]].format if model.has_kernels else None: found}


def _boundary_us(model: FloorModel, link: Link) -> float:
    return link.us - model.start_us(link.span) - model.weights_us(link.span)


def _boundaries(model: FloorModel, tokens: Sequence[StepProfile]) -> dict[Key, Curve]:
    """Of each kind, kernel and class of layers the mean of what is left beside start and weights, at each depth."""
    found: dict[Key, dict[int, list[Link]]] = {}
    for token in tokens:
        for link in token.links:
            read = model.layer_bytes(link.span.layer, token.depth, model.kv)
            found.setdefault(model.key(link.span), {}).setdefault(read, []).append(link)
    return {
        key: tuple(
            (n, mean(_boundary_us(model, link) for link in _without_hiccups(by_bytes[n]))) for n in sorted(by_bytes)
        )
        for key, by_bytes in found.items()
    }


def _without_hiccups(links: Sequence[Link]) -> list[Link]:
    """Those that took no more than three times what is usual among them."""
    usual = median(link.us for link in links)
    return [link for link in links if link.us <= HICCUP * usual]


def _on(curve: Curve, n_bytes: float, gb_s: float | None) -> float:
    """Between two points a straight line, before the first its time. Behind the last its time, or, where the launch
    itself reads these bytes, on as before, but no faster than the limit."""
    if n_bytes <= curve[0][0]:
        return curve[0][1]
    for (x, y), (then_x, then_y) in pairwise(curve):
        if n_bytes <= then_x:
            return y + (then_y - y) * (n_bytes - x) / (then_x - x)
    (x, y) = curve[-1]
    if gb_s is None:
        return y
    slope = 1 / gb_s / 1e3
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
        spans = [_recast(model, span, formats) for span in token.spans]
    except UnsupportedError:
        return Prediction(floor, floor_us, None)
    us = sum(model.span_us(span, depth, formats, kv) for span in spans) + model.beside_us
    return Prediction(floor, floor_us, us / model.stretch)


def _needed(model: FloorModel, span: Span, formats: Mapping[str, str], depth: int, kv: str) -> int:
    """Bytes that the floor counts of a span in other formats."""
    changed = span.file_bytes
    for name in span.weights:
        matrix = model.matrices[name]
        rows = matrix.n if _is_lookup(span, name) else 1
        changed += file_bytes(matrix, formats[name]) // rows - matrix.n_bytes // rows
    return changed + (model.layer_bytes(span.layer, depth, kv) if span.cache_bytes else 0)


def _recast(model: FloorModel, span: Span, formats: Mapping[str, str]) -> Span:
    """A span with the bytes of weights that it moves in other formats."""
    moved = span.moved_bytes
    for name in span.weights:
        matrix = model.matrices[name]
        if formats[name] != matrix.format:
            rows = matrix.n if _is_lookup(span, name) else 1
            moved += moved_bytes(matrix, formats[name]) // rows - moved_bytes(matrix, matrix.format) // rows
    return replace(span, moved_bytes=moved)


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
