"""The sampler against the slow, obvious one: random numbers, distributions, any legal request, and its speed."""

import math
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_sampler import NEUTRAL, Borderline, params, philox, row, slow_distribution, slow_draw, slow_uniforms

from bytefloor.engine.sampler import Sampler, highest, smallest_set, uniforms
from bytefloor.engine.sampling_params import SamplingParams

LOGITS = row(2.0, 1.0, 0.5, 2.0, -1.0, 0.0, 1.5, -3.0)
STAGES = {
    "neutral": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "typical_p": {"typical_p": 0.6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.25},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.12},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_and_frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "dry": {"dry_multiplier": 0.8},
    "logit_bias": {"logit_bias": {7: 4.0, 0: -100.0}},
    "all": {
        "temperature": 0.8,
        "top_k": 6,
        "typical_p": 0.95,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "dry_multiplier": 0.3,
    },
}
PROMPT, WRITTEN = [1, 4, 6, 0], [6, 0, 3, 1, 4, 6, 0]


# Random numbers and the draw -------------------------------------------------------------------------------------


def test_philox_is_the_published_one():
    # Random123's known answer for philox4x64, 10 rounds, all zero.
    assert philox((0,) * 4, (0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**53, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 131_071, 2**32, 2**64 - 1])
def test_uniforms_follow_the_documented_key_and_counter(seed, position):
    assert list(uniforms(seed, position)) == slow_uniforms(seed, position)
    assert uniforms(seed, np.uint64(position)) == uniforms(seed, position)


def test_uniforms_at_neighbouring_seeds_and_positions_are_spread():
    draws = np.array([uniforms(seed, position) for seed in range(40) for position in range(50)])
    assert len(np.unique(draws)) == draws.size
    for column in draws.T:
        histogram, _ = np.histogram(column, bins=10, range=(0, 1))
        assert chi_square(histogram, np.full(10, 0.1)) < 1


def test_draw_is_the_inverse_cdf_in_descending_probability_ties_by_lower_id():
    logits = np.log(row(0.1, 0.3, 0.3, 0.2, 0.1))
    order, edges = [1, 2, 3, 0, 4], np.cumsum([0.3, 0.3, 0.2, 0.1, 0.1])
    sampler = Sampler(params(seed=5), [])
    for position in range(300):
        u = slow_uniforms(5, position)[0]
        assert sampler.sample(logits, position).id == order[int(np.searchsorted(edges, u))]


def test_a_draw_past_the_rounded_sum_takes_the_last_that_counts():
    score = np.arange(100.0)[::-1].copy()
    weight = np.where(score > 20, 0.01, 0.0)
    assert smallest_set(score, weight, 1.0)[-1] == 78
    score[40:] = -np.inf
    assert smallest_set(score, weight, 1.0)[-1] == 39


# Distributions: 20,000 draws against exact probabilities ---------------------------------------------------------


def chi_square(counts, expected):
    """The statistic as a share of a bound that a right sampler passes 9,999 times in 10,000; draws are fixed anyway."""
    n, possible = counts.sum(), expected > 0
    if counts[~possible].any():
        return math.inf
    freedom = max(1, int(possible.sum()) - 1)
    statistic = float((((counts - n * expected) ** 2)[possible] / (n * expected[possible])).sum())
    return statistic / (freedom + 4 * math.sqrt(2 * freedom) + 6)


# XTC has its own; stages that only move logits are compared exactly below, where draws would add only seconds.
DRAWN = ["temperature", "top_k", "typical_p", "top_p", "min_p", "all"]


@pytest.mark.parametrize("stage", DRAWN)
def test_distribution_of_draws(stage):
    """Through the real draw, not the reported distribution; nothing is accepted, so that it stays the same."""
    p = params(seed=11, **STAGES[stage])
    expected = np.zeros(len(LOGITS))
    for token, q in slow_distribution(LOGITS, PROMPT, WRITTEN, (), p, 0).items():
        expected[token] = q
    sampler = Sampler(p, PROMPT)
    for token in WRITTEN:
        sampler.accept(token)
    sampler.accept = lambda id: None
    counts = np.bincount([sampler.sample(LOGITS, i).id for i in range(20_000)], minlength=len(LOGITS))
    assert chi_square(counts, expected) < 1


def test_xtc_coin_falls_as_often_as_asked():
    p = params(seed=3, xtc_probability=0.3)
    logits = np.log(row(0.5, 0.42, 0.08))
    expected = 0.7 * np.array([0.5, 0.42, 0.08]) + 0.3 * np.array([0, 0.84, 0.16])
    sampler = Sampler(p, [])
    counts = np.bincount([sampler.sample(logits, i).id for i in range(20_000)], minlength=3)
    assert chi_square(counts, expected) < 1


# Anything legal --------------------------------------------------------------------------------------------------

