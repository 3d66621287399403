"""Keeps what people type from becoming a control token, through whatever a template does with it.

Before rendering, each control token spelled in a string of theirs is broken by a marker that occurs nowhere else.
After rendering, an unbroken control token therefore comes from the template, and the markers are taken out again.
Text without such spellings is untouched, so that templates may test and cut it as they like.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bytefloor.errors import RequestError

_PRIVATE_USE = range(0xE000, 0xF900)


class Shield:
    """Breaks and mends the given spellings."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = {spelling for spelling in spellings if spelling}
        self._lengths = sorted({len(spelling) for spelling in self._spellings})
        self._firsts = {spelling[0] for spelling in self._spellings}
        self._sorted = sorted(self._spellings)
        self._reversed = sorted(spelling[::-1] for spelling in self._spellings)

    def marker(self, *values: Any) -> str:
        """A character that occurs in none of the values."""
        used = {letter for text in _strings(values) for letter in text if "\ue000" <= letter <= "\uf8ff"}
        for code in _PRIVATE_USE:
            if chr(code) not in used:
                return chr(code)
        raise RequestError("the messages use every private-use character there is; one of them must stay free")

    def broken(self, value: Any, marker: str) -> Any:
        """The value with every string in it broken, keys included."""
        if isinstance(value, str):
            return self._broken_text(value, marker)
        if isinstance(value, Mapping):
            return {self.broken(key, marker): self.broken(item, marker) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.broken(item, marker) for item in value]
        return value

    def _broken_text(self, text: str, marker: str) -> str:
        cuts = {at + 1 for at in self._starts(text)}
        # A spelling may also come together out of two strings that a template puts side by side.
        cuts |= self._head_cut(text) | self._tail_cut(text)
        pieces: list[str] = []
        position = 0
        for cut in sorted(cuts):
            pieces += [text[position:cut], marker]
            position = cut
        return "".join([*pieces, text[position:]])

    def _starts(self, text: str) -> Iterator[int]:
        """Where a spelling begins, overlapping ones included."""
        for first in self._firsts:
            at = text.find(first)
            while at >= 0:
                if any(text[at : at + length] in self._spellings for length in self._lengths):
                    yield at
                at = text.find(first, at + 1)

    def _tail_cut(self, text: str) -> set[int]:
        """Behind the first letter of an end that begins a spelling."""
        for length in range(min(len(text), self._longest() - 1), 0, -1):
            if text[-length] in self._firsts and _begins_one(text[-length:], self._sorted):
                return {len(text) - length + 1}
        return set()

    def _head_cut(self, text: str) -> set[int]:
        """Before a beginning that ends a spelling. A beginning of a mere word is left alone: it may be a key."""
        for length in range(1, min(len(text), self._longest() - 1) + 1):
            if not text[:length].isalnum() and _begins_one(text[:length][::-1], self._reversed):
                return {0}
        return set()

    def _longest(self) -> int:
        return self._lengths[-1] if self._lengths else 0


def _begins_one(text: str, ordered: list[str]) -> bool:
    at = bisect_left(ordered, text)
    return at < len(ordered) and ordered[at].startswith(text)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
