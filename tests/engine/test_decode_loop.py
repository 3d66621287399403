"""The loop that reads one step behind, on a device executor of twins: the very tokens of the step-by-step road."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bytefloor.engine import decode_loop as decode_loop_module
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.decode_loop import DecodeLoop
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.device_sampler import DeviceSampler
from bytefloor.engine.engine import Engine
from bytefloor.engine.request import Delta, Finish, Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.errors import CapacityError
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import Step
from bytefloor.text.reasoning import ReasoningTags
from bytefloor.text.reasoning_budget import Thinking
from device_sampling import Numbers
from kernel_twins import TwinDevice, TwinKernel

N_ROWS, N_TOKENS, CAPACITY = 283, 270, 144
SHAPE = Shape(
    "gemma3", 256, 512, 3, 4, 1, 64, N_ROWS, 4096, False,
    {"attention.sliding_window": 24, "attention.sliding_window_pattern": 3},
)  # fmt: skip
PROMPT = tuple(torch.randint(0, N_TOKENS, (55,), generator=torch.Generator().manual_seed(1)).tolist())
GREEDY = SamplingParams(temperature=0, seed=1)
SAMPLED = SamplingParams(seed=3, temperature=1.5)
ALL = SamplingParams(
    seed=5, temperature=1.2, typical_p=0.95, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
    penalty_window=12, xtc_probability=0.5, xtc_threshold=0.05, logit_bias={7: 2.0, 9: -100.0}, n_logprobs=4,
)  # fmt: skip
SAMPLINGS = {
    "greedy": GREEDY,
    "default": SAMPLED,
    "all": ALL,
    "greedy penalised over all": replace(ALL, temperature=0, penalty_window=-1),
    "no cut": SamplingParams(seed=8, top_k=0, top_p=1.0, min_p=0.0, n_logprobs=3, logprobs_after=True),
    "mirostat": SamplingParams(seed=4, mirostat_tau=3.0, temperature=2.0),
}


class Trouble:
    """From which position on the head gives NaN."""

    position: int | None = None


@pytest.fixture(scope="module")
def step() -> Step:
    model = load_model(checkpoint_of("gemma3", SHAPE, "Q4_K_M", "cpu"))
    return build_step(model.config, model.weights, Rounding(activations="int16_g32", cache="bf16"))


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Trouble:
    found, healthy = Trouble(), TwinKernel.logits

    def logits(self, y, banned, out, bests, counter, state, history):
        healthy(self, y, banned, out, bests, counter, state, history)
        if found.position is None:
            return
        at = int(state[1]) - 1
        if at >= found.position:
            out[11] = torch.nan
            state[0] = history[at] = -1

    monkeypatch.setattr(TwinKernel, "logits", logits)
    return found


Make = Callable[..., Engine]


@pytest.fixture
def make(step: Step, trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> Make:
    twins = TwinDevice()
    twins.install(monkeypatch)

    def make_engine(loops: bool = True, banned: frozenset[int] | None = None, **plan: int) -> Engine:
        settings = {"capacity": CAPACITY, "chunk": 40} | plan
        never = Numbers.suppressed_ids | frozenset(range(N_TOKENS, N_ROWS)) if banned is None else banned
        executor = DeviceExecutor(step, CachePlan(**settings), device="cpu", banned_ids=never)
        twins.know(executor)
        executor.poison()
        engine = Engine(executor, Numbers(N_TOKENS), N_ROWS)
        if not loops:
            engine._loop = None
        return engine

    return make_engine


def run(engine: Engine, request: Request) -> list[Delta]:
    return list(engine.generate(request))


def essence(deltas: list[Delta]) -> tuple[list[tuple[object, ...]], Finish]:
    """Tokens, texts, how it ended; log-probabilities to twelve digits."""
    last = deltas[-1].finish
    assert last is not None
    told = [
        (d.text, d.sampled and (d.sampled.id, round(d.sampled.logprob, 12), [t for t, _ in d.sampled.top]))
        for d in deltas
    ]
    return told, replace(last, prompt_s=0.0, decode_s=0.0)


def books(engine: Engine) -> dict[str, object]:
    """Pages that are free, and what the store of prefixes holds."""
    stored = [(key, cache.length, cache._pages) for key, cache in engine._pages.prefixes._entries.items()]
    held = [(key, length, {name: sorted(found) for name, found in pages.items()}) for key, length, pages in stored]
    return {"free": {name: pool.n_free for name, pool in engine._pages.pools.items()}, "stored": held}


def ids_of(deltas: list[Delta]) -> list[int]:
    return [delta.sampled.id for delta in deltas if delta.sampled is not None]


def compare(make: Make, *requests: Request) -> list[list[Delta]]:
    """The requests one after another, by the loop and step by step; returns what the loop said."""
    looping, plain = make(), make(loops=False)
    found = []
    for request in requests:
        found.append(run(looping, request))
        assert essence(found[-1]) == essence(run(plain, request))
        assert books(looping) == books(plain)
        assert looping._looping is None
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of all steps that the loop starts."""
    positions: list[int] = []
    real = DecodeLoop.launch

    def launch(self, shown):
        positions.append(self._position)
        real(self, shown)

    monkeypatch.setattr(DecodeLoop, "launch", launch)
    return positions


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_tokens_equal_the_step_by_step_road(make: Make, launched: list[int], name: str) -> None:
    """Past page borders, the window of sliding layers and the window of penalties, which begins in the prompt."""
    (deltas,) = compare(make, Request(PROMPT, max_tokens=45, sampling=SAMPLINGS[name], ignores_end=True))
    assert len(ids_of(deltas)) == 45
    assert launched == list(range(len(PROMPT), len(PROMPT) + 44))


