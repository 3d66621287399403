"""A model whose memory is its pages: it keeps tokens in them, and what it says follows from what it finds there.

So an answer is right only if every page held, at every step, what its sequence wrote there. ``answer_of`` says what it
must be, from the tokens alone.
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from bytefloor.engine.batch import Batch, PageCopy
from bytefloor.engine.batch_loop import KNOWN
from bytefloor.engine.cache import NULL_PAGE, CachePlan
from bytefloor.engine.device_sampler import is_adjusted
from bytefloor.engine.request import Request
from bytefloor.engine.row_sampler import Draw
from bytefloor.engine.sampler import Sampled, Sampler
from bytefloor.model.step import CacheKind

N_TOKENS, N_ROWS = 29, 32
BANNED = frozenset({3, 4}) | frozenset(range(N_TOKENS, N_ROWS))
KINDS = (CacheKind("sliding", 1, 8, 6), CacheKind("wide", 1, 8, 13), CacheKind("global", 1, 8, None))
NOTHING = -7


def logits_of(seen: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits [V] from the tokens that the last position sees in each kind of layer."""
    key = zlib.crc32(b"|".join(np.asarray(tokens, np.int64).tobytes() for tokens in seen))
    return (2 * np.random.default_rng(key).normal(size=N_ROWS)).astype(np.float32)


def answer_of(request: Request, capacity: int) -> list[int]:
    """The request's answer, without pages, chunks or company. Its end tokens and stops are not looked at."""
    ids, sampler = list(request.prompt_ids), Sampler(request.sampling, request.prompt_ids, BANNED)
    answer: list[int] = []
    while len(answer) != request.max_tokens and len(ids) < capacity:
        seen = [ids if kind.window is None else ids[-kind.window :] for kind in KINDS]
        answer.append(sampler.sample(logits_of(seen), len(ids) - 1).id)
        ids.append(answer[-1])
    return answer


