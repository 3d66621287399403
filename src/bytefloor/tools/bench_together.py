"""Several sequences that decode together: what ``bench -b`` times, and what proves that it times the right thing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.errors import NumericalError, RequestError
from bytefloor.ops.pages import randomise
from bytefloor.tools.bench_rows import say

CHECKED = 8
"""Tokens of each measurement that are compared with launching kernel by kernel."""
FIRST_TOKEN = 5
Executor = DeviceExecutor | ReferenceExecutor


class Together:
    """n sequences at a depth, each with a first token of its own."""

    def __init__(self, executor: Executor, depth: int, n: int) -> None:
        self._executor, self._depth = executor, depth
        pools = make_pools(executor.plan, executor.step.kinds)
        self._caches = [SequenceCache(executor.plan, executor.step.kinds, pools) for _ in range(n)]
        for cache in self._caches:
            fill_to(cache, depth)

    def check(self) -> None:
        """On a device: NumericalError where a sequence's first tokens are not those it gets alone, kernel by kernel."""
        if not isinstance(self._executor, DeviceExecutor):
            return
        tokens, alone = (
            self._decode(CHECKED),
            [launched(self._executor, cache, FIRST_TOKEN + i) for i, cache in enumerate(self._caches)],
        )
        if min(map(min, tokens)) < 0 or tokens != alone:
            raise NumericalError(f"depth {self._depth}: tokens {tokens} together, {alone} alone: a kernel is wrong")

    def measure(self, n_tokens: int, repeats: int) -> Iterator[tuple[float, list[int]]]:
        """(tokens a second of all sequences, the tokens of one after another) of each repeat."""
        self._decode(n_tokens)
        for _ in range(repeats):
            start = now(self._executor.device)
            tokens = self._decode(n_tokens)
            rate = len(tokens) * n_tokens / (now(self._executor.device) - start)
            yield rate, [token for own in tokens for token in own]

    def _decode(self, n_tokens: int) -> list[list[int]]:
        """Best tokens in a row of each sequence, whose caches keep none of them."""
        batch = Batch()
        for i, cache in enumerate(self._caches):
            cache.append_rows(batch, [FIRST_TOKEN + i], [0], n_reserved=n_tokens)
        if isinstance(self._executor, DeviceExecutor):
            return self._executor.decode_greedy_together(batch, n_tokens).tolist()
        found: list[list[int]] = [[] for _ in self._caches]
        for _ in range(n_tokens):
            batch.tokens = self._executor.run(batch).argmax(-1).tolist()
            batch.slots = batch.positions = [slot + 1 for slot in batch.slots]
            for own, token in zip(found, batch.tokens, strict=True):
                own.append(token)
        return found


def launched(executor: DeviceExecutor, cache: SequenceCache, token: int) -> list[int]:
    """The CHECKED best tokens in a row after a token at the cache's end, which keeps none, kernel by kernel."""
    batch, found = Batch(), list[int]()
    cache.append_rows(batch, [token], [0], n_reserved=CHECKED)
    for _ in range(CHECKED):
        found.append(int(executor.run(batch, is_eager=True)[0].argmax()))
        batch.tokens, batch.copies = [found[-1]], []
        batch.slots = batch.positions = [batch.slots[0] + 1]
    return found


def those_that_fit_together(executor: Executor, batches: Sequence[int], n_tokens: int) -> list[int]:
    """Numbers of sequences that one step can have; the others are named.

    RequestError where sequences would make more tokens in a row than sliding layers have room for.
    """
    most = max(executor.batch_sizes, default=1) if isinstance(executor, DeviceExecutor) else max(batches, default=1)
    say([f"{n} sequences together are left out: at most {most} share a step here" for n in batches if n > most])
    if max(batches, default=1) > 1 and n_tokens > executor.plan.chunk:
        raise RequestError(f"-n {n_tokens}: expected at most {executor.plan.chunk} with several sequences")
    return [n for n in batches if n <= most]


def fill_to(cache: SequenceCache, depth: int) -> None:
    """Take pages up to a depth, as if all before it had been written."""
    while cache.length < depth:
        n = min(64, depth - cache.length)
        cache.reserve(n)
        cache.commit(n)


def randomise_cache(executor: Executor) -> None:
    """Random values in every page, which cost the same to read as any."""
    generator = torch.Generator(executor.device).manual_seed(1)
    for kind in executor.step.kinds:
        randomise(executor.pools[kind.name], kind.head_size, kind.storage, generator)


def now(device: torch.device) -> float:
    """Seconds, when all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
