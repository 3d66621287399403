"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence

from bytefloor.errors import RequestError


class StopMatcher:
    """Lets text through up to the first stop string that becomes complete, however the text is cut into pieces.

    "First" is by where the stop string ends, the longest of those that end together: so a stream and a whole text
    agree. What may be the beginning of a stop string waits; a token costs the same however long the reply is.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None  # the stop string that became complete
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty: it would end every reply before its first character")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain to come before any stop string, whether a stop string is complete)."""
        if self.found is not None:
            return "", True
        if not self._stops:
            return text, False
        held = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self.found = held[start:end]
            self._held = ""
            return held[:start], True
        n_held = max(n_begun(held, stop) for stop in self._stops)
        cut = len(held) - n_held
        self._held = held[cut:]
        return held[:cut], False

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def n_begun(text: str, wanted: str) -> int:
    """Length of the longest end of `text` that `wanted` begins with."""
    at = text.find(wanted[:1], max(0, len(text) - len(wanted) + 1))
    while at >= 0:
        if wanted.startswith(text[at:]):
            return len(text) - at
        at = text.find(wanted[0], at + 1)
    return 0