def test_the_next_step_is_under_way_before_a_token_is_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = []
    real = DecodeLoop.next

    def read(self):
        under_way.append(self.n_under_way)
        return real(self)

    monkeypatch.setattr(DecodeLoop, "next", read)
    run(make(), Request(PROMPT, max_tokens=6, sampling=SAMPLED, ignores_end=True))
    assert under_way == [2, 2, 2, 2, 1]


def test_a_full_context_ends_without_a_step_past_it(make: Make, launched: list[int]) -> None:
    (deltas,) = compare(make, Request(PROMPT, sampling=SAMPLED, ignores_end=True))
    assert len(PROMPT) + len(ids_of(deltas)) == CAPACITY
    assert max(launched) == CAPACITY - 2


def test_a_stop_in_mid_stream_leaves_nothing_behind(make: Make, launched: list[int]) -> None:
    """A second request shares the prompt and the beginning of the answer; a third is somebody else's."""
    whole = Request(PROMPT, max_tokens=40, sampling=SAMPLED, ignores_end=True)
    ids = ids_of(run(make(loops=False), whole))
    at = 17 + next(i for i, token in enumerate(ids[17:]) if token not in ids[:17])
    stopped = replace(whole, stops=(f"<{ids[at]}>",))
    again = Request((*PROMPT, *ids[: at - 3], 5, 6, 7), max_tokens=12, sampling=GREEDY, ignores_end=True)
    first, second, _ = compare(make, stopped, again, Request(PROMPT[5:], max_tokens=9, sampling=ALL))
    assert (first[-1].finish.reason, first[-1].finish.detail) == ("stop", "stop string")
    assert ids_of(first) == ids[: at + 1]
    assert len(PROMPT) + at in launched  # a step ahead, thrown away
    assert second[-1].finish.n_cached >= len(PROMPT)


def test_end_tokens_end_the_answer(make: Make) -> None:
    request = Request(PROMPT, max_tokens=40, sampling=SAMPLED)
    engine = make()
    ids = ids_of(run(engine, request))
    at = 9 + next(i for i, token in enumerate(ids[9:]) if token not in ids[:9])
    ended = make()
    ended.tokenizer.end_ids = frozenset({ids[at]})
    deltas = run(ended, request)
    assert ids_of(deltas) == ids[: at + 1]
    assert deltas[-1].finish.reason == "stop"


def test_a_loop_of_words_is_found_as_before(make: Make) -> None:
    sampling = replace(GREEDY, logit_bias={9: 100.0})
    request = Request(PROMPT[:4], sampling=sampling, ignores_end=True, detects_loops=True)
    engine = make(capacity=256)
    assert run(engine, request)[-1].finish.reason == "loop"


