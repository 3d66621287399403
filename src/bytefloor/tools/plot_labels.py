"""Where the names of points go in a plot, such that none covers another, a point or its error bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CHARACTER, LINE = 6.9, 15.0
"""Pixels that a character of 12 pixels takes at most on average, and a line."""
REACHES = (5.0, 10.0, 18.0, 28.0, 42.0, 58.0, 78.0, 100.0)
"""How far from its point a name may be, in pixels: nearer is better."""
LED = 8.0
"""Farther than this a line leads from the point to its name."""
_DIRECTIONS = 16
_ROUNDS = 12
_ON_A_NAME, _ON_A_BODY, _LINE_IN_A_NAME = 50.0, 5.0, 40.0


@dataclass(frozen=True)
class Box:
    """Pixels, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: Box) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)

    def holds(self, other: Box) -> bool:
        """Whether the other lies within."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The place in the box that is nearest to a point."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


@dataclass(frozen=True)
class Mark:
    """A point with a name. body: what of the plot it covers, error bars included."""

    name: str
    x: float
    y: float
    bodies: tuple[Box, ...]


def place(marks: Sequence[Mark], frame: Box, lines: Sequence[Box] = ()) -> list[Box]:
    """A box for each name, within the frame: each by turns where it disturbs least, until none wants to move.

    lines: what of the plot names should not lie on either.
    """
    bodies = [*lines, *(body for mark in marks for body in mark.bodies)]
    places = [
        [(box, far + _ON_A_BODY * sum(map(box.shared, bodies))) for box, far in _places(mark, frame)] for mark in marks
    ]
    chosen: list[Box | None] = [None] * len(marks)
    for _ in range(_ROUNDS):
        before = list(chosen)
        for i, mark in enumerate(marks):
            others = [(marks[j], box) for j, box in enumerate(chosen) if j != i and box is not None]
            _, chosen[i] = min(((own + _harm(mark, box, others), box) for box, own in places[i]), key=lambda at: at[0])
        if chosen == before:
            break
    return [box for box in chosen if box is not None]


def _places(mark: Mark, frame: Box) -> Iterator[tuple[Box, float]]:
    """Boxes that the frame holds, and how far each is."""
    width = len(mark.name) * CHARACTER
    for reach in REACHES:
        for i in range(_DIRECTIONS):
            angle = 2 * math.pi * i / _DIRECTIONS
            x = mark.x + math.cos(angle) * (reach + width / 2 + 4)
            y = mark.y + math.sin(angle) * (reach + LINE / 2 + 4)
            box = Box(x - width / 2, y - LINE / 2, x + width / 2, y + LINE / 2)
            if frame.holds(box):
                yield box, reach


def _harm(mark: Mark, box: Box, others: Sequence[tuple[Mark, Box]]) -> float:
    """What a name does to other names and their lines there."""
    harm = sum(_ON_A_NAME * box.shared(name) for _, name in others)
    own = _line(mark, box)
    for other, name in others:
        harm += _LINE_IN_A_NAME * sum(name.nearest(*at) == at for at in own)
        harm += _LINE_IN_A_NAME * sum(box.nearest(*at) == at for at in _line(other, name))
    return harm


def _line(mark: Mark, box: Box) -> list[tuple[float, float]]:
    """Places on the line from a point to its name, the point itself left out."""
    x, y = box.nearest(mark.x, mark.y)
    return [(mark.x + (x - mark.x) * i / 8, mark.y + (y - mark.y) * i / 8) for i in range(1, 8)]
