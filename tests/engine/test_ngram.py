"""Proposals from a text's own past, against a search that looks at everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytefloor.engine.ngram import LONGEST, SHORTEST, NgramIndex


def searched(ids: list[int], n_most: int) -> list[int]:
    """The same by looking: every length, every place, the latest first."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if len(ids) > n and ids[start : start + n] == ids[len(ids) - n :]:
                text = list(ids)
                for _ in range(n_most):
                    text.append(text[start + n + len(text) - len(ids)])
                return text[len(ids) :]
    return []


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 20), st.lists(st.integers(0, 3), max_size=8))
def test_the_index_finds_what_a_search_finds(text: list[int], n_most: int, early: list[int]) -> None:
    """At every length of a growing text, whatever was taken in before and how often it is asked."""
    ids: list[int] = []
    index = NgramIndex(ids)
    for token in text:
        ids.append(token)
        if len(ids) in early:
            index.take_in(len(ids) // 2)
        assert index.propose(n_most) == searched(ids, n_most)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 16))
def test_an_index_asked_only_at_the_end_finds_the_same(text: list[int], n_most: int) -> None:
    assert NgramIndex(text).propose(n_most) == searched(text, n_most)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 1], []),
        ([1, 1, 1], [1, 1, 1, 1, 1]),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3, 1]),
        # The longest suffix decides, not the latest place; of places, the latest.
        ([9, 1, 2, 3, 7, 1, 2, 8, 1, 2, 6, 9, 1, 2], [3, 7, 1, 2, 8]),
        ([1, 2, 7, 1, 2, 8, 5, 1, 2], [8, 5, 1, 2, 8]),
        # Five tokens that match count as four: the latest of them.
        ([0, 1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4], [6, 0, 1, 2, 3]),
        ([1, 2, 3, 4, 5, 4], []),
    ],
)
def test_case_by_case(text: list[int], expected: list[int]) -> None:
    assert NgramIndex(text).propose(5) == expected


class CountedList(list[int]):
    """n_read: items and slices that were read."""

    n_read = 0

    def __getitem__(self, place):
        self.n_read += 1
        return super().__getitem__(place)


def test_a_step_costs_the_same_whatever_the_length() -> None:
    rng = random.Random(1)
    ids = CountedList(rng.choices(range(5), k=20_000))
    index = NgramIndex(ids)
    index.propose(8)
    most = 0
    for _ in range(100):
        ids.append(rng.randrange(5))
        ids.n_read = 0
        assert len(index.propose(8)) == 8
        most = max(most, ids.n_read)
    assert most <= 2 * (LONGEST - SHORTEST + 1) + 8