@pytest.mark.parametrize("name", ["greedy", "all", "mirostat"])
def test_a_thought_is_closed_by_hand_and_the_loop_goes_on(make: Make, launched: list[int], name: str) -> None:
    """Three tokens close it: nothing that the device had chosen ahead gets in between."""
    tags = ReasoningTags("<1>", "<9><8><11>", is_anywhere=False)
    thinking = Thinking(tags, is_open=True, tokenizer=Numbers(N_TOKENS), n_most=12)
    request = Request(PROMPT, max_tokens=40, sampling=SAMPLINGS[name], ignores_end=True)
    free = ids_of(run(make(loops=False), request))
    (deltas,) = compare(make, replace(request, thinking=thinking))
    ids = ids_of(deltas)
    assert ids[:15] == [*free[:12], 9, 8, 11]
    assert ids[15:] != free[15:]
    assert len(ids) == 40
    assert deltas[-1].finish.n_thought == 12
    # The loop has begun all steps but those of forced tokens, and one ahead that was no use.
    assert launched == [*range(len(PROMPT), len(PROMPT) + 12), *range(len(PROMPT) + 14, len(PROMPT) + 39)]


def test_thoughts_of_several_are_closed_where_each_is_spent(make: Make) -> None:
    """Steps of several begin before the last one was read; what was begun for a forced token's place is dropped."""
    tags = ReasoningTags("<1>", "<9><8><11>", is_anywhere=False)
    budgets, engine = [0, 3, 7, None], make(n_sequences=4)
    found: dict[int, list[Delta]] = {}
    for place, n_most in enumerate(budgets):
        thinking = Thinking(tags, is_open=True, tokenizer=Numbers(N_TOKENS), n_most=n_most)
        sampling = GREEDY if place == 1 else SAMPLED
        request = Request(PROMPT[place:], 16, sampling, ignores_end=True, thinking=thinking)
        found[engine.add(request)] = []
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id].append(delta)
    for n_most, deltas in zip(budgets, found.values(), strict=True):
        ids = ids_of(deltas)
        assert len(ids) == 16
        closed = [at for at in range(14) if ids[at : at + 3] == [9, 8, 11]]
        assert closed == ([] if n_most is None else [n_most])
        assert deltas[-1].finish.n_thought == (16 if n_most is None else n_most)


@pytest.mark.parametrize("n_steps", [1, 2, 10, 12])
def test_cancelled_between_steps(make: Make, n_steps: int) -> None:
    """After 10 steps 64 rows are kept, a whole page, and the step ahead has taken the next one."""
    engines = [make(), make(loops=False)]
    told = []
    for engine in engines:
        answer = engine.generate(Request(PROMPT, max_tokens=40, sampling=ALL, ignores_end=True))
        ids = [next(answer).sampled.id for _ in range(n_steps)]
        answer.close()
        assert not engine.has_work
        next_one = run(engine, Request((*PROMPT, *ids, 8), max_tokens=9, sampling=SAMPLED, ignores_end=True))
        told.append((ids, essence(next_one), books(engine)))
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["greedy", "default", "all", "mirostat"])
def test_nan_logits_in_the_middle_are_the_same_error(make: Make, trouble: Trouble, name: str) -> None:
    request = Request(PROMPT, max_tokens=40, sampling=SAMPLINGS[name], ignores_end=True)
    healthy = run(make(loops=False), request)
    told = []
    for loops in (True, False):
        trouble.position = None
        engine = make(loops=loops)
        free = {name: pool.n_free for name, pool in engine._pages.pools.items()}
        trouble.position = len(PROMPT) + 8
        deltas = run(engine, request)
        assert deltas[-1].finish.reason == "error"
        assert deltas[-1].finish.detail == f"logits at position {len(PROMPT) + 8}: 1 of {N_ROWS} are NaN"
        assert ids_of(deltas) == ids_of(healthy)[:9]
        told.append((essence(deltas), books(engine)))
        trouble.position = None
        engine.executor.poison()
        while engine._pages.prefixes.evict():
            pass
        assert {name: pool.n_free for name, pool in engine._pages.pools.items()} == free
        assert ids_of(run(engine, request)) == ids_of(healthy)
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["greedy penalised over all", "all", "mirostat"])
def test_a_step_handed_back_is_done_over_by_the_host(
    make: Make, monkeypatch: pytest.MonkeyPatch, launched: list[int], name: str
) -> None:
    """Its sampler stands where the device's stood; the loop then goes on where the host has left off."""
    real, n_read = DeviceSampler.read, 0

    def read(self, row):
        nonlocal n_read
        n_read += 1
        return None if n_read % 3 == 0 or n_read == 4 else real(self, row)

    monkeypatch.setattr(DeviceSampler, "read", read)
    compare(make, Request(PROMPT, max_tokens=45, sampling=SAMPLINGS[name], ignores_end=True))
    assert n_read == 44
    assert launched.count(len(PROMPT) + 3) == 2


