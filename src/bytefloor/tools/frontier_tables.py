"""The committed results of ``frontier`` as text: a section for each file, and the line for the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bytefloor.quantize.recipes import BUILT_IN
from bytefloor.quantize.target import PLAIN
from bytefloor.tools.front import plane_of
from bytefloor.tools.frontier_plot import draw
from bytefloor.tools.frontier_rows import FrontierRow, cells_of, small, told_source
from bytefloor.tools.markdown import MISSING, markdown

Rows = list[dict[str, Any]]
SPEEDS = ("tok/s", "share")


def load_frontiers(folder: Path) -> dict[str, Rows]:
    """The rows of each file, by its name without suffix."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("frontier*.json"))}


def make_plots(frontiers: dict[str, Rows]) -> dict[str, str]:
    """The plot of each file, by the plot's name."""
    return {f"{stem}.svg": draw(rows) for stem, rows in frontiers.items()}


def make_recipe_table() -> str:
    """The built-in recipes."""
    return markdown(("recipe", "words"), [(recipe.name, f"`{recipe.words}`") for recipe in BUILT_IN])


def make_frontier_sections(frontiers: dict[str, Rows]) -> str:
    """A plot and a table for each file."""
    if not frontiers:
        return MISSING
    return "\n".join(_section(stem, rows) for stem, rows in frontiers.items())


def _section(stem: str, rows: Rows) -> str:
    first = rows[0]
    measured = next(row for row in rows if row["n_predictions"])
    timed: list[dict[str, Any]] = next((row["speeds"] for row in rows if row["speeds"]), [])
    depths = " / ".join(f"{speed['depth']:,}" for speed in timed)
    speeds = f"; tok/s and share at a depth of {depths}" if plane_of(rows).is_speed else ""
    what = (
        f"{first['model']}: KL is to {told_source(first)}, over {measured['n_predictions']:,} predictions "
        f"({measured['n_windows']} x {measured['context']}); cache {measured['kv']}; {measured['executor']} "
        f"on {first['card']}, {first['date']}{speeds}."
    )
    return (
        f"### {first['source']}, {first['card']}\n\n{what}\n\n"
        f"![Quality of each recipe](results/{stem}.svg)\n\n{make_frontier_table(rows)}"
    )


def make_frontier_table(rows: Rows) -> str:
    """Markdown, the source first, then the nearest to it; what was not measured stands at the end with its reason.

    Where no kernels have run there are no speeds: those of the reference executor are in the file.
    """
    plane = plane_of(rows)
    on_front = {point.name for point in plane.front}
    headings = FrontierRow.COLUMNS
    shown = [i for i, heading in enumerate(headings) if plane.is_speed or heading not in SPEEDS]
    lines = []
    for row in sorted(rows, key=_nearness):
        cells = cells_of(row)
        own = [cells[i] for i in shown]
        lines.append((*own[:-1], "yes" if row["recipe"] in on_front else "", own[-1]))
    named = [headings[i] for i in shown]
    return markdown((*named[:-1], "front", named[-1]), lines)


def _nearness(row: dict[str, Any]) -> tuple[int, float]:
    if row["perplexity"] is None:
        return 2, 0.0
    return (0, 0.0) if row["divergence"] is None else (1, row["divergence"]["kl"]["value"])


def make_readme_part(frontiers: dict[str, Rows]) -> str:
    """A plot, and its front in a line. Originals go before files that are quantised already, then the longest front:
    a model whose token is launches and not bytes is as fast in any format, and its front is a point. Then kernels
    before the reference executor, the newest before all others of its kind."""
    if not frontiers:
        return MISSING
    stem, rows = max(frontiers.items(), key=_rank)
    plane = plane_of(rows)

    def told(name: str) -> str:
        row = next(row for row in rows if row["recipe"] == name)
        size = f"{row['bits_per_weight']:.1f} bits a weight"
        rate = f", {row['speeds'][0]['tok_s']:,.0f} tok/s" if plane.is_speed else ""
        return f"`{name}` ({size}{rate}, KL {small(row['divergence']['kl'])})"

    n_recipes, front = len(plane.points), plane.front
    line = (
        f"{told_source(rows[0])}, {rows[0]['card']}: {len(front)} of {n_recipes} recipes are on the front, from "
        f"{told(front[0].name)} to {told(front[-1].name)}. [docs/frontier.md](docs/frontier.md) has all of them."
    )
    return f"![Quality of each recipe](docs/results/{stem}.svg)\n\n{line}\n"


def _rank(item: tuple[str, Rows]) -> tuple[bool, int, bool, str, str]:
    stem, rows = item
    is_original, plane = set(rows[0]["source_formats"]) <= set(PLAIN), plane_of(rows)
    return is_original, len(plane.front), plane.is_speed, rows[0]["date"], stem
