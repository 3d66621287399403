"""Which recipes are worth having: those that no other beats in quality and speed at once.

Works on rows as they stand in a file, so that tables and plots of committed results are made by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bytefloor.tools.frontier_rows import MEASURED, SOURCE_ROW

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Point:
    """A recipe in the plot. x: tokens a second, or bytes that a token reads; x_error: half the spread of tokens a
    second. kl: mean, nats, and its standard error."""

    name: str
    x: float
    x_error: float
    kl: float
    kl_error: float


@dataclass(frozen=True)
class Plane:
    """All points of a file. is_speed: x is tokens a second of the kernels, where more is better; otherwise bytes, where
    less is. source_x: of the source itself, None where it has no such speed. left_out: measured, but without kernels,
    beside others that have them."""

    points: tuple[Point, ...]
    is_speed: bool
    source_x: float | None
    left_out: tuple[str, ...]

    @property
    def front(self) -> tuple[Point, ...]:
        """From the least divergence on."""
        return front_of(self.points, self.is_speed)


def plane_of(rows: Rows) -> Plane:
    """Tokens a second where any recipe ran on kernels, otherwise bytes."""
    measured = [row for row in rows if row["state"] == MEASURED]
    is_speed = any(row["executor"] == "kernels" for row in measured)
    drawn = [row for row in measured if row["executor"] == "kernels" or not is_speed]
    source = [row for row in rows if row["state"] == SOURCE_ROW and (row["executor"] == "kernels" or not is_speed)]
    left_out = tuple(row["recipe"] for row in measured if row not in drawn)
    points = tuple(_point(row, is_speed) for row in drawn)
    return Plane(points, is_speed, _x(source[0], is_speed)[0] if source else None, left_out)


def _point(row: dict[str, Any], is_speed: bool) -> Point:
    kl = row["divergence"]["kl"]
    return Point(row["recipe"], *_x(row, is_speed), kl["value"], kl["error"] or 0.0)


def _x(row: dict[str, Any], is_speed: bool) -> tuple[float, float]:
    if not is_speed:
        return float(row["token_bytes"]), 0.0
    (speed,) = (speed for speed in row["speeds"] if speed["depth"] == 0)
    return speed["tok_s"], speed["tok_s"] * (speed["tok_s_spread"] or 0.0) / 2


def front_of(points: Iterable[Point], is_speed: bool) -> tuple[Point, ...]:
    """Points that no other beats: is at least as good in both, and better in one. The least divergence first."""
    points = tuple(points)

    def cost(point: Point) -> tuple[float, float]:
        return -point.x if is_speed else point.x, point.kl

    def is_beaten(point: Point) -> bool:
        x, kl = cost(point)
        return any(a <= x and b <= kl and (a, b) != (x, kl) for a, b in map(cost, points))

    return tuple(sorted((point for point in points if not is_beaten(point)), key=lambda point: (point.kl, point.name)))