def test_an_exception_in_the_loop_loses_the_sequence_and_no_pages(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    request = Request(PROMPT, max_tokens=20, sampling=SAMPLED, ignores_end=True)
    healthy = ids_of(run(make(), request))
    answer = engine.generate(request)
    for _ in range(4):
        next(answer)
    with monkeypatch.context() as broken:
        broken.setattr(DecodeLoop, "next", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(answer)
    assert not engine.has_work
    assert engine._looping is None
    assert [cache.length for cache in engine._pages.prefixes._entries.values()] == [len(PROMPT)]
    assert ids_of(run(engine, request)) == healthy


def test_a_sampler_whose_capture_failed_is_made_anew(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    request = Request(PROMPT, max_tokens=20, sampling=SAMPLED, ignores_end=True)
    with monkeypatch.context() as broken:
        broken.setattr(decode_loop_module, "capture", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(engine, request)
    assert ids_of(run(engine, request)) == ids_of(run(make(loops=False), request))


def test_a_step_ahead_waits_where_pages_are_short(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page for it, and no prefix to give up: the token before it is read first."""
    engine, plain = make(), make(loops=False)
    request = Request(PROMPT, max_tokens=80, sampling=SAMPLED, ignores_end=True)
    real = engine._pages.reserve
    refused = []

    def reserve(cache, n_rows):
        if engine._loop.n_under_way:
            refused.append(engine._loop._position)
            raise CapacityError("none left")
        return real(cache, n_rows)

    monkeypatch.setattr(engine._pages, "reserve", reserve)
    assert essence(run(engine, request)) == essence(run(plain, request))
    assert refused == [64, 128]


def test_dry_is_sampled_by_the_host(make: Make, launched: list[int]) -> None:
    request = Request(PROMPT, max_tokens=20, sampling=replace(SAMPLED, dry_multiplier=2.0), ignores_end=True)
    compare(make, request)
    assert launched == []


def test_bans_the_kernel_does_not_know_are_kept(make: Make) -> None:
    """An executor that was told of other banned tokens than the engine has: the kernel's choice is not taken then."""
    request = Request(PROMPT, max_tokens=20, sampling=GREEDY, ignores_end=True)
    ids = ids_of(run(make(loops=False), request))
    engine = make(banned=frozenset(ids[3:6]))
    assert ids_of(run(engine, request)) == ids


def test_two_requests_that_differ_in_seed_share_a_sampler(make: Make) -> None:
    engine = make()
    requests = [Request(PROMPT, max_tokens=12, sampling=replace(ALL, seed=seed), ignores_end=True) for seed in (1, 2)]
    found, samplers = [], []
    for request in requests:
        found.append(ids_of(run(engine, request)))
        samplers.append(engine._loop._sampler)
    assert samplers[0] is samplers[1]
    assert found == [ids_of(run(make(loops=False), request)) for request in requests]
    assert found[0] != found[1]


def test_the_loop_is_left_and_taken_up_again_where_pages_run_out(make: Make, launched: list[int]) -> None:
    """Four pages; the first comes to need three, the other two: it is computed again, and goes on in the loop."""
    engine = make(n_sequences=2, positions=256)
    requests = [
        Request((*PROMPT, *PROMPT[::-1], *PROMPT[:10]), max_tokens=12, sampling=SAMPLED, ignores_end=True),
        Request((*PROMPT, 7, 8, 9, 10, 11), max_tokens=20, sampling=replace(SAMPLED, seed=4), ignores_end=True),
    ]
    alone = [ids_of(run(make(loops=False), request)) for request in requests]
    order = [engine.add(request) for request in requests]
    found: dict[int, list[Delta]] = {request_id: [] for request_id in order}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id].append(delta)
    assert engine.load.n_preempted == 1
    assert launched[-1] == 60 + 20 - 2
    assert [ids_of(found[request_id]) for request_id in order] == alone
