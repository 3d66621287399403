"""What the history of a request takes from the logits: repetition, presence, frequency, DRY.

Both classes are updated one token at a time, so that a long history costs a step little.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bytefloor.engine.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_DRY_GROWTH_LOG_MAX = 230.0
"""DRY's base ** excess stops at e^230, about 1e100: far past any logit, and finite in float64."""


class TokenCounts:
    """How often each token occurs among the last `window` tokens added; 0 counts none, -1 all."""

    def __init__(self, window: int, ids: Sequence[int] = ()) -> None:
        self._window = window
        self._recent: deque[int] = deque()
        self._counts: dict[int, int] = {}
        # From the end: the first tokens of a long prompt are the ones to forget.
        for token in ids[-window:] if window > 0 else ids:
            self.add(token)

    def add(self, token: int) -> None:
        if self._window == 0:
            return
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._window > 0:
            self._recent.append(token)
            if len(self._recent) > self._window:
                self._forget(self._recent.popleft())

    def _forget(self, token: int) -> None:
        self._counts[token] -= 1
        if self._counts[token] == 0:
            del self._counts[token]

    def ids_and_counts(self) -> tuple[Ids, Ids]:
        n = len(self._counts)
        return np.fromiter(self._counts.keys(), np.int64, n), np.fromiter(self._counts.values(), np.int64, n)


class Repeats:
    """For each place in the history, how many tokens just before it equal the tokens at the history's end.

    `_match[j]` is the length of the common suffix of ids[:j] and ids[:n]. Appending x turns every match that x
    continues into one longer by one, and all others into 0, so a step is one pass over the window.
    """

    def __init__(self, ids: Sequence[int], window: int, breakers: Sequence[Sequence[int]]) -> None:
        self._window = window
        self._breakers: dict[int, list[Sequence[int]]] = {}
        for breaker in breakers:
            self._breakers.setdefault(breaker[-1], []).append(breaker)
        # Before the window as much is kept as a breaker that ends in it may reach back.
        kept = window + max((len(breaker) - 1 for breaker in breakers), default=0)
        history = list(ids[-kept:] if window > 0 else ids) if window else []
        self._n = n = len(history)
        self._ids: Ids = np.zeros(max(256, 2 * n), np.int64)
        self._match: Ids = np.zeros(max(256, 2 * n), np.int64)
        self._ids[:n] = history
        self._match[1:n] = suffix_matches(history)
        # Where the last breaker ends: the newest match starts no earlier.
        self._start = next((end for end in range(n, 0, -1) if self._is_break(end)), 0)

    def add(self, token: int) -> None:
        if self._window == 0:
            return
        if self._n == len(self._ids):
            self._ids, self._match = (np.concatenate([a, np.zeros_like(a)]) for a in (self._ids, self._match))
        low, n = self._low, self._n
        grown = np.where(self._ids[low:n] == token, self._match[low:n] + 1, 0)
        self._match[low + 1 : n + 1] = grown
        self._ids[n] = token
        self._n = n + 1
        if self._is_break(self._n):
            self._start = self._n

    def longest(self, at_least: int) -> tuple[Ids, Ids]:
        """The tokens that followed an earlier copy of the end, each with its longest such copy of `at_least` or more.

        A copy may overlap the end itself; it reaches neither out of the window nor across a breaker, which counts also
        where it began before the window.
        """
        low, n = self._low, self._n
        if n - self._start < at_least:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        room = np.minimum(np.arange(1, n - low), n - self._start)
        length = np.minimum(self._match[low + 1 : n], room)
        place = np.flatnonzero(length >= at_least)
        tokens, group = np.unique(self._ids[low + 1 + place], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, group, length[place])
        return tokens, longest

    @property
    def _low(self) -> int:
        return max(0, self._n - self._window) if self._window > 0 else 0

    def _is_break(self, end: int) -> bool:
        candidates = self._breakers.get(int(self._ids[end - 1]), ())
        return any(self._ids[max(0, end - len(b)) : end].tolist() == list(b) for b in candidates)


def suffix_matches(ids: Sequence[int]) -> list[int]:
    """For j in 1..n-1, the length of the common suffix of ids[:j] and ids: the Z function of the reversed list.

    Linear in n, where comparing at each place would be quadratic on a prompt that repeats itself.
    """
    back = ids[::-1]
    n = len(back)
    z = [0] * n
    left = right = 0
    for i in range(1, n):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < n and back[length] == back[i + length]:
            length += 1
        if i + length > right:
            left, right = i, i + length
        z[i] = length
    return z[:0:-1]


class Penalties:
    """All that one request's history does to its logits, in the documented order."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        # Repetition looks at the prompt too; presence and frequency are about what was written (OpenAI, vLLM).
        self._seen = TokenCounts(params.penalty_window, prompt_ids) if params.repetition_penalty != 1 else None
        is_counting = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._written = TokenCounts(params.penalty_window) if is_counting else None
        is_dry = params.dry_multiplier > 0
        self._repeats = Repeats(prompt_ids, params.dry_window, params.dry_breakers) if is_dry else None

    def add(self, token: int) -> None:
        for part in (self._seen, self._written, self._repeats):
            if part is not None:
                part.add(token)

    def apply(self, logits: Floats) -> None:
        """Changes `logits` in place; -inf stays -inf."""
        p = self._params
        if self._seen is not None:
            ids, _ = self._seen.ids_and_counts()
            seen = logits[ids]
            # Dividing a negative logit would reward the token.
            logits[ids] = np.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        if self._written is not None:
            ids, counts = self._written.ids_and_counts()
            logits[ids] -= p.presence_penalty + p.frequency_penalty * counts
        if self._repeats is not None:
            ids, lengths = self._repeats.longest(p.dry_allowed_length)
            growth = np.minimum((lengths - p.dry_allowed_length) * np.log(p.dry_base), _DRY_GROWTH_LOG_MAX)
            logits[ids] -= p.dry_multiplier * np.exp(growth)
