"""Prefixes whose keys and values are still there, so that a prompt which begins alike is not computed again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from bytefloor.engine.cache import SequenceCache

STRETCH = 256
"""Tokens that are compared at once: a queue asks at every step, and whole stretches are compared much faster."""


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many leading tokens are the same."""
    end, n = min(len(a), len(b)), 0
    while n < end and a[n : n + STRETCH] == b[n : n + STRETCH]:
        n += STRETCH
    while n < end and a[n] == b[n]:
        n += 1
    return min(n, end)


class PrefixStore:
    """At most ``n_entries`` caches of token sequences, the least recently used given up first.

    Sliding layers can only be rewound while their window is held. A sequence is therefore stored twice: at the end of
    its prompt and at its end. Templates that drop old thinking diverge exactly where the prompt ended.
    """

    def __init__(self, n_entries: int) -> None:
        self._n_entries = n_entries
        self._entries: OrderedDict[tuple[int, ...], SequenceCache] = OrderedDict()

    def put(self, ids: Sequence[int], cache: SequenceCache) -> None:
        """Takes ownership of the cache, which holds exactly these ids. One that has dropped positions is no prefix:
        what it keeps was chosen for what came behind them."""
        key = tuple(ids)
        if not key or self._n_entries == 0 or cache.dropped:
            cache.free()
            return
        old = self._entries.pop(key, None)
        if old is not None:
            old.free()
        cache.keep()
        self._entries[key] = cache
        while len(self._entries) > self._n_entries:
            self.evict()

    def evict(self) -> bool:
        """Give up the least recently used entry; False when there is none."""
        if not self._entries:
            return False
        _, cache = self._entries.popitem(last=False)
        cache.free()
        return True

    def find(self, ids: Sequence[int]) -> SequenceCache | None:
        """A fork of the cache with the longest usable prefix of ``ids``, rewound to it.

        At least one token is left to compute, since its logits are wanted.
        """
        wanted, best, best_length = tuple(ids), None, 0
        for key, cache in self._entries.items():
            usable = min(common_length(key, wanted), len(ids) - 1)
            if usable > best_length and cache.can_rewind(usable):
                best, best_length = key, usable
        if best is None:
            return None
        self._entries.move_to_end(best)
        twin = self._entries[best].fork()
        twin.rewind(best_length)
        return twin
