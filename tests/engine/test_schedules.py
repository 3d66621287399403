"""Hundreds of schedules on pools that are too small: arrivals, lengths and cancellations as they come."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.engine import Engine
from bytefloor.engine.request import Finish, Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.sequence import SequenceState
from device_sampling import Numbers
from drafted import Always, foresee
from token_pages import N_ROWS, N_TOKENS, TokenPages, answer_of

SAMPLINGS = (
    SamplingParams(temperature=0, seed=0),
    SamplingParams(temperature=1.3, seed=3),
    SamplingParams(temperature=1.2, seed=0, repetition_penalty=1.3, frequency_penalty=0.4, penalty_window=9),
    SamplingParams(temperature=1.5, seed=8, mirostat_tau=3.0),
    SamplingParams(temperature=0, seed=1, dry_multiplier=2.0, dry_allowed_length=1),
)
BEGINNINGS = [random.Random(i).choices(range(5, N_TOKENS), k=40) for i in range(2)]


@dataclass(frozen=True)
class Visit:
    """A request, when it comes, and when it is cancelled, both in steps; None for never."""

    request: Request
    arrives: int
    leaves: int | None


class WatchedEngine(Engine):
    """first_lengths: how long each request's cache was when it first began.

    drafts: all are computed that there is room for, and most of them are right; None for no drafts.
    """

    def __init__(self, executor: TokenPages, drafts: random.Random | None) -> None:
        super().__init__(executor, Numbers(N_TOKENS), N_ROWS, Always(1 if drafts is None else 16))
        self.first_lengths: dict[int, int] = {}
        self._drafts = drafts

    def add(self, request: Request) -> int:
        request_id = super().add(request)
        if self._drafts is not None:
            foresee(self, answer_of(request, self.capacity), N_TOKENS, self._drafts)
        return request_id

    def _begin(self, sequence: SequenceState) -> bool:
        has_begun = super()._begin(sequence)
        if has_begun:
            self.first_lengths.setdefault(sequence.request_id, sequence.cache.length)
        return has_begun


@dataclass
class Played:
    """What became of the visits, in their order. n_steps: from arrival to end, for each.

    n_idle: steps that computed no row.
    """

    engine: WatchedEngine
    n_idle: int = 0
    ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ends: list[Finish] = field(default_factory=list)
    n_steps: list[int] = field(default_factory=list)
    stages: Counter[str] = field(default_factory=Counter)


@st.composite
def visits(draw: st.DrawFn, capacity: int) -> Visit:
    shared = draw(st.integers(0, capacity - 1))
    own = draw(st.integers(0 if shared else 1, capacity - 1 - shared)) if shared < capacity - 1 else 0
    tail = random.Random(draw(st.integers(0, 5))).choices(range(5, N_TOKENS), k=own)
    prompt = tuple(draw(st.sampled_from(BEGINNINGS))[:shared] + tail)
    max_tokens = draw(st.none() | st.integers(1, 20))
    request = Request(prompt, max_tokens, draw(st.sampled_from(SAMPLINGS)), ignores_end=True)
    return Visit(request, draw(st.integers(0, 12)), draw(st.none() | st.integers(0, 15)))


@st.composite
def plans(draw: st.DrawFn) -> CachePlan:
    capacity = draw(st.sampled_from([13, 24, 40]))
    positions = draw(st.integers(capacity, 3 * capacity))
    chunk = draw(st.integers(1, capacity))
    return CachePlan(capacity, chunk, draw(st.integers(1, 5)), draw(st.integers(0, 4)), 4, positions)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[CachePlan, list[Visit]]:
    plan = draw(plans())
    return plan, sorted(draw(st.lists(visits(plan.capacity), min_size=1, max_size=9)), key=lambda one: one.arrives)


def stage_of(engine: Engine, request_id: int) -> str:
    scheduler = engine._scheduler
    for sequence in (*scheduler.running, *scheduler.waiting):
        if sequence.request_id == request_id:
            if sequence in scheduler.waiting:
                return "pre-empted" if sequence.has_started else "queued"
            return "prefill" if sequence.first_token_at is None else "decode"
    return "gone"


def check_books(engine: Engine) -> None:
    """Every page is free or held, never both; idle ones are those that only prefixes hold; order is arrival's.

    Where nobody decodes ahead, nobody holds a page behind its last row between steps.
    """
    scheduler = engine._scheduler
    order = [sequence.request_id for sequence in (*scheduler.running, *scheduler.waiting)]
    assert order == sorted(order)
    assert len(scheduler.running) <= engine.executor.plan.n_sequences
    live = [sequence.cache for sequence in scheduler.running]
    kept = list(engine._pages.prefixes._entries.values())
    for cache in (*live, *kept):
        last = max((index for pages in cache._pages.values() for index in pages), default=0)
        assert engine.executor.loops or last * cache.plan.page_size <= max(cache.length - 1, 0)
    for name, use in engine.load.pages.items():
        of_live = {page for cache in live for page in cache._pages[name].values()}
        of_kept = {page for cache in kept for page in cache._pages[name].values()}
        assert use.n_pages - use.n_free == len(of_live | of_kept)
        assert use.n_idle == len(of_kept - of_live)
        assert max(of_live | of_kept, default=0) <= use.n_pages


def play(plan: CachePlan, coming: list[Visit], loops: bool, drafts: random.Random | None) -> Played:
    engine = WatchedEngine(TokenPages(plan, loops), drafts)
    played, now, ids, began = Played(engine), 0, {}, []
    ends: dict[int, Finish] = {}
    took: dict[int, int] = {}
    while len(ends) < len(coming):
        for visit in coming[len(began) :]:
            if visit.arrives <= now:
                request_id = engine.add(visit.request)
                ids[request_id], began = ([], []), [*began, now]
        for request_id in set(ids) - set(ends):
            leaves = coming[request_id - 1].leaves
            if leaves is not None and now - began[request_id - 1] >= leaves:
                played.stages[stage_of(engine, request_id)] += 1
                ends[request_id], took[request_id] = engine.cancel(request_id), now - began[request_id - 1]
        n_rows = engine.executor.n_rows
        deltas = engine.step()
        played.n_idle += engine.executor.n_rows == n_rows
        for delta in deltas:
            ids[delta.request_id][0].extend([delta.sampled.id] if delta.sampled else [])
            ids[delta.request_id][1].append(delta.text)
            if delta.finish is not None:
                assert delta.request_id not in ends
                ends[delta.request_id], took[delta.request_id] = delta.finish, now + 1 - began[delta.request_id - 1]
        check_books(engine)
        now += 1
        assert now < 5000, "nothing gets on"
    assert not engine.has_work
    for request_id in range(1, len(coming) + 1):
        found, texts = ids[request_id]
        played.ids.append(found)
        played.texts.append("".join(texts))
        played.ends.append(ends[request_id])
        played.n_steps.append(took[request_id])
    return played


def check(plan: CachePlan, coming: list[Visit], loops: bool, drafts: random.Random | None = None) -> Played:
    """Every answer is the one it has alone; steps are bounded by who came before; all pages come back."""
    played = play(plan, coming, loops, drafts)
    n_rows = 0
    for visit, ids, text, end, took in zip(coming, played.ids, played.texts, played.ends, played.n_steps, strict=True):
        expected, n_prompt = answer_of(visit.request, plan.capacity), len(visit.request.prompt_ids)
        assert end.reason in ("cancelled", "length")
        assert ids == (expected if end.reason == "length" else expected[: len(ids)])
        assert text == "".join(f"<{token}>" for token in ids)
        assert (end.n_prompt, end.n_generated) == (n_prompt, len(ids))
        # The oldest advances by a row in every step, but where one that ran ahead is only read, or is handed back:
        # nobody waits longer than those before it and itself take.
        n_rows += n_prompt + len(ids)
        assert took <= n_rows + (played.n_idle + played.engine.executor.n_handed_back if loops else 0)
    lengths = played.engine.first_lengths
    assert [end.n_cached for end in played.ends] == [lengths.get(i + 1, 0) for i in range(len(coming))]
    is_plain = not loops and drafts is None and not played.engine.load.n_preempted
    if is_plain and all(visit.leaves is None for visit in coming):
        # What is said to have been there was not computed, and everything else was, once.
        computed = sum(end.n_prompt - end.n_cached + end.n_generated - 1 for end in played.ends)
        assert played.engine.executor.n_rows == computed
    while played.engine._pages.prefixes.evict():
        pass
    assert all(use.n_free == use.n_pages and use.n_idle == 0 for use in played.engine.load.pages.values())
    return played


@settings(max_examples=300, deadline=None)
@given(schedules(), st.booleans(), st.none() | st.integers(0, 99).map(random.Random))
def test_every_answer_is_the_one_it_has_alone(
    schedule: tuple[CachePlan, list[Visit]], loops: bool, drafts: random.Random | None
) -> None:
    """S06, S17, V02, P12"""
    check(*schedule, loops, drafts)


def crowd(seed: int) -> tuple[CachePlan, list[Visit]]:
    """Short prompts, of which many begin, and long answers, of which few fit; a third of them are cancelled."""
    rng = random.Random(seed)
    coming = []
    for _ in range(10):
        prompt = rng.choice(BEGINNINGS)[: rng.randrange(2, 10)] + rng.choices(range(5, N_TOKENS), k=rng.randrange(1, 7))
        request = Request(tuple(prompt), rng.randrange(10, 26), rng.choice(SAMPLINGS), ignores_end=True)
        coming.append(Visit(request, rng.randrange(6), rng.randrange(1, 50) if rng.random() < 0.3 else None))
    plan = CachePlan(40, rng.choice((5, 8, 16)), 5, 3, 4, rng.randrange(40, 64))
    return plan, sorted(coming, key=lambda visit: visit.arrives)


def test_crowds_are_pre_empted_and_cancelled_at_every_stage() -> None:
    """S17, V02: the schedules above are worth nothing if nobody is ever short of pages."""
    stages: Counter[str] = Counter()
    n_preempted = n_cached = n_accepted = 0
    for seed in range(80):
        played = check(*crowd(seed), loops=seed % 2 == 1, drafts=random.Random(seed) if seed % 4 > 1 else None)
        stages += played.stages
        n_preempted += played.engine.load.n_preempted
        n_cached += sum(end.n_cached for end in played.ends)
        n_accepted += sum(end.n_draft_accepted for end in played.ends)
    assert n_preempted > 150
    assert n_accepted > 300
    assert n_cached > 100
    assert min(stages[stage] for stage in ("queued", "prefill", "decode", "pre-empted")) >= 4, stages
