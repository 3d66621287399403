"""Has an answer begun to repeat itself without end?"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_REPEATS = 4
MIN_SPAN = 128
"""Tokens that must repeat before it counts: a table's ruler or a row of zeros is shorter."""


def is_looping(ids: Sequence[int], start: int = 0) -> bool:
    """True if the last MIN_SPAN tokens or more from start on are one n-gram of up to MAX_PERIOD tokens, four times or
    more."""
    n = len(ids) - start
    if n < MIN_SPAN:
        return False
    # Nearly every token ends here, or with a few that are looked at: this is asked after each.
    last, before = ids[-1], ids[-2 : -2 - MAX_PERIOD : -1]
    if last not in before:
        return False
    for period in [place for place, id in enumerate(before, 1) if id == last]:
        span = max(MIN_SPAN, MIN_REPEATS * period)
        if n >= span and all(ids[-i] == ids[-i - period] for i in range(2, span - period + 1)):
            return True
    return False
