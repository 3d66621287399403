"""Has an answer begun to repeat itself without end?"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_REPEATS = 4
MIN_SPAN = 128
"""Tokens that must repeat before it counts: a table's ruler or a row of zeros is shorter."""


def is_looping(ids: Sequence[int]) -> bool:
    """True if the last MIN_SPAN tokens or more are one n-gram of up to MAX_PERIOD tokens, four times or more."""
    for period in range(1, MAX_PERIOD + 1):
        span = max(MIN_SPAN, MIN_REPEATS * period)
        if len(ids) < span or ids[-1] != ids[-1 - period]:
            continue
        if all(ids[-i] == ids[-i - period] for i in range(1, span - period + 1)):
            return True
    return False
