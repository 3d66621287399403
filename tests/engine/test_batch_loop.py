"""Several sequences read one step behind, on a device executor of twins: the very tokens of the step-by-step road."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bytefloor.engine.batch import PageCopy
from bytefloor.engine.batch_loop import KNOWN, BatchLoop
from bytefloor.engine.cache import CachePlan, SequenceCache
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.engine import Engine
from bytefloor.engine.pages import Pages
from bytefloor.engine.request import Delta, Request
from bytefloor.engine.row_sampler import RowSampler
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.errors import CapacityError
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import Step
from device_sampling import Numbers
from kernel_twins import TwinDevice

N_ROWS, N_TOKENS, CAPACITY = 400, 380, 144
SHAPE = Shape(
    "gemma3", 256, 512, 3, 4, 1, 64, N_ROWS, 4096, False,
    {"attention.sliding_window": 24, "attention.sliding_window_pattern": 3},
)  # fmt: skip
FEW = SamplingParams(top_k=5, temperature=1.5, min_p=0, top_p=1)
"""What the best of seven groups of 64 logits are enough for."""
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def step() -> Step:
    model = load_model(checkpoint_of("gemma3", SHAPE, "Q4_K_M", "cpu"))
    return build_step(model.config, model.weights, Rounding(activations="int16_g32", cache="bf16"))


@pytest.fixture
def make(step: Step, monkeypatch: pytest.MonkeyPatch) -> Make:
    twins = TwinDevice()
    twins.install(monkeypatch)

    def make_engine(loops: bool = True, **plan: int) -> Engine:
        settings = {"capacity": CAPACITY, "chunk": 40, "n_sequences": 4} | plan
        never = Numbers.suppressed_ids | frozenset(range(N_TOKENS, N_ROWS))
        executor = DeviceExecutor(step, CachePlan(**settings), device="cpu", banned_ids=never)
        twins.know(executor)
        executor.poison()
        engine = Engine(executor, Numbers(N_TOKENS), N_ROWS)
        if not loops:
            engine._ahead._loop = None
        return engine

    return make_engine


def ask(i: int, n_tokens: int = 20, sampling: SamplingParams = FEW, n_prompt: int = 9) -> Request:
    prompt = torch.randint(0, N_TOKENS, (n_prompt + i,), generator=torch.Generator().manual_seed(i)).tolist()
    return Request(tuple(prompt), max_tokens=n_tokens, sampling=replace(sampling, seed=i), ignores_end=True)


def play(engine: Engine, requests: list[Request], more: dict[int, list[Request]] | None = None) -> dict[int, list]:
    """What each request was told, by its place. more: requests that come after so many steps."""
    told: dict[int, list] = {}
    ids = {engine.add(request): i for i, request in enumerate(requests)}
    n_steps = 0
    while engine.has_work:
        for request in (more or {}).get(n_steps, []):
            ids[engine.add(request)] = len(ids)
        n_steps += 1
        for delta in engine.step():
            told.setdefault(ids[delta.request_id], []).append(essence(delta))
    return told


def essence(delta: Delta) -> tuple:
    sampled = delta.sampled
    top = None if sampled is None else (sampled.id, round(sampled.logprob, 6), [token for token, _ in sampled.top])
    return delta.text, top, delta.finish and (delta.finish.reason, delta.finish.detail, delta.finish.n_generated)


def free_pages(engine: Engine) -> dict[str, int]:
    while engine._pages.prefixes.evict():
        pass
    return {name: pool.n_free for name, pool in engine._pages.pools.items()}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Sources of every step that the loop starts."""
    steps: list[list[int]] = []
    real = BatchLoop.launch

    def launch(self, batch, draws, sources):
        steps.append(list(sources))
        return real(self, batch, draws, sources)

    monkeypatch.setattr(BatchLoop, "launch", launch)
    return steps


@pytest.mark.parametrize("n", [2, 4, 18])
def test_tokens_equal_the_step_by_step_road(make: Make, launched: list[list[int]], n: int) -> None:
    """By graphs of a few tokens, and by that of 32 rows; answers of different lengths, so that rows leave."""
    kinds = (FEW, SamplingParams(temperature=0, n_logprobs=4), replace(FEW, temperature_first=True, n_logprobs=7))
    requests = [ask(i, 20 + i, kinds[i % 3]) for i in range(n)]
    looping, plain = make(n_sequences=n), make(loops=False, n_sequences=n)
    before = free_pages(looping)
    assert play(looping, requests) == play(plain, requests)
    assert free_pages(looping) == before
    follow = [step for step in launched if all(source != KNOWN for source in step)]
    assert len(follow) > 8
    assert any(len(step) > 16 or len(step) == n for step in follow)
    assert any(step != list(range(len(step))) for step in follow), "rows must have moved up when one left"


