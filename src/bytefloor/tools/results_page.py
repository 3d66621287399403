"""The page that says what each committed file of results is."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytefloor.tools.markdown import markdown

KINDS = {
    "decode": "tokens a second",
    "prompt": "prompts",
    "serve": "loads over HTTP",
    "kernel": "kernels alone",
    "kernel_rows": "products of many rows",
    "perplexity": "perplexity and divergence",
    "frontier": "recipes of one model",
    "eviction": "prompts that are cut",
}
"""What rows of each verb are."""
HEADINGS = ("file", "what", "of", "card", "date", "commit", "shown in")
HEAD = """# Results

Every file of measurements, as `--save` or a test wrote it. `python -m bytefloor.tools.tables` makes this page, the
tables of README and docs, and the plots beside these files; a test compares. *shown in*: pages that have a table of its
rows, or name it. A plus behind a commit: the checkout had changes.

"""
_NAMED = re.compile(r"[\w.-]+\.json")
_MOST = 4


def make_results_page(folder: Path, tabled: Mapping[str, set[Path]], pages: Mapping[Path, str]) -> str:
    """tabled: by file name the pages with a table that has rows of it. pages: all texts that may name a file.

    ValueError for a file of which nobody knows what it is.
    """
    named = {page: set(_NAMED.findall(text)) for page, text in pages.items()}
    lines = []
    for path in sorted(folder.glob("*.json")):
        told = {page for page, names in named.items() if path.name in names}
        shown = sorted(page.name for page in told | tabled.get(path.name, set()))
        lines.append((f"[{path.name}]({path.name})", *_describe(path), ", ".join(shown)))
    return HEAD + markdown(HEADINGS, lines)


def _describe(path: Path) -> tuple[str, ...]:
    content = json.loads(path.read_text())
    if isinstance(content, dict) and "steps" in content:
        what = f"a profile of {len(content['steps'])} steps, launch by launch"
        return what, content["model"], *(str(content[key]) for key in ("card", "date", "commit"))
    if isinstance(content, dict):
        return content["what"], content["model"], content["card"], "", ""
    kinds = Counter(row["verb"] for row in content)
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ValueError(f"{path}: rows of {', '.join(unknown)}, expected {', '.join(KINDS)}")
    what = ", ".join(f"{KINDS[verb]} ({n} {'row' if n == 1 else 'rows'})" for verb, n in kinds.items())
    return what, _few(content, "model", "shape"), *(_few(content, key) for key in ("card", "date", "commit"))


def _few(rows: list[dict[str, Any]], *keys: str) -> str:
    """The values of the first key that rows have, in order; the first few where there are many."""
    key = next(key for key in keys if key in rows[0])
    found = list(dict.fromkeys(str(row[key]) for row in rows if row[key] is not None))
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more
