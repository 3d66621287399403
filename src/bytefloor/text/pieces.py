"""Text that comes piece by piece, for parsers written as if it were all there.

A parser is a generator: where it needs text that has not come yet it yields, and goes on when it is resumed. So its
code has the shape of the grammar, and where a text was cut cannot make a difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
#: A parser, or a part of one, that returns a T.
Steps: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], object]

#: White space as JSON knows it.
SPACES = re.compile(r"[ \t\r\n]*")


class MalformedError(Exception):
    """What came is not what the grammar says. Never leaves the reply's splitter."""


class Pieces:
    """What has come and was not read yet, and a record of what was read since `mark`."""

    def __init__(self) -> None:
        self.is_over = False  # nothing more will come
        self._text = ""
        self._at = 0
        self._record: list[str] = []

    @property
    def rest(self) -> str:
        """Text that has come and was not read."""
        return self._text[self._at :]

    def feed(self, text: str) -> None:
        """More text."""
        if self._at:
            self._record.append(self._text[: self._at])
        self._text = self.rest + text
        self._at = 0

    def skip(self, n: int) -> None:
        """Reads n letters that have come."""
        self._at += n

    def mark(self) -> None:
        """The record begins here."""
        self._record = []
        self._text = self.rest
        self._at = 0

    def read_since_mark(self) -> str:
        """All that was read since the mark."""
        return "".join([*self._record, self._text[: self._at]])

    def taken_back(self) -> str:
        """What was not read, which is then no longer here."""
        rest = self.rest
        self._text = self._text[: self._at]
        return rest

    # --- parsers ---

    def peek(self) -> Steps[str]:
        """The next letter, unread; empty at the end."""
        while self._at >= len(self._text) and not self.is_over:
            yield
        return self._text[self._at : self._at + 1]

    def next(self) -> Steps[str]:
        """The next letter; empty at the end."""
        letter = yield from self.peek()
        self._at += len(letter)
        return letter

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """As many letters as the pattern, one letter's class repeated, matches; each piece goes to the sink at once."""
        while True:
            found = pattern.match(self._text, self._at)
            if found and found.end() > self._at:
                sink(found.group())
                self._at = found.end()
            if self._at < len(self._text) or self.is_over:
                return
            yield

    def word(self, pattern: re.Pattern[str], most: int, what: str) -> Steps[str]:
        """The letters that `run` finds, put together; at most `most`."""
        found: list[str] = []

        def add(text: str) -> None:
            found.append(text)
            if sum(map(len, found)) > most:
                raise MalformedError(f"{what} has more than {most} letters")

        yield from self.run(pattern, add)
        return "".join(found)

    def expect(self, wanted: str) -> Steps[None]:
        """Exactly this text."""
        for letter in wanted:
            found = yield from self.peek()
            if found != letter:
                raise MalformedError(f"expected {wanted!r}, found {shown(found)}")
            self._at += 1

    def space(self, sink: Sink) -> Steps[None]:
        """White space, if there is any."""
        yield from self.run(SPACES, sink)

    def accepts(self, wanted: str, between: re.Pattern[str] = SPACES) -> Steps[bool]:
        """Whether `wanted` follows, perhaps after what `between` matches. Read if so, untouched if not.

        At the end its beginning is enough: the rest was cut off.
        """
        while True:
            found = between.match(self._text, self._at)
            start = found.end() if found else self._at
            follows = self._text[start:]
            if follows.startswith(wanted):
                self._at = start + len(wanted)
                return True
            if not wanted.startswith(follows):
                return False
            if self.is_over:
                if follows:
                    self._at = len(self._text)
                return bool(follows)
            yield


def shown(letter: str) -> str:
    """A letter for an error's message."""
    return repr(letter) if letter else "the end of the answer"


def ignore(_: str) -> None:
    """A sink that keeps nothing."""
