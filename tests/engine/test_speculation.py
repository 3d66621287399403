"""Drafts through the engine: the very tokens of plain decoding, whatever is proposed, and nobody else pays for them.

Schedules at random, with drafts in half of them: test_schedules. Which drafts are computed: test_draft_choice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.engine import Engine
from bytefloor.engine.request import Delta, Finish, Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.speculation import LINGER, Speculation
from device_sampling import Numbers
from drafted import Always, Foreseen
from token_pages import N_ROWS, N_TOKENS, TokenPages, answer_of

CAPACITY = 80
SAMPLED = SamplingParams(temperature=1.3, seed=3)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, seed=1, n_logprobs=3),
    "sampled": replace(SAMPLED, n_logprobs=2),
    "penalties": replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.4, penalty_window=9),
    "dry": SamplingParams(temperature=0, seed=1, dry_multiplier=2.0, dry_allowed_length=1),
    "mirostat": replace(SAMPLED, mirostat_tau=3.0),
    "after": replace(SAMPLED, xtc_probability=0.5, xtc_threshold=0.05, logprobs_after=True, n_logprobs=4),
}


class Scripted:
    """Proposes what it was told at a number of tokens, and nothing elsewhere."""

    def __init__(self, ids: Sequence[int], drafts: dict[int, list[int]]) -> None:
        self._ids, self._drafts = ids, drafts

    def take_in(self, n_ids: int) -> None:
        pass

    def propose(self, n_most: int) -> list[int]:
        return self._drafts.get(len(self._ids), [])[:n_most]


class Watched(TokenPages):
    """batches: all that it was given."""

    def __init__(self, plan: CachePlan, loops: bool = False) -> None:
        super().__init__(plan, loops)
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        return super().run(batch)


def make(loops: bool = False, speculation: Speculation | None = None, **plan: int) -> Engine:
    settings = {"capacity": CAPACITY, "chunk": 24, "n_sequences": 4, "page_size": 4} | plan
    return Engine(Watched(CachePlan(**settings), loops), Numbers(N_TOKENS), N_ROWS, speculation or Always(16))


def ask(n_prompt: int, n_tokens: int | None, sampling: SamplingParams = SAMPLED, **options: object) -> Request:
    prompt = tuple(5 + (3 * i * i) % 24 for i in range(n_prompt))
    return Request(prompt, n_tokens, sampling, **{"ignores_end": True, **options})


def tell(engine: Engine, drafts: dict[int, list[int]]) -> None:
    """What the request added last proposes."""
    sequence = engine._scheduler.waiting[-1]
    sequence.ngrams = Scripted(sequence.ids, drafts)


def finish(engine: Engine) -> dict[int, list[Delta]]:
    found: dict[int, list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


def essence(deltas: list[Delta]) -> tuple[list[object], Finish]:
    """All but times, and what became of drafts."""
    last = deltas[-1].finish
    assert last is not None
    same = replace(last, prompt_s=0.0, decode_s=0.0, n_draft=0, n_draft_accepted=0)
    return [(delta.text, delta.sampled) for delta in deltas], same


def both(request: Request, drafts: dict[int, list[int]], **plan: int) -> tuple[list[Delta], Engine]:
    """The request's deltas, which must be those without drafts, and the engine that had some."""
    plain, drafting = make(speculation=Speculation(1), **plan), make(**plan)
    expected = list(plain.generate(request))
    request_id = drafting.add(request)
    tell(drafting, drafts)
    found = finish(drafting)[request_id]
    assert essence(found) == essence(expected)
    assert books(drafting) == books(plain)
    return found, drafting


def books(engine: Engine) -> dict[str, object]:
    """Pages that are free, and what is kept."""
    kept = engine._pages.prefixes._entries.items()
    pages = [(key, cache.length, {name: sorted(held) for name, held in cache._pages.items()}) for key, cache in kept]
    return {"free": {name: use.n_free for name, use in engine.load.pages.items()}, "kept": pages}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_tokens_texts_and_log_probabilities_are_those_without_drafts(sampling: SamplingParams) -> None:
    """Sixteen right, then each place at which a draft can go wrong; windows of 6 and 13 on pages of 4."""
    request = ask(9, 70, sampling)
    answer = answer_of(request, CAPACITY)
    drafts: dict[int, list[int]] = {}
    for at in range(1, len(answer)):
        right = answer[at : at + 15]
        if at % 16 < len(right) - 1:
            right[at % 16] = (right[at % 16] + 1) % N_TOKENS
        drafts[9 + at] = right
    found, engine = both(request, drafts)
    last = found[-1].finish
    assert last is not None
    assert 40 < last.n_draft_accepted < last.n_draft
    assert len(engine.executor.batches) == 1 + 69 - last.n_draft_accepted


