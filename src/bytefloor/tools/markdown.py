"""Tables in Markdown, and the places between marks where they go."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "Not measured yet.\n"


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    head = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in lines)]) + "\n"


def with_table(text: str, name: str, table: str) -> str:
    """The text with what stands between the markers of that name replaced."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    head, rest = text.split(begin)
    return head + begin + table + end + rest.split(end)[1]
