"""The tables of the README, made from the committed results: ``python -m bytefloor.tools.tables`` rewrites them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results"
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"
HEADINGS = ("model", "depth", "tok/s", "share of the floor", "card", "date")


def load_rows(folder: Path) -> list[dict[str, Any]]:
    """Decoding rows of every committed bench file, in the order of the files."""
    rows = [row for path in sorted(folder.glob("bench*.json")) for row in json.loads(path.read_text())]
    return [row for row in rows if row["verb"] == "decode"]


def make_table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line a row."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    for row in rows:
        cells = (
            row["model"],
            f"{row['depth']:,}",
            f"{row['tok_s']:.0f}",
            f"{row['share']:.1%}",
            row["card"],
            row["date"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str:
    """The text with what stands between the markers replaced."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table + END + rest.split(END)[1]


def main() -> None:
    """Rewrite the README."""
    README.write_text(with_table(README.read_text(), make_table(load_rows(RESULTS))))


if __name__ == "__main__":
    main()