@pytest.mark.parametrize("n_right", range(16))
def test_a_draft_that_goes_wrong_anywhere_gives_one_token_more_than_was_right(n_right: int) -> None:
    request = ask(9, 30)
    answer = answer_of(request, CAPACITY)
    draft = answer[1:16]
    if n_right < 15:
        draft[n_right] = (draft[n_right] + 1) % N_TOKENS
    found, engine = both(request, {10: draft})
    last = found[-1].finish
    assert last is not None
    assert (last.n_draft, last.n_draft_accepted) == (15, n_right)
    assert [len(batch.tokens) for batch in engine.executor.batches] == [9, 16] + [1] * (28 - n_right)
    assert engine.executor.batches[1].wanted == list(range(16))


@pytest.mark.parametrize("n_tokens", range(2, 9))
def test_max_tokens_inside_a_draft(n_tokens: int) -> None:
    """No more rows than tokens are wanted."""
    request = ask(9, n_tokens)
    found, engine = both(request, {10: answer_of(replace(request, max_tokens=30), CAPACITY)[1:]})
    assert engine.executor.n_rows == 9 + n_tokens - 1
    assert found[-1].finish.detail == f"max_tokens {n_tokens}"


@pytest.mark.parametrize("capacity", range(12, 20))
def test_a_context_that_ends_inside_a_draft(capacity: int) -> None:
    request = ask(9, None)
    answer = answer_of(request, capacity)
    found, engine = both(request, {10: [*answer[1:], *range(9)]}, capacity=capacity, chunk=12)
    assert found[-1].finish.detail == f"context of {capacity} is full"
    assert len(found) == len(answer) == capacity - 9
    assert engine.executor.n_rows == capacity - 1


@pytest.mark.parametrize("n", range(1, 8))
def test_a_stop_inside_a_draft(n: int) -> None:
    """Tokens behind it are nobody's: not in the text, not in the count, not in the cache."""
    request = ask(9, 30)
    answer = answer_of(request, CAPACITY)
    found, _ = both(replace(request, stops=(f"<{answer[n]}>",)), {10: answer[1:12]})
    stop = answer.index(answer[n])
    assert len(found) == stop + 1
    assert found[-1].finish.detail == "stop string"
    text = "".join(delta.text for delta in found)
    assert text == "".join(f"<{token}>" for token in answer[:stop])


def test_an_answer_that_repeats_itself_ends_inside_a_draft() -> None:
    bias = {7: 100.0}
    request = ask(3, None, replace(SAMPLED, logit_bias=bias), detects_loops=True)
    drafts = {3 + i: [7] * 15 for i in range(1, 200)}
    found, _ = both(request, drafts, capacity=200)
    assert found[-1].finish.reason == "loop"
    assert len(found) % 16 != 1


def test_an_end_token_inside_a_draft() -> None:
    request = ask(9, 30, ignores_end=False)
    answer = answer_of(request, CAPACITY)
    engines = make(speculation=Speculation(1)), make()
    for engine in engines:
        engine.tokenizer.end_ids = frozenset({answer[6]})
    expected = list(engines[0].generate(request))
    engines[1].add(request)
    tell(engines[1], {10: answer[1:12]})
    (found,) = finish(engines[1]).values()
    assert essence(found) == essence(expected)
    assert found[-1].finish.detail == "end of turn"
    assert len(found) <= 7