class TokenPages:
    """The executor. loops: whether it decodes one sequence ahead of the host. n_rows: how many it has computed.
    n_handed_back: how many of them the host was to choose again."""

    most_draft_rows = 16

    def __init__(self, plan: CachePlan, loops: bool = False) -> None:
        self.plan, self.loops, self.n_rows, self.n_handed_back = plan, loops, 0, 0
        self.step, self.device = SimpleNamespace(kinds=KINDS), torch.device("cpu")
        shape = plan.page_size, 2
        self.pools = {kind.name: np.full((plan.n_pages(kind), *shape), NOTHING, np.int64) for kind in KINDS}

    def make_loop(self) -> OneBehind | None:
        return OneBehind(self) if self.loops else None

    def make_batch_loop(self) -> OneBehindTogether | None:
        return OneBehindTogether(self) if self.loops else None

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V]. All rows are written before any is read, as a layer does it."""
        assert 0 < len(batch.tokens) <= self.plan.chunk
        self.copy(batch.copies)
        tables = [{name: rows[i] for name, rows in batch.tables.items()} for i in batch.sequence]
        for token, position, table in zip(batch.tokens, batch.positions, tables, strict=True):
            self.write(table, token, position)
        found = [self.read(tables[row], batch.positions[row]) for row in batch.wanted]
        return torch.from_numpy(np.array(found, np.float32).reshape(len(found), N_ROWS))

    def copy(self, copies: Sequence[PageCopy]) -> None:
        for one in copies:
            assert NULL_PAGE not in (one.source, one.target)
            self.pools[one.kind][one.target] = self.pools[one.kind][one.source]

    def write(self, table: dict[str, list[int]], token: int, position: int) -> None:
        self.n_rows += 1
        for name, pages in table.items():
            page = pages[position // self.plan.page_size % len(pages)]
            assert page != NULL_PAGE
            self.pools[name][page, position % self.plan.page_size] = token, position

    def read(self, table: dict[str, list[int]], position: int) -> np.ndarray:
        """Logits [V]; AssertionError where a page that is seen is not this sequence's any more."""
        seen = []
        for kind in KINDS:
            first = 0 if kind.window is None else max(0, position - kind.window + 1)
            places, pages = np.arange(first, position + 1), np.array(table[kind.name])
            assert len(pages) == self.plan.n_table(kind)
            in_ring = pages[places // self.plan.page_size % len(pages)]
            found = self.pools[kind.name][in_ring, places % self.plan.page_size]
            assert found[:, 1].tolist() == places.tolist()
            seen.append(found[:, 0])
        return logits_of(seen)


class OneBehindTogether:
    """What stands for BatchLoop, likewise. One row in eleven is handed back."""

    def __init__(self, executor: TokenPages) -> None:
        self._executor = executor
        self._drawn: list[Sampled] = []
        self.n_launched = self.n_rows = 0

    def can_serve(self, sampler: Sampler) -> bool:
        params = sampler.params
        return not is_adjusted(params) and params.dry_multiplier == 0 and params.mirostat_tau is None

    def copy(self, copies: Sequence[PageCopy]) -> None:
        self._executor.copy(copies)

    def launch(self, batch: Batch, draws: Sequence[Draw], sources: Sequence[int]) -> list[Sampled | None]:
        assert len(batch.tokens) == len(draws) == len(sources) == len(set(batch.sequence))
        assert batch.wanted == list(range(len(draws)))
        tokens = [
            token if source == KNOWN else self._drawn[source].id
            for token, source in zip(batch.tokens, sources, strict=True)
        ]
        logits = self._executor.run(replace(batch, tokens=tokens))
        self._drawn = [
            self._sample(draw, row, at) for draw, row, at in zip(draws, logits.numpy(), batch.positions, strict=True)
        ]
        self.n_launched += 1
        return [self._handed_back(sampled) for sampled in self._drawn]

    def sample(
        self, logits: torch.Tensor, draws: Mapping[int, Draw], positions: Mapping[int, int]
    ) -> dict[int, Sampled]:
        rows = {row: self._sample(draw, logits[row].numpy(), positions[row]) for row, draw in draws.items()}
        return {row: sampled for row, sampled in rows.items() if self._handed_back(sampled) is not None}

    def read(self, step: list[Sampled | None]) -> list[Sampled | None]:
        return step

    @staticmethod
    def _sample(draw: Draw, logits: np.ndarray, position: int) -> Sampled:
        sampler = Sampler(replace(draw.params, seed=int(draw.words[0])), [1], BANNED)
        return sampler.sample(logits, position)

    def _handed_back(self, sampled: Sampled) -> Sampled | None:
        self.n_rows += 1
        self._executor.n_handed_back += self.n_rows % 11 == 0
        return None if self.n_rows % 11 == 0 else sampled


class OneBehind:
    """What stands for DecodeLoop: a step is done when it is launched, and read later."""

    def __init__(self, executor: TokenPages) -> None:
        self._executor = executor
        self._under_way: deque[tuple[Sampled, float]] = deque()

    @property
    def n_under_way(self) -> int:
        return len(self._under_way)

    def can_serve(self, params: object) -> bool:
        return True

    def start(self, sampler: Sampler, ids: Sequence[int], n_prompt: int, dropped: int = 0) -> None:
        self._host, self._sampler = sampler, copy.deepcopy(sampler)
        self._token, self._position = ids[-1], len(ids) - 1
        self._table: dict[str, list[int]] = {}

    def launch(self, shown: Batch | None) -> None:
        if shown is not None:
            self._executor.copy(shown.copies)
            self._table = {name: rows[0] for name, rows in shown.tables.items()}
        self._executor.write(self._table, self._token, self._position)
        sampled = self._sampler.sample(self._executor.read(self._table, self._position), self._position)
        self._under_way.append((sampled, self._sampler.mu))
        self._token, self._position = sampled.id, self._position + 1

    def next(self) -> Sampled:
        sampled, mu = self._under_way.popleft()
        self._host.accept(sampled.id)
        self._host.mu = mu
        return sampled

    def stop(self) -> None:
        self._under_way.clear()