def test_requests_that_come_and_go_change_nobodys_tokens(make: Make, launched: list[list[int]]) -> None:
    """A grammar-like company too: one whose parameters only the host knows stops the others from running ahead."""
    penalised = replace(FEW, presence_penalty=0.5)
    requests = [ask(0, 40), ask(1, 25)]
    more = {6: [ask(2, 10)], 15: [ask(3, 6, penalised), ask(4, 8)], 22: [ask(5, 5)]}
    assert play(make(), requests, more) == play(make(loops=False), requests, more)
    assert len(launched) > 15


def test_a_row_handed_back_is_chosen_by_the_host(
    make: Make, launched: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask(i, 18) for i in range(3)]
    expected = play(make(loops=False), requests)
    real, n_read = RowSampler.read, 0

    def read(self, params, row):
        nonlocal n_read
        n_read += 1
        return None if n_read % 7 == 0 else real(self, params, row)

    monkeypatch.setattr(RowSampler, "read", read)
    assert play(make(), requests) == expected
    assert n_read > 30


def test_cancelled_with_a_step_under_way(make: Make) -> None:
    requests = [ask(i, 30) for i in range(3)]
    alone = play(make(loops=False), requests)
    engine = make()
    before = free_pages(engine)
    ids = [engine.add(request) for request in requests]
    told: dict[int, list] = {i: [] for i in ids}
    for n in range(40):
        if n == 9:
            assert engine._ahead.is_under_way
            finish = engine.cancel(ids[1])
            assert finish is not None
            assert finish.reason == "cancelled"
        for delta in engine.step():
            told[delta.request_id].append(essence(delta))
    assert not engine.has_work
    assert told[ids[0]] == alone[0]
    assert told[ids[2]] == alone[2]
    assert told[ids[1]] == alone[1][: len(told[ids[1]])]
    assert free_pages(engine) == before


def test_a_step_that_cannot_be_read_loses_those_that_took_part_and_no_pages(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    before = free_pages(engine)
    for i in range(3):
        engine.add(ask(i, 30))
    for _ in range(8):
        engine.step()
    assert engine._ahead.is_under_way
    with monkeypatch.context() as broken:
        broken.setattr(BatchLoop, "read", lambda self, step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not engine.has_work
    assert not engine._ahead.is_under_way
    assert free_pages(engine) == before
    assert play(engine, [ask(5, 6), ask(6, 6)]) == play(make(loops=False), [ask(5, 6), ask(6, 6)])


def test_a_full_context_ends_without_a_step_past_it(make: Make) -> None:
    requests = [ask(i, 500, n_prompt=CAPACITY - 20) for i in range(3)]
    told = play(make(), requests)
    assert told == play(make(loops=False), requests)
    assert [answer[-1][2][0] for answer in told.values()] == ["length"] * 3


def test_copies_are_made_where_a_step_finds_no_page_for_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that the first sequence found stay its own, so nobody would copy into them again."""
    requests = [ask(i, 12) for i in range(3)]
    expected = play(make(loops=False), requests)
    engine, real, n_refused = make(), Pages.reserve, 0
    copied: list[int] = []
    monkeypatch.setattr(engine._ahead._loop, "_copy", lambda copies, do=engine._ahead._loop._copy: (
        copied.append(len(copies)), do(copies)
    ))  # fmt: skip

    def reserve(self: Pages, cache: SequenceCache, n_rows: int) -> list[PageCopy]:
        nonlocal n_refused
        launching = sys._getframe(1).f_code.co_name == "launch"
        if launching and cache is engine._scheduler.running[-1].cache and n_refused < 3:
            n_refused += 1
            raise CapacityError("no page")
        return real(self, cache, n_rows)

    monkeypatch.setattr(Pages, "reserve", reserve)
    assert play(engine, requests) == expected
    assert n_refused
    assert sum(copied) > 0