@pytest.mark.parametrize("n_seen", range(1, 9))
def test_who_stops_reading_inside_a_draft_leaves_a_cache_that_is_right(n_seen: int) -> None:
    request = ask(9, 30)
    answer = answer_of(request, CAPACITY)
    engine = make()
    deltas = engine.generate(request)
    ids = [next(deltas).sampled.id]
    (sequence,) = engine._scheduler.running
    sequence.ngrams = Scripted(sequence.ids, {10: answer[1:12]})
    ids += [next(deltas).sampled.id for _ in range(n_seen - 1)]
    deltas.close()
    assert ids == answer[:n_seen]
    assert not engine.has_work
    longer = replace(request, prompt_ids=(*request.prompt_ids, *answer[:n_seen], 11), max_tokens=8)
    assert [delta.sampled.id for delta in engine.generate(longer)] == answer_of(longer, CAPACITY)


@pytest.mark.parametrize("n_right", [0, 1, 5, 11])
def test_a_prompt_continues_from_an_answer_with_drafts(n_right: int) -> None:
    """S04: what was rejected is in no prefix, what was accepted is."""
    request = ask(9, 20)
    answer = answer_of(request, CAPACITY)
    draft = [*answer[1 : 1 + n_right], *[(token + 1) % N_TOKENS for token in answer[1 + n_right : 12]]]
    _, engine = both(request, {10: draft})
    longer = replace(request, prompt_ids=(*request.prompt_ids, *answer, 8, 9), max_tokens=9)
    deltas = list(engine.generate(longer))
    assert [delta.sampled.id for delta in deltas] == answer_of(longer, CAPACITY)
    assert deltas[-1].finish.n_cached == 9 + 19


