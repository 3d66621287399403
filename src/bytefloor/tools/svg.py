"""Drawing: shapes as SVG text, scales, and labels that do not lie on each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

LETTER, LINE = 6.9, 15.0
"""Of a label of 12 pixels: the width of a letter, at most, and the height of a line."""
CLOSE, APART = 12, 4
"""Pixels from a point to its label, and from label to label."""


@dataclass(frozen=True)
class Scale:
    """From values to pixels, straight or by decades."""

    least: float
    most: float
    begin: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """A pixel."""
        if self.is_log:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return round(self.begin + share * (self.end - self.begin), 2)

    @property
    def ticks(self) -> list[float]:
        """Round values within it: decades, or steps of 1, 2 or 5."""
        if self.is_log:
            first, last = math.ceil(math.log10(self.least) - 1e-9), math.floor(math.log10(self.most) + 1e-9)
            return [10.0**i for i in range(first, last + 1)]
        step = round_step(self.most - self.least)
        first = math.ceil(self.least / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.most / step + 1e-9) + 1)]


def round_step(length: float) -> float:
    """1, 2 or 5 times a power of ten, up to eight of which make the length."""
    rough = length / 8
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line. anchor: start, middle or end."""
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def sideways(x: float, y: float, words: str) -> str:
    """A line from below to above, around its middle."""
    turned = f"translate({x:.1f} {y:.1f}) rotate(-90)"
    return f'<text transform="{turned}" text-anchor="middle" class="quiet">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """Straight from point to point."""
    return f'<path d="M{"L".join(f"{x:.2f} {y:.2f}" for x, y in points)}" class="{kind}"/>'


def bar(x: float, y: float, width: float, height: float, kind: str, told: str = "") -> str:
    """told: shown where a pointer rests on it."""
    size = f'x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{max(0.0, height):.2f}"'
    return f'<rect {size} class="{kind}">{_told(told)}</rect>'


def dot(x: float, y: float, radius: float, kind: str, told: str = "") -> str:
    return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" class="{kind}">{_told(told)}</circle>'


def _told(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def picture(width: int, height: float, label: str, shapes: Iterable[str]) -> str:
    """As wide as the page lets it be. label: for whoever does not see it."""
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(shapes)}</svg>'


def fits(words: str, width: float) -> bool:
    """Whether a label has room in so many pixels."""
    return len(words) * LETTER + 6 <= width


@dataclass
class Labels:
    """Puts labels where there is room, within (left, top, right, bottom)."""

    inside: tuple[float, float, float, float]
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)
    words: list[tuple[float, float, float, float]] = field(default_factory=list)

    def block(self, x: float, y: float, width: float, height: float) -> None:
        """Something else stands there."""
        self.taken.append((x, y, x + width, y + height))

    def block_path(self, points: Sequence[tuple[float, float]]) -> None:
        """A line stands there, from point to point."""
        for (x, y), (then_x, then_y) in pairwise(points):
            n = max(1, round(max(abs(then_x - x), abs(then_y - y)) / 8))
            for i in range(n + 1):
                self.block(x + (then_x - x) * i / n - 4, y + (then_y - y) * i / n - 4, 8, 8)

    def place(self, x: float, y: float, words: str, kind: str = "", is_led: bool = True) -> str:
        """Beside a point, above or below it; nothing where there is no room. is_led: by a thin line, from far."""
        width = len(words) * LETTER
        for far in (CLOSE, 22, 36):
            for left, middle in (
                (x + far, y), (x - far - width, y), (x - width / 2, y - far - 4), (x - width / 2, y + far + 4),
                (x + far * 0.7, y - far), (x + far * 0.7, y + far), (x - far * 0.7 - width, y - far),
                (x - far * 0.7 - width, y + far),
            ):  # fmt: skip
                box = (left, middle - LINE / 2, left + width, middle + LINE / 2)
                near = (min(max(x, box[0]), box[2]), min(max(y, box[1] + 3), box[3] - 3))
                leads = is_led and far > CLOSE
                if self._is_free(box) and not (leads and self._crosses_words((x, y), near)):
                    self.taken.append(box)
                    self.words.append(box)
                    return (line(x, y, *near, "leader") if leads else "") + text(left, middle + 4, words, kind)
        return ""

    def _crosses_words(self, begin: tuple[float, float], end: tuple[float, float]) -> bool:
        for i in range(10):
            x, y = (a + (b - a) * i / 10 for a, b in zip(begin, end, strict=True))
            if any(box[0] < x < box[2] and box[1] < y < box[3] for box in self.words):
                return True
        return False

    def _is_free(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = self.inside
        if box[0] < left or box[1] < top or box[2] > right or box[3] > bottom:
            return False
        left, top, right, bottom = box[0] - APART, box[1], box[2] + APART, box[3]
        return not any(left < t[2] and t[0] < right and top < t[3] and t[1] < bottom for t in self.taken)
