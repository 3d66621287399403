"""docs/formats.md names every record, so that a format cannot be added without saying what it means."""

from __future__ import annotations

import re
from pathlib import Path

from bytefloor.formats import FORMATS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "formats.md"


def test_every_format_is_documented() -> None:
    words = set(re.split(r"[\s,|`]+", DOCUMENT.read_text()))
    assert sorted(set(FORMATS) - words) == []