@pytest.mark.parametrize("at", [0, 3, 6])
def test_broken_logits_are_an_error_only_where_they_are_looked_at(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four right drafts: rows 0 to 4 count, the rows behind a wrong one do not."""
    request = ask(9, 30)
    answer = answer_of(request, CAPACITY)
    plain = Watched.run

    def run(self: Watched, batch: Batch) -> torch.Tensor:
        logits = plain(self, batch)
        if len(batch.wanted) > at + 1:
            logits[at] = torch.nan
        return logits

    monkeypatch.setattr(Watched, "run", run)
    engine = make()
    engine.add(request)
    tell(engine, {10: [*answer[1:5], (answer[5] + 1) % N_TOKENS, *answer[6:12]]})
    (deltas,) = finish(engine).values()
    ids = [delta.sampled.id for delta in deltas if delta.sampled]
    if at <= 4:
        assert deltas[-1].finish.reason == "error"
        assert ids == answer[: 1 + at]
        assert books(engine)["kept"][0][0] == request.prompt_ids
    else:
        assert (deltas[-1].finish.reason, ids) == ("length", answer)


# --- beside others


def add_foreseen(engine: Engine, request: Request, seed: int = 0) -> int:
    request_id = engine.add(request)
    sequence = engine._scheduler.waiting[-1]
    sequence.ngrams = Foreseen(sequence.ids, answer_of(request, CAPACITY), N_TOKENS, random.Random(seed))
    return request_id


def test_some_draft_and_some_do_not() -> None:
    engine = make()
    requests = [ask(5 + 3 * i, 24, replace(SAMPLED, seed=i)) for i in range(4)]
    order = []
    for i, request in enumerate(requests):
        order.append(add_foreseen(engine, request) if i % 2 else engine.add(request))
        if i % 2 == 0:
            tell(engine, {})
    found = finish(engine)
    for request_id, request in zip(order, requests, strict=True):
        assert [delta.sampled.id for delta in found[request_id]] == answer_of(request, CAPACITY)
    assert [found[i][-1].finish.n_draft > 0 for i in order] == [False, True, False, True]
    rows = [np.bincount(batch.sequence).tolist() for batch in engine.executor.batches]
    assert any(len(each) == 4 and min(each) == 1 and max(each) > 1 for each in rows)


def test_no_drafts_beside_a_prompt_and_never_more_rows_than_a_chunk() -> None:
    """A prompt gets the rows that it gets without drafts."""
    counts = []
    for speculation in (Always(16), Speculation(1)):
        engine = make(speculation=speculation, chunk=10)
        add_foreseen(engine, ask(9, 24))
        while engine._scheduler.waiting or engine._scheduler.running[0].n_pending > 1:
            engine.step()
        add_foreseen(engine, ask(40, 10, replace(SAMPLED, seed=1)))
        start = len(engine.executor.batches)
        finish(engine)
        batches = engine.executor.batches[start:]
        reading = [batch for batch in batches if len(batch.wanted) < len(batch.tokens)]
        counts.append([np.bincount(batch.sequence).tolist() for batch in reading])
        assert max(len(batch.tokens) for batch in batches) <= 10
        assert speculation.is_on == any(len(batch.wanted) > 2 for batch in batches)
    assert counts[0] == counts[1]


def test_drafts_take_free_pages_alone() -> None:
    """Ten pages for two answers of 18 positions, and a prefix of two that nobody gives up for a draft."""
    old, young = ask(6, 12), ask(6, 12, replace(SAMPLED, seed=1))
    plain_steps = 0
    for speculation in (Speculation(1), Always(16)):
        engine = make(speculation=speculation, capacity=40, positions=40)
        kept = ask(8, 1, replace(SAMPLED, seed=9), stops=())
        kept = replace(kept, prompt_ids=tuple(range(5, 13)))
        list(engine.generate(kept))
        order = [add_foreseen(engine, old), add_foreseen(engine, young, seed=1)]
        found: dict[int, list[Delta]] = {}
        n_steps = 0
        while engine.has_work:
            before = engine._pages.n_preempted
            for delta in engine.step():
                found.setdefault(delta.request_id, []).append(delta)
            n_steps += 1
            assert engine._pages.n_preempted == before
        assert [[delta.sampled.id for delta in found[i]] for i in order] == [answer_of(x, 40) for x in (old, young)]
        if not speculation.is_on:
            plain_steps = n_steps
    assert n_steps < plain_steps


def test_fewer_drafts_where_pages_are_short() -> None:
    """Nine of ten pages are in use. Fifteen drafts are right; one goes into a page that is held, four into the last."""
    old, young = ask(18, 20), replace(ask(14, 20, replace(SAMPLED, seed=1)), prompt_ids=tuple(range(15, 29)))
    engine = make(capacity=40, chunk=40, positions=40, n_snapshots=0)
    order = [engine.add(old)]
    tell(engine, {})
    order.append(engine.add(young))
    tell(engine, {15: answer_of(young, 40)[1:16]})
    told = engine.step()
    assert engine.load.pages["global"].n_free == 1
    told += engine.step()
    assert np.bincount(engine.executor.batches[-1].sequence).tolist() == [1, 6]
    assert engine.load.n_preempted == 0
    found = finish(engine)
    for request_id, request in zip(order, (old, young), strict=True):
        deltas = [delta for delta in told if delta.request_id == request_id] + found[request_id]
        assert [delta.sampled.id for delta in deltas] == answer_of(request, 40)


# --- the loop on a device


def test_drafts_leave_the_loop_which_is_entered_again_some_steps_later() -> None:
    request = ask(9, 40)
    answer = answer_of(request, CAPACITY)
    engine = make(loops=True)
    engine.add(request)
    tell(engine, {20: [*answer[11:14], 0 if answer[14] else 1]})
    is_looping, ids = [], []
    while engine.has_work:
        deltas = engine.step()
        ids += [delta.sampled.id for delta in deltas]
        is_looping.append(engine._looping is not None)
    assert ids == answer
    # The prompt, ten by the loop, the drafts, LINGER - 1 plain ones; the last step leaves it.
    assert is_looping == [False] + [True] * 10 + [False] * LINGER + [True] * (25 - LINGER) + [False]
    assert [len(batch.tokens) for batch in engine.executor.batches] == [9, 5] + [1] * (LINGER - 1)


def test_with_one_row_nothing_is_proposed_and_nobody_looks_at_a_clock() -> None:
    """An executor that takes no drafts."""

    def clock() -> float:
        raise AssertionError("looked")

    for loops in (False, True):
        engine = make(loops, Speculation(1, clock))
        request_id = add_foreseen(engine, ask(9, 40))
        sequence = engine._scheduler.waiting[-1]
        sequence.ngrams.take_in = sequence.ngrams.propose = None
        found = finish(engine)[request_id]
        assert [delta.sampled.id for delta in found] == answer_of(ask(9, 40), CAPACITY)
        assert sequence.drafting.n_since >= LINGER
