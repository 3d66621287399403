"""Sampling on the device, on a device: the host's tokens, the step-by-step road's tokens, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.decode_loop import capture
from bytefloor.engine.device import DeviceExecutor, device_architecture
from bytefloor.engine.device_cuts import highest
from bytefloor.engine.device_highest import DeviceHighest, highest_specs
from bytefloor.engine.engine import Engine
from bytefloor.engine.kernels import load_kernels
from bytefloor.engine.request import Delta, Request
from bytefloor.engine.sampler import never_sampled
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from device_sampling import STAGES, Driven, Numbers, assert_alike, rows_of

CUDA = torch.device("cuda")
GEMMA = 262_144
SHAPE = Shape(
    "gemma3", 256, 512, 3, 4, 1, 256, 304, 4096, False,
    {"attention.sliding_window": 24, "attention.sliding_window_pattern": 3},
)  # fmt: skip
PROMPT = tuple(torch.randint(0, 290, (55,), generator=torch.Generator().manual_seed(1)).tolist())
SAMPLED = SamplingParams(seed=3, temperature=1.5)
ALL = SamplingParams(
    seed=5, temperature=1.2, typical_p=0.95, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
    penalty_window=12, xtc_probability=0.5, xtc_threshold=0.05, logit_bias={7: 2.0, 9: -100.0}, n_logprobs=4,
)  # fmt: skip
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, seed=1),
    "default": SAMPLED,
    "all": ALL,
    "greedy penalised over all": replace(ALL, temperature=0, penalty_window=-1),
    "no cut": SamplingParams(seed=8, top_k=0, top_p=1.0, min_p=0.0, n_logprobs=3, logprobs_after=True),
    "mirostat": SamplingParams(seed=4, mirostat_tau=3.0, temperature=2.0),
    "dry": replace(SAMPLED, dry_multiplier=1.0),
}


class Captured:
    """The step of a driven sampler as a graph, and the stream it runs on."""

    def __init__(self, driven: Driven, n_prompt: int) -> None:
        self.driven, self.stream = driven, torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.replay = capture(driven.sampler.step, self.stream, CUDA)
            driven.load(n_prompt)

    @torch.inference_mode()
    def sample(self, logits: object) -> object:
        with torch.cuda.stream(self.stream):
            return self.driven.by_device(logits, self.replay)


@cache
def find_by_kernel(n_vocabulary: int) -> DeviceHighest:
    torch.zeros(1, device=CUDA)  # a context, for the kernels to be loaded into
    specs = highest_specs(n_vocabulary)
    kernels = load_kernels(list(specs.values()), device_architecture(CUDA))
    return DeviceHighest(n_vocabulary, {dtype: kernels[spec] for dtype, spec in specs.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_vocabulary", [4096, 151_680, GEMMA])
def test_the_highest_by_the_kernel_are_those_of_a_stable_sort(n_vocabulary: int, dtype: torch.dtype) -> None:
    """Smooth, negative, full of ties, all alike, few that have a chance; the best in one group, and spread over all."""
    generator = torch.Generator("cuda").manual_seed(n_vocabulary)
    smooth = torch.randn(n_vocabulary, generator=generator, device="cuda", dtype=dtype)
    few = smooth.masked_fill(torch.rand(n_vocabulary, generator=generator, device="cuda") > 3e-4, -torch.inf)
    ascending = smooth.sort().values
    nan = smooth.clone()
    nan[[5, n_vocabulary - 1]] = torch.tensor([torch.nan, -torch.nan], dtype=dtype, device="cuda")
    rows = (smooth, -smooth.abs() - 1, (smooth * 2).round() + 0.0, 0 * smooth + 0.0, few, ascending, ascending.flip(0))
    for values in rows:
        for n in (1, 2, 40, 63, 64):
            found, places = find_by_kernel(n_vocabulary)(values, n)
            wanted, order = values.sort(descending=True, stable=True)
            assert torch.equal(places, order[:n])
            assert torch.equal(found, wanted[:n])
            assert torch.equal(places, highest(values, n)[1])
    found, places = find_by_kernel(n_vocabulary)(nan, 3)
    assert places[:2].tolist() == [5, n_vocabulary - 1]
    assert found.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("n_vocabulary", [203, 8192, 20_011, GEMMA])
@pytest.mark.parametrize("stage", list(STAGES))
def test_the_captured_sampler_equals_the_hosts(stage: str, n_vocabulary: int) -> None:
    """Smooth rows, rows full of ties, -0 among them; by one graph, positions read from the device."""
    for after in (False, True):
        p = SamplingParams(seed=11, n_logprobs=5, logprobs_after=after, **STAGES[stage])
        banned = {0, 17, n_vocabulary - 1}
        takes_best = stage == "greedy" and not after
        finder = find_by_kernel(n_vocabulary)
        driven = Driven(p, [1, 2, 3] * 20, [5, 6, 5] * 5, banned, n_vocabulary, "cuda", takes_best, finder)
        captured = Captured(driven, 60)
        for kind in ("smooth", "ties", "some ties"):
            for logits in rows_of(kind, 8, n_vocabulary, 7):
                found = captured.sample(logits)
                assert_alike(found, driven.by_host(logits))
                assert driven.memory.state.tolist()[:2] == [found.id, driven.position]


@pytest.mark.parametrize("stage", ["defaults", "greedy", "top_p", "all", "mirostat"])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_broken_logits_are_handed_to_the_host(stage: str, value: float) -> None:
    """A NaN of either sign, which a radix sort puts at opposite ends."""
    for n_vocabulary in (203, 20_011):
        driven = Driven(SamplingParams(seed=1, **STAGES[stage]), [1, 2], (), {0}, n_vocabulary, "cuda")
        captured = Captured(driven, 2)
        for place in (0, 20):
            logits = rows_of("smooth", 1, n_vocabulary, 1)[0]
            logits[place] = value
            assert captured.sample(logits) is None
            assert 0 <= int(driven.memory.state[0]) < n_vocabulary
            driven.load(2)


@pytest.fixture(scope="module")
def executor() -> DeviceExecutor:
    model = load_model(checkpoint_of("gemma3", SHAPE, "Q4_K_M", "cuda"))
    step = build_step(model.config, model.weights, Rounding(activations="int16_g32", cache="bf16"))
    banned = never_sampled(Numbers(290), SHAPE.vocabulary)
    return DeviceExecutor(step, CachePlan(256, 64), banned_ids=banned)


def engine_of(executor: DeviceExecutor, loops: bool = True) -> Engine:
    executor.poison()
    engine = Engine(executor, Numbers(290), SHAPE.vocabulary)
    if not loops:
        engine._loop = None
    return engine


def told(deltas: list[Delta]) -> list[tuple[object, ...]]:
    """Texts, ids, how it ended, and what was likeliest."""
    return [
        (d.text, d.sampled and d.sampled.id, d.sampled and [t for t, _ in d.sampled.top], d.finish and d.finish.detail)
        for d in deltas
    ]


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_the_loop_equals_step_by_step(executor: DeviceExecutor, name: str) -> None:
    """To the end of the context; a stop in mid-stream; then a prompt that continues what was stopped."""
    whole = Request(PROMPT, sampling=SAMPLINGS[name], ignores_end=True)
    plain = list(engine_of(executor, loops=False).generate(whole))
    ids = [d.sampled.id for d in plain if d.sampled]
    assert len(PROMPT) + len(ids) == 256
    stopped = replace(whole, stops=(f"<{ids[30]}>",))
    again = Request((*PROMPT, *ids[:8], 5, 6), max_tokens=90, sampling=SAMPLINGS[name], ignores_end=True)
    answers = []
    for loops in (False, True):
        engine = engine_of(executor, loops)
        answers.append([told(list(engine.generate(request))) for request in (whole, stopped, again)])
    assert answers[0][0] == told(plain)
    assert answers[1] == answers[0]


def test_cancelled_between_steps(executor: DeviceExecutor) -> None:
    request = Request(PROMPT, max_tokens=60, sampling=ALL, ignores_end=True)
    wanted = told(list(engine_of(executor, loops=False).generate(request)))
    engine = engine_of(executor)
    for n_steps in (1, 2, 3, 20):
        answer = engine.generate(request)
        for _ in range(n_steps):
            next(answer)
        answer.close()
        assert not engine.has_work
    # A prompt from the cache gives its last row by the graph, not by the kernels of many rows: another rounding.
    again = Request((*PROMPT[:-1], 8), max_tokens=60, sampling=ALL, ignores_end=True)
    assert len(wanted) == len(list(engine.generate(again))) == 60


@pytest.mark.parametrize(
    ("name", "p"),
    [
        ("defaults", SamplingParams(seed=1)),
        ("greedy", SamplingParams(temperature=0, seed=1)),
        ("top_p alone", SamplingParams(seed=1, top_k=0, min_p=0.0)),
        ("min_p alone", SamplingParams(seed=1, top_k=0, top_p=1.0)),
        ("defaults and 20 log-probabilities", SamplingParams(seed=1, n_logprobs=20)),
        ("defaults and penalties", SamplingParams(seed=1, repetition_penalty=1.1, frequency_penalty=0.1)),
        ("mirostat", SamplingParams(seed=1, mirostat_tau=5.0)),
    ],
)
def test_what_a_token_costs(name: str, p: SamplingParams, capsys: pytest.CaptureFixture) -> None:
    """P11: prints microseconds; fails only where something is far off."""
    driven = Driven(p, [1, 2, 3], (), {5}, GEMMA, "cuda", takes_best=p.is_greedy, find_highest=find_by_kernel(GEMMA))
    captured = Captured(driven, 3)
    captured.sample(rows_of("smooth", 1, GEMMA, 3)[0])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    n = 200
    with torch.cuda.stream(captured.stream):
        for _ in range(20):
            captured.replay()
        start.record()
        for _ in range(n):
            captured.replay()
        end.record()
    end.synchronize()
    us = start.elapsed_time(end) * 1e3 / n
    with capsys.disabled():
        print(f"\nsampling at V = {GEMMA}, {name}: {us:.1f} us")
    assert 0 < us < 2000
