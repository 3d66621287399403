"""The plots of a profile: where a token's time goes, the roofline, time against depth, the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytefloor.tools.floor_model import FloorModel, predict
from bytefloor.tools.profile_data import KINDS, Link, Profile, StepProfile, total_us
from bytefloor.tools.profile_parts import GAPS, Part, made_of, part_of, parts_by_kind, whole
from bytefloor.tools.profile_tables import speed
from bytefloor.tools.svg import LETTER, Labels, Scale, bar, dot, fits, line, path, picture, sideways, text

WIDTH, WIDE = 720, 1440
"""Pixels of a plot in a column, and across both."""
BAR_HEIGHT = 112
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
LEFT, RIGHT = 58, 14
SEEN = 0.002
"""Of a step: what takes less of it has no dot in the roofline."""
SHADES = {"bytes": "s-bytes", "layout": "s-layout", "wait": "s-wait", "beyond": "s-beyond"}


def token_bars(profile: Profile, width: int) -> str:
    """A bar for each token, by kind, with the floor marked, and below it what the time is made of."""
    ends = [max(token.profiled_us, token.floor_us(profile.stream_gb_s)) for token in profile.tokens]
    x = Scale(0, max(ends), 2, width - 6)
    shapes = [
        shape for i, token in enumerate(profile.tokens) for shape in _token_bar(profile, token, x, i * BAR_HEIGHT)
    ]
    return picture(width, len(profile.tokens) * BAR_HEIGHT, "time of a token by kind", shapes)


def _token_bar(profile: Profile, token: StepProfile, x: Scale, y: float) -> list[str]:
    title = f"depth {token.depth:,}: {token.wall_us:,.0f} us, {1e6 / token.wall_us:,.1f} tok/s"
    shapes, at = [text(x(0), y + 15, title, "strong")], 0.0
    floor = token.floor_us(profile.stream_gb_s)
    for part in parts_by_kind(profile, token, None):
        left, right = x(at), x(at + part.us)
        told = f"{part.name}: {part.us:,.1f} us, {part.share_of_step:.1%} of the token"
        shapes.append(bar(left, y + 24, right - left, 34, f"k-{part.name}", told))
        # On the longer side of the mark, where that goes through it.
        sides = [(left, x(floor)), (x(floor), right)] if left < x(floor) < right else [(left, right)]
        left, right = max(sides, key=lambda side: side[1] - side[0])
        words = next((w for w in (f"{part.name} {part.us:,.0f}", part.name) if fits(w, right - left)), "")
        shapes += [text((left + right) / 2, y + 45, words, "on", "middle")] if words else []
        at += part.us
    shapes += _made_of(whole(profile, token, None), x, y + 62)
    shapes.append(line(x(floor), y + 20, x(floor), y + 86, "floor"))
    words = f"floor {floor:,.0f} us, {floor / token.wall_us:.1%}"
    # Behind the title where the mark stands above it, and before the right end.
    beside = min(max(x(floor) + 4, x(0) + len(title) * LETTER + 24), x.end - len(words) * LETTER)
    shapes.append(text(beside, y + 15, words, "floor-label"))
    return shapes


def _made_of(part: Part, x: Scale, y: float) -> list[str]:
    """Bytes, layout, wait and beyond, no further than the time goes; what came while it waited is off the wait."""
    terms = dict(zip(SHADES, made_of(part), strict=True))
    if terms["beyond"] < 0:
        terms["wait"] += terms.pop("beyond")
    shapes, at = [], 0.0
    for name, us in terms.items():
        end = min(at + max(us, 0.0), part.us)
        width = x(end) - x(at)
        shapes.append(bar(x(at), y, width, 20, SHADES[name], f"{name}: {us:,.1f} us"))
        words = f"{name} {us:,.0f}"
        if fits(words, width):
            shapes.append(text(x(at) + width / 2, y + 14, words, "on", "middle"))
        at = end
    return shapes


@dataclass(frozen=True)
class Point:
    """Of the roofline: a kind of a step, flops a byte, GFLOP/s."""

    step: StepProfile
    part: Part

    @property
    def x(self) -> float:
        return self.part.flops / self.part.streamed_bytes

    @property
    def y(self) -> float:
        return self.part.flops / self.part.us / 1e3

    def drawn(self, x: float, y: float) -> str:
        """A token's is a dot, a chunk's a square."""
        told = f"{self.step.title}, {self.part.name}: {self.x:,.2f} flops a byte, {self.y:,.1f} GFLOP/s"
        kind = f"k-{self.part.name} mark"
        return dot(x, y, 6, kind, told) if self.step.kind == "token" else bar(x - 5.5, y - 5.5, 11, 11, kind, told)


def roofline(profile: Profile) -> str:
    """Flops a byte against GFLOP/s: the shallowest token and the largest chunk by kind, below the roof."""
    top, bottom = 14, 384
    points = [Point(step, part) for step in _compared(profile) for part in _with_both(profile, step)]
    if not points:
        return ""
    peak = profile.peak_tflops * 1e3 if profile.peak_tflops else max(point.y for point in points)
    ridge, limit = peak / profile.stream_gb_s, profile.stream_gb_s
    most = max(ridge, *(point.x for point in points)) * 3
    x = Scale(min(point.x for point in points) / 2.5, most, LEFT, WIDTH - RIGHT, True)
    lowest = min(*(point.y for point in points), x.least * limit)
    y = Scale(lowest / 2, max(peak, *(point.y for point in points)) * 8, bottom, top, True)
    labels = Labels((LEFT + 2, top, WIDTH - RIGHT, bottom - 2))
    roof = [(x(x.least), y(x.least * limit)), (x(ridge), y(peak)), (x(most), y(peak))]
    if not profile.peak_tflops:
        roof = roof[:2]
    shapes = [*_axes(x, y, "flops a byte", "GFLOP/s"), path(roof, "roof")]
    labels.block_path(roof)
    for point in points:
        labels.block(x(point.x) - 7, y(point.y) - 7, 14, 14)
    shapes += [point.drawn(x(point.x), y(point.y)) for point in points]
    if profile.peak_tflops:
        words = f"tensor cores {profile.peak_tflops:,.0f} TFLOP/s"
        shapes.append(labels.place((roof[1][0] + roof[2][0]) / 2, roof[1][1], words, "quiet", is_led=False))
    middle = (x.least * ridge) ** 0.5
    shapes.append(labels.place(x(middle), y(middle * limit), f"{speed(limit)} GB/s", "quiet", is_led=False))
    shapes += [labels.place(x(point.x), y(point.y), point.part.name, "small") for point in points]
    return picture(WIDTH, 430, "roofline", shapes)


def _compared(profile: Profile) -> list[StepProfile]:
    chunks = sorted(profile.chunks, key=lambda step: -step.rows)
    return [*profile.tokens[:1], *chunks[:1]]


def _with_both(profile: Profile, step: StepProfile) -> list[Part]:
    """Kinds that multiply and read."""
    parts = parts_by_kind(profile, step, None)
    return [p for p in parts if p.flops and p.streamed_bytes and p.us and p.share_of_step >= SEEN]


def _axes(x: Scale, y: Scale, x_title: str, y_title: str) -> list[str]:
    """Lines and numbers at round values; what they are."""
    shapes = _heights(x, y)
    for tick in x.ticks:
        shapes.append(line(x(tick), y.begin, x(tick), y.end, "grid"))
        shapes.append(text(x(tick), y.begin + 17, number(tick, x), "quiet", "middle"))
    shapes.append(text((x.begin + x.end) / 2, y.begin + 37, x_title, "quiet", "middle"))
    shapes.append(sideways(12, (y.begin + y.end) / 2, y_title))
    return shapes


def _heights(x: Scale, y: Scale) -> list[str]:
    """Lines across, with numbers."""
    shapes = []
    for tick in y.ticks:
        shapes.append(line(x.begin, y(tick), x.end, y(tick), "grid"))
        shapes.append(text(x.begin - 6, y(tick) + 4, number(tick, y), "quiet", "end"))
    return shapes


def number(tick: float, scale: Scale) -> str:
    """Short, all of a straight scale in one unit: 0.01, 2,500, 25k, 1M."""
    size = tick if scale.is_log else max(abs(scale.most), abs(scale.least)) / 10
    unit, letter = next(((unit, letter) for unit, letter in UNITS if size >= unit), (1.0, ""))
    return f"{tick / unit:,.10g}{letter}" if tick else "0"


def depth_plot(profile: Profile, model: FloorModel) -> str:
    """Tokens that were measured, the model's line and the floor's."""
    top, bottom = 16, 384
    tokens = profile.tokens
    deepest = max(tokens[-1].depth, min(4096, profile.context - 1))
    depths = [round(deepest * i / 60) for i in range(61)]
    found = [predict(profile, model, None, depth) for depth in depths]
    of_model = [(depth, one.us) for depth, one in zip(depths, found, strict=True) if one.us is not None]
    most = max(*(us for _, us in of_model), *(token.wall_us for token in tokens))
    x, y = Scale(0, deepest * 1.03, LEFT, WIDTH - RIGHT), Scale(0, most * 1.15, bottom, top)
    lines = {
        "floor": [(x(depth), y(one.floor_us)) for depth, one in zip(depths, found, strict=True)],
        "model": [(x(depth), y(us)) for depth, us in of_model],
    }
    labels = Labels((LEFT + 2, top, WIDTH - RIGHT, bottom - 2))
    shapes = _axes(x, y, "positions in the cache", "us")
    for kind, points in lines.items():
        labels.block_path(points)
        shapes.append(path(points, kind))
    for token in tokens:
        told = f"depth {token.depth:,}: {token.wall_us:,.1f} us, {1e6 / token.wall_us:,.1f} tok/s"
        labels.block(x(token.depth) - 6, y(token.wall_us) - 6, 12, 12)
        shapes.append(dot(x(token.depth), y(token.wall_us), 6, "measured", told))
    shapes += [labels.place(x(t.depth), y(t.wall_us), f"{speed(1e6 / t.wall_us)} tok/s", "small") for t in tokens]
    for kind, points in lines.items():
        shapes.append(
            labels.place(*points[40], f"the {kind}", "floor-label" if kind == "floor" else "quiet", is_led=False)
        )
    return picture(WIDTH, 430, "time of a token against depth", shapes)


def layer_bars(profile: Profile, token: StepProfile, width: int) -> str:
    """A column for each layer, by kind."""
    top, bottom = 12, 204
    layers: dict[int, list[Link]] = {}
    for link in token.links:
        if link.span.layer is not None:
            layers.setdefault(link.span.layer, []).append(link)
    if not layers:
        return ""
    n, most = max(layers) + 1, max(total_us(links) for links in layers.values())
    x, y = Scale(0, n, LEFT, width - RIGHT), Scale(0, most * 1.05, bottom, top)
    shapes = _heights(x, y)
    pitch = x(1) - x(0)
    for layer, links in sorted(layers.items()):
        shapes += _column(profile, token, layer, links, (x(layer) + pitch * 0.08, pitch * 0.84), y)
        if layer % max(1, round(n / 16)) == 0:
            shapes.append(text(x(layer + 0.5), bottom + 17, str(layer), "quiet", "middle"))
    shapes += [
        text((x.begin + x.end) / 2, bottom + 37, "layer", "quiet", "middle"),
        sideways(12, (top + bottom) / 2, "us"),
    ]
    return picture(width, 250, "time of each layer by kind", shapes)


def _column(
    profile: Profile, token: StepProfile, layer: int, links: Sequence[Link], place: tuple[float, float], y: Scale
) -> list[str]:
    """place: left end and width."""
    shapes, at = [], 0.0
    for kind in token.links_by_kind():
        of_kind = [link for link in links if link.span.kind == kind]
        if of_kind:
            part = part_of(profile, token, kind, of_kind, None)
            told = f"layer {layer}, {kind}: {part.us:,.2f} us, {part.gb_s:,.0f} GB/s"
            shapes.append(bar(place[0], y(at + part.us), place[1], y(at) - y(at + part.us), f"k-{kind}", told))
            at += part.us
    return shapes


def legend(profile: Profile) -> str:
    """Colours and names of the kinds that tokens have, as HTML."""
    found = {kind for token in profile.tokens for kind in token.links_by_kind()}
    names = [*(kind for kind in KINDS if kind in found), GAPS]
    marks = "".join(f'<span><i class="k-{name}"></i>{name}</span>' for name in names)
    return f'<p class="legend">{marks}</p>'