fractions = st.floats(0, 1)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 1e-5, 0.5, 1.0, 100.0]) | st.floats(0, 5),
    top_k=st.integers(0, 25),
    top_p=fractions,
    min_p=fractions,
    typical_p=fractions,
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    penalty_window=st.integers(-1, 12),
    dry_multiplier=st.sampled_from([0.0, 0.8, 100.0]),
    dry_base=st.floats(1, 100),
    dry_allowed_length=st.integers(1, 4),
    dry_window=st.integers(-1, 12),
    dry_breakers=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2), max_size=2),
    xtc_probability=fractions,
    xtc_threshold=fractions,
    logit_bias=st.dictionaries(st.integers(0, 5), st.floats(-120, 100) | st.just(-math.inf), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    temperature_first=st.booleans(),
    n_logprobs=st.just(20),
    logprobs_after=st.just(True),
) | st.builds(
    SamplingParams,
    temperature=st.floats(0, 5),
    mirostat_tau=st.floats(0, 10),
    mirostat_eta=fractions,
    seed=st.integers(0, 2**64 - 1),
    n_logprobs=st.just(20),
    logprobs_after=st.just(True),
)
any_logits = st.lists(
    # Steps of a thousandth: logits closer than float64 probabilities can tell have no one right order.
    st.integers(-30_000, 30_000).map(lambda n: n / 1000)
    | st.integers(-3, 3).map(float)
    | st.sampled_from([-math.inf, 3e38, -3e38]),
    min_size=6,
    max_size=20,
)
short = st.lists(st.integers(0, 5), max_size=20)


@settings(max_examples=400, deadline=None)
@given(any_params, any_logits, short, short, st.frozensets(st.integers(0, 5), max_size=4), st.integers(0, 2**40))
def test_any_request_gives_a_legal_token_from_the_slow_distribution(p, logits, prompt, written, banned, position):
    forbidden = banned | {token for token, bias in p.logit_bias.items() if bias <= -100}
    assume(any(v > -math.inf and token not in forbidden for token, v in enumerate(logits)))
    logits = np.array(logits, np.float32)
    results = []
    for _ in range(2):
        sampler = Sampler(p, prompt, banned)
        for token in written:
            sampler.accept(token)
        results.append(sampler.sample(logits, position))
    sampled = results[0]
    assert results[1] == sampled
    assert sampled.id not in forbidden
    assert logits[sampled.id] > -math.inf
    assert math.isfinite(sampled.logprob)
    assert sampled.logprob <= 0
    try:
        wanted = slow_distribution(logits, prompt, written, banned, p, position)
        token = slow_draw(wanted, slow_uniforms(p.seed, position)[0])
    except Borderline:
        return
    assert {t for t, _ in sampled.top} == set(wanted)
    assert {t: math.exp(v) for t, v in sampled.top} == pytest.approx(wanted, abs=1e-9)
    assert sampled.id == token


@settings(deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=1, max_size=700), st.integers(1, 700))
def test_highest_is_a_stable_sort_cut_off(scores, n):
    wanted = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:n]
    assert highest(np.array(scores, np.float64), n).tolist() == wanted


@pytest.mark.parametrize("n", [1, 40, 64, 1024, 3000, 16_384, 262_144])
def test_highest_at_a_large_vocabulary(n):
    scores = np.random.default_rng(n).normal(size=262_144).astype(np.float32).astype(np.float64)
    scores[::1000] = scores[17]
    assert np.array_equal(highest(scores, n), np.argsort(-scores, kind="stable")[:n])
    scores[100:] = -np.inf
    assert np.array_equal(highest(scores, n), np.argsort(-scores, kind="stable")[: min(n, 100)])


@pytest.mark.parametrize("stage", [*STAGES, "temperature_first"])
def test_a_large_vocabulary_gives_what_full_sorts_give(stage):
    """P03: past 64, 1,024 and 16,384 candidates the fast paths change nothing."""
    changes = STAGES.get(stage, {"temperature_first": True, "temperature": 2.0, "top_p": 0.99})
    p = params(seed=6, **changes)
    logits = (2 * np.random.default_rng(8).normal(size=30_000)).astype(np.float32)
    wanted = slow_distribution(logits, PROMPT, [], (), p, 5)
    sampled = Sampler(p, PROMPT).sample(logits, 5)
    assert sampled.id == slow_draw(wanted, slow_uniforms(6, 5)[0])


# Speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "bound_ms"),
    [
        ({"seed": 0}, 5),
        (NEUTRAL | {"min_p": 0.05}, 8),
        ({"temperature": 0.0}, 5),
        ({"seed": 0, "n_logprobs": 20, "repetition_penalty": 1.1, "dry_multiplier": 0.8}, 8),
    ],
)
def test_speed_at_262144(changes, bound_ms):
    """P11: about 1 ms on one core; six times the bound is allowed here, for machines that are busy."""
    logits = (3 * np.random.default_rng(0).normal(size=262_144)).astype(np.float32)
    sampler = Sampler(SamplingParams(**changes), list(range(2000)))
    times_ms = []
    for position in range(15):
        start = time.perf_counter()
        sampler.sample(logits, position)
        times_ms.append(1e3 * (time.perf_counter() - start))
    assert min(times_ms) < 6 * bound_ms
