"""``frontier`` for people: rows as they come, the front at the end, the plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bytefloor.errors import RequestError
from bytefloor.tools.bench_rows import RowWriter
from bytefloor.tools.front import plane_of
from bytefloor.tools.frontier_plot import draw
from bytefloor.tools.frontier_rows import FAILED, FrontierRow, told_source
from bytefloor.tools.outputs import check_output


def check_plot(plot: Path | None) -> None:
    """RequestError for a name or a place that no plot can have; before anything is measured."""
    if plot is None:
        return
    if plot.suffix != ".svg":
        raise RequestError(f"--plot {plot}: expected a name that ends in .svg")
    if not plot.parent.is_dir():
        raise RequestError(f"--plot {plot}: there is no folder {plot.parent}")
    check_output(plot, b"<svg ", "a plot")


def show(rows: Iterator[FrontierRow], save: Path | None, plot: Path | None) -> int:
    """Each row as it is measured, kept at once and drawn anew. The exit status: 1 where a recipe failed."""
    writer = RowWriter("md", save)
    kept: list[dict[str, Any]] = []
    for row in rows:
        writer.add(row)
        kept.append(asdict(row))
        if plot is not None and plane_of(kept).points:
            plot.write_text(draw(kept), encoding="utf-8")
    print("\n" + "\n".join(last_lines(kept)))
    return 1 if any(row["state"] == FAILED for row in kept) else 0


def last_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The front, and what its numbers are of."""
    plane, first = plane_of(rows), rows[0]
    measure = "tokens a second" if plane.is_speed else "bytes of weights that a token reads"
    lines = [f"KL is to {told_source(first)}"]
    if plane.points:
        lines.append(f"on the front of KL and {measure}: {', '.join(point.name for point in plane.front)}")
    if plane.left_out:
        lines.append(f"without kernels, so not compared in speed: {', '.join(plane.left_out)}")
    if not plane.is_speed:
        lines.append("the reference executor multiplies in float32: its tokens a second say nothing of a format")
    return lines
