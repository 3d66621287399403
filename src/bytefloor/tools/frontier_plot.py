"""Quality against speed as SVG, or against bytes where only the reference executor has run.

Everything is in one file, colours for light and dark pages among them, so that it can be shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from xml.sax.saxutils import escape, quoteattr

from bytefloor.tools.front import Plane, Point, Rows, plane_of
from bytefloor.tools.frontier_rows import FAILED, REFUSED, told_source
from bytefloor.tools.plot_labels import LED, Box, Mark, place

WIDTH, HEIGHT = 880, 576
FRAME = Box(84, 104, WIDTH - 20, HEIGHT - 58)
RADIUS = 5.0
MOST_CHARACTERS, MOST_NAME = 116, 36
"""Of a line of what is told, and of a model's name in the title."""
SAME = 1e-7
"""Less divergence than this is none: codes of a saved base alone make a tenth of it. Such points lie on the bottom."""
MB = 1e6
STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --faint: #59636e; --grid: #e4e8ec; --front: #0a62c4; --beaten: #6e7781; }
@media (prefers-color-scheme: dark) {
svg { --page: #0d1117; --ink: #e6edf3; --faint: #9aa4af; --grid: #242b33; --front: #5cabff; --beaten: #8b949e; } }
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
.title { font-size: 16px; font-weight: 600; }
.faint { fill: var(--faint); }
.page { fill: var(--page); }
.grid { stroke: var(--grid); }
.edge { stroke: var(--faint); fill: none; }
.step { stroke: var(--front); fill: none; stroke-width: 1.5; stroke-opacity: 0.55; }
.source { stroke: var(--faint); stroke-dasharray: 4 4; }
.front { stroke: var(--front); fill: var(--front); }
.beaten { stroke: var(--beaten); fill: var(--page); }
.lead { stroke: var(--faint); stroke-width: 0.8; }
.name { paint-order: stroke; stroke: var(--page); stroke-width: 3px; stroke-linejoin: round; }
.name.front { fill: var(--front); stroke: var(--page); }
.name.beaten { fill: var(--beaten); }
"""


@dataclass(frozen=True)
class Scales:
    """What lies at the edges of the frame. x in the plane's unit, kl in nats, by its logarithm."""

    x: tuple[float, float]
    kl: tuple[float, float]

    def across(self, x: float) -> float:
        """Pixels from the left."""
        low, high = self.x
        return FRAME.left + (x - low) / (high - low) * (FRAME.right - FRAME.left)

    def down(self, kl: float) -> float:
        """Pixels from the top; what is out of the frame is moved to its edge."""
        low, high = (math.log10(edge) for edge in self.kl)
        share = (math.log10(kl) - low) / (high - low) if kl > 0 else 0.0
        return FRAME.bottom - min(max(share, 0.0), 1.0) * (FRAME.bottom - FRAME.top)


def draw(rows: Rows) -> str:
    """The plot of the rows of one file, of which at least one was measured."""
    plane = plane_of(rows)
    scales = _scales(plane.points)
    on_front = {point.name for point in plane.front}
    marks = [_mark(point, scales) for point in plane.points]
    stairs = _stairs(plane, scales)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label={quoteattr(_title(rows, plane))}>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        *_words(rows, plane),
        *_axes(plane, scales),
        *_source_line(plane, scales),
        f'<path class="step" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in stairs)}"/>',
    ]
    for point in plane.points:
        parts += _point(point, plane, scales, "front" if point.name in on_front else "beaten")
    for point, mark, box in zip(plane.points, marks, place(marks, FRAME, _treads(stairs)), strict=True):
        parts += _name(mark, box, "front" if point.name in on_front else "beaten")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scales(points: Sequence[Point]) -> Scales:
    left, right = min(p.x - p.x_error for p in points), max(p.x + p.x_error for p in points)
    room = 0.09 * (right - left) or 0.1 * right
    seen = [p for p in points if p.kl > SAME]
    low = min((max(p.kl - p.kl_error, p.kl / 2) for p in seen), default=SAME)
    high = max((p.kl + p.kl_error for p in seen), default=10 * SAME)
    return Scales((left - room, right + room), (low / 1.7, high * 1.7))


def _title(rows: Rows, plane: Plane) -> str:
    """Short enough to leave room for what the points mean."""
    name = rows[0]["source"]
    shown = name if len(name) <= MOST_NAME else name[: MOST_NAME - 1] + "…"
    return f"{shown}: quality against {'speed' if plane.is_speed else 'bytes'}"


def _words(rows: Rows, plane: Plane) -> Iterator[str]:
    """What it shows, of what, and what it leaves out."""
    first = rows[0]
    n = next((row["n_predictions"] for row in rows if row["n_predictions"]), 0)
    yield _text(FRAME.left, 26, _title(rows, plane), "title")
    bars = "standard errors, and the spread of repeats" if plane.is_speed else "standard errors"
    told = [
        f"KL is to {told_source(first)}, over {n:,} predictions",
        f"{first['card']}, {first['date']}",
        f"bars: {bars}",
    ]
    if plane.source_x is not None:
        told.append(f"the source: {_amount(plane.source_x, plane)}")
    lost = [f"{row['recipe']} ({row['state']})" for row in rows if row["state"] in (REFUSED, FAILED)]
    lost += [f"{name} (no kernels)" for name in plane.left_out]
    if lost:
        told.append("not drawn: " + ", ".join(lost))
    for i, line in enumerate(wrap("; ".join(told), MOST_CHARACTERS)):
        yield _text(FRAME.left, 46 + 16 * i, line, "faint")
    yield f'<circle class="front" cx="{FRAME.right - 196}" cy="{22}" r="{RADIUS}"/>'
    yield _text(FRAME.right - 186, 26, "on the front", "faint")
    yield f'<circle class="beaten" cx="{FRAME.right - 96}" cy="{22}" r="{RADIUS}"/>'
    yield _text(FRAME.right - 86, 26, "beaten in both", "faint")


def _amount(x: float, plane: Plane) -> str:
    return f"{x:,.0f} tokens a second" if plane.is_speed else f"{x / MB:,.1f} MB a token"


def _axes(plane: Plane, scales: Scales) -> Iterator[str]:
    unit = 1.0 if plane.is_speed else MB
    low, high = (edge / unit for edge in scales.x)
    for tick in linear_ticks(low, high):
        x = scales.across(tick * unit)
        yield f'<path class="grid" d="M{x:.1f} {FRAME.top}V{FRAME.bottom}"/>'
        yield _text(x, FRAME.bottom + 18, f"{tick:,.10g}", "faint", "middle")
    for tick in log_ticks(*scales.kl):
        y = scales.down(tick)
        yield f'<path class="grid" d="M{FRAME.left} {y:.1f}H{FRAME.right}"/>'
        yield _text(FRAME.left - 8, y + 4, f"{tick:.10f}".rstrip("0").rstrip("."), "faint", "end")
    yield f'<path class="edge" d="M{FRAME.left} {FRAME.top}V{FRAME.bottom}H{FRAME.right}"/>'
    across = (
        "tokens a second, best tokens from an empty cache (more is better)"
        if plane.is_speed
        else "weights that a token reads, MB (less is better); no kernels ran, so speed would say nothing of a format"
    )
    yield _text((FRAME.left + FRAME.right) / 2, HEIGHT - 16, across, "", "middle")
    middle = (FRAME.top + FRAME.bottom) / 2
    turned = f'transform="rotate(-90 16 {middle:.1f})"'
    yield _text(16, middle, "mean KL divergence to the source, nats (less is better)", "", "middle", turned)


def linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, four to nine of them."""
    size = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(size * factor for factor in (10, 5, 2, 1) if (high - low) / (size * factor) >= 4)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten between two numbers; the powers alone where those would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [tick for tick in found if low <= tick <= high]
    return inside if len(inside) <= 12 else [tick for tick in inside if math.log10(tick).is_integer()]


def _source_line(plane: Plane, scales: Scales) -> Iterator[str]:
    if plane.source_x is None or not scales.x[0] < plane.source_x < scales.x[1]:
        return
    x = scales.across(plane.source_x)
    yield f'<path class="source" d="M{x:.1f} {FRAME.top}V{FRAME.bottom}"/>'
    yield _text(x, FRAME.top - 6, "source", "faint", "middle")


def _stairs(plane: Plane, scales: Scales) -> list[tuple[float, float]]:
    """Corners of the line that goes from point to point of the front, across first: what is above it is beaten."""
    front = [(scales.across(point.x), scales.down(point.kl)) for point in reversed(plane.front)]
    corners = front[:1]
    for (_, y), (x, below) in pairwise(front):
        corners += [(x, y), (x, below)]
    return corners


def _treads(corners: Sequence[tuple[float, float]]) -> list[Box]:
    """The lines between corners, as wide as a name should stay away."""
    return [Box(min(a, c) - 1, min(b, d) - 1, max(a, c) + 1, max(b, d) + 1) for (a, b), (c, d) in pairwise(corners)]


def _bars(point: Point, scales: Scales) -> tuple[Box, Box]:
    """The vertical and the horizontal error bar, without width."""
    x, y = scales.across(point.x), scales.down(point.kl)
    up, down = scales.down(point.kl + point.kl_error), scales.down(point.kl - point.kl_error)
    left, right = scales.across(point.x - point.x_error), scales.across(point.x + point.x_error)
    return Box(x, up, x, down), Box(left, y, right, y)


def _mark(point: Point, scales: Scales) -> Mark:
    x, y = scales.across(point.x), scales.down(point.kl)
    upright, level = _bars(point, scales)
    bodies = (
        Box(x - RADIUS - 3, y - RADIUS - 2, x + RADIUS + 3, y + RADIUS + 2),
        Box(upright.left - 3, upright.top, upright.right + 3, upright.bottom),
        Box(level.left, level.top - 3, level.right, level.bottom + 3),
    )
    return Mark(point.name if point.kl > SAME else f"{point.name}, a copy", x, y, bodies)


def _point(point: Point, plane: Plane, scales: Scales, kind: str) -> Iterator[str]:
    x, y = scales.across(point.x), scales.down(point.kl)
    upright, level = _bars(point, scales)
    told = f"{point.name}: KL {point.kl:.3g} ± {point.kl_error:.1g}, {_amount(point.x, plane)}"
    yield f"<g><title>{escape(told)}</title>"
    yield (
        f'<path class="{kind}" d="M{x:.1f} {upright.top:.1f}V{upright.bottom:.1f}M{x - 3:.1f} {upright.top:.1f}h6'
        f'M{x - 3:.1f} {upright.bottom:.1f}h6M{level.left:.1f} {y:.1f}H{level.right:.1f}"/>'
    )
    yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"/></g>'


def _name(mark: Mark, box: Box, kind: str) -> Iterator[str]:
    x, y = box.nearest(mark.x, mark.y)
    gap = math.hypot(x - mark.x, y - mark.y)
    if gap > LED + RADIUS:
        share = (RADIUS + 1) / gap
        from_x, from_y = mark.x + share * (x - mark.x), mark.y + share * (y - mark.y)
        yield f'<path class="lead" d="M{from_x:.1f} {from_y:.1f}L{x:.1f} {y:.1f}"/>'
    yield _text((box.left + box.right) / 2, box.bottom - 4, mark.name, f"name {kind}", "middle")


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'
