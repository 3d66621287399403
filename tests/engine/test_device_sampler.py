"""The device's sampler against the host's, on the CPU: the same tokens and log-probabilities, row by row."""

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_sampler import Borderline, slow_distribution, slow_draw, slow_uniforms
from torch.utils._python_dispatch import TorchDispatchMode

from bytefloor.engine import device_cuts, device_sampler, sampler
from bytefloor.engine.device_sampler import FORESEEN, DeviceSampler, sampler_bytes, supports
from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.errors import NumericalError, RequestError
from device_sampling import STAGES, Driven, assert_alike, kernel, memory_for, rows_of
from live_bytes import LiveBytes


@pytest.mark.parametrize("kind", ["smooth", "ties", "some ties"])
@pytest.mark.parametrize("stage", list(STAGES))
def test_tokens_and_logprobs_equal_the_hosts(stage, kind, monkeypatch):
    """A long run of one request, its own tokens in its history; and short ones from many histories."""
    monkeypatch.setattr(device_cuts, "GROUP", 4)
    rng = random.Random(f"{stage} {kind}")
    for n_rows in (3 * FORESEEN, *[5] * 12):
        prompt, written = ([rng.randrange(30) for _ in range(rng.randrange(n))] for n in (40, 300))
        p = SamplingParams(
            **STAGES[stage],
            seed=rng.randrange(2**64),
            n_logprobs=rng.choice([0, 1, 20]),
            logprobs_after=rng.random() < 0.4,
        )
        n_vocabulary = rng.choice([21, 30, 64, 203])
        banned = {rng.randrange(n_vocabulary) for _ in range(6)}
        ids = [[token % n_vocabulary for token in found] for found in ([1, *prompt], written)]
        driven = Driven(p, *ids, banned, n_vocabulary)
        for logits in rows_of(kind, n_rows, n_vocabulary, rng.randrange(2**32)):
            found = driven.by_device(logits)
            assert_alike(found, driven.by_host(logits))
            assert driven.sampler.bound(driven.sampler.record.tolist()) == pytest.approx(driven.host.mu, abs=1e-9)
            assert driven.memory.state.tolist() == [found.id, driven.position, 0, 0]
            assert driven.memory.history[driven.position - 1] == found.id


fractions = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]) | st.floats(0, 5),
    top_k=st.integers(0, 25),
    top_p=fractions,
    min_p=fractions,
    typical_p=fractions,
    repetition_penalty=st.just(1.0) | st.floats(0.1, 10),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    penalty_window=st.integers(-1, 12),
    xtc_probability=fractions,
    xtc_threshold=fractions,
    logit_bias=st.dictionaries(st.integers(0, 5), st.floats(-120, 100) | st.just(-math.inf), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    temperature_first=st.booleans(),
    n_logprobs=st.sampled_from([0, 4, 20]),
    logprobs_after=st.booleans(),
) | st.builds(
    SamplingParams,
    temperature=st.floats(0, 5),
    mirostat_tau=st.floats(0, 10),
    mirostat_eta=fractions,
    seed=st.integers(0, 2**64 - 1),
)
any_logits = st.lists(
    st.integers(-30_000, 30_000).map(lambda n: n / 1000)
    | st.integers(-3, 3).map(float)
    | st.sampled_from([-math.inf, 3e38, -3e38, -0.0]),
    min_size=6,
    max_size=20,
)
short = st.lists(st.integers(0, 5), max_size=20)


@settings(max_examples=600, deadline=None)
@given(any_params, any_logits, short, short, st.frozensets(st.integers(0, 5), max_size=4))
def test_any_request_gives_the_hosts_token(p, logits, prompt, written, banned):
    """Unless rounding decides: then the slow sampler says that it does."""
    forbidden = banned | {token for token, bias in p.logit_bias.items() if bias <= -100}
    assume(any(v > -math.inf and token not in forbidden for token, v in enumerate(logits)))
    prompt = [0, *prompt]
    driven = Driven(p, prompt, written, banned, len(logits))
    position = driven.position
    found = driven.by_device(np.array(logits, np.float32))
    wanted = driven.by_host(logits)
    # A banned logit far above all others overflows the sum of the bare ones: the host is asked then.
    if found is None:
        assert max(logits) - max(value for token, value in enumerate(logits) if token not in banned) > 709
        return
    try:
        distribution = slow_distribution(np.array(logits, np.float32), prompt, written, banned, p, position)
        slow_draw(distribution, slow_uniforms(p.seed, position)[0])
    except Borderline:
        return
    assert_alike(found, wanted)


def test_the_token_that_reaches_the_mass_is_the_last_kept():
    """Masses that are sums of powers of two, which no rounding touches."""
    for n, mass in ((2, 0.5), (4, 0.25), (4, 0.5), (8, 0.5)):
        for cut in ({"top_p": mass, "min_p": 0.0}, {"typical_p": mass, "top_p": 1.0, "min_p": 0.0}):
            p = SamplingParams(seed=1, n_logprobs=20, logprobs_after=True, **cut)
            driven = Driven(p, [1], n_vocabulary=n)
            found = driven.by_device(np.zeros(n, np.float32))
            assert [token for token, _ in found.top] == list(range(int(n * mass)))
            assert_alike(found, driven.by_host(np.zeros(n, np.float32)))


def test_typical_sees_candidates_in_the_order_of_ids(monkeypatch):
    """Its ties do not follow the logits: of equal distances on both sides of the entropy the lower id comes first."""
    monkeypatch.setattr(device_sampler, "cut_typical", lambda values, mass: values[1:].fill_(-math.inf))
    for top_k in (0, 3):
        driven = Driven(SamplingParams(seed=1, typical_p=0.5, top_k=top_k), [1], n_vocabulary=6)
        assert driven.by_device(np.array([-9, 1, 0, 3, 2, -1], np.float32)).id == (1 if top_k else 0)


def test_equal_logprobs_are_listed_by_id():
    """Logits may differ by less than their log-probabilities can."""
    p = SamplingParams(seed=1, n_logprobs=4, logprobs_after=True, logit_bias={0: -1e-80, 2: -1e-90})
    driven = Driven(p, [1], n_vocabulary=4)
    found = driven.by_device(np.zeros(4, np.float32))
    assert [token for token, _ in found.top] == [0, 1, 2, 3]
    assert_alike(found, driven.by_host(np.zeros(4, np.float32)))


@pytest.mark.parametrize("stage", ["defaults", "xtc over all"])
def test_a_random_number_of_zero_takes_the_first_that_is_left(stage, monkeypatch):
    for module in (sampler, device_sampler):
        monkeypatch.setattr(module, "uniforms", lambda seed, position: (0.0, 0.0))
    driven = Driven(SamplingParams(seed=1, **STAGES[stage]), [1], n_vocabulary=30)
    for logits in rows_of("smooth", 5, 30, 3):
        assert_alike(driven.by_device(logits), driven.by_host(logits))


@pytest.mark.parametrize("n", [1, 3, 40, 64, 65, 3000, 65_536])
def test_highest_is_a_stable_sort_cut_off(n):
    """Also where ties lie on the border of the n-th, in many groups, and where most have no chance."""
    rng = np.random.default_rng(n)
    smooth = rng.normal(size=65_536).astype(np.float32)
    few = np.where(rng.random(65_536) < 0.0003, smooth, -np.inf).astype(np.float32)
    for values in (smooth, np.round(smooth * 2) + 0.0, few, np.zeros_like(smooth), np.sort(smooth)[::-1].copy()):
        found, places = device_cuts.highest(torch.from_numpy(values), n)
        wanted = np.argsort(-values, kind="stable")[:n]
        assert places.tolist() == wanted.tolist()
        assert np.array_equal(found.numpy(), values[wanted])


@pytest.mark.parametrize("stage", ["defaults", "greedy", "top_p", "typical", "mirostat", "all"])
def test_a_large_vocabulary(stage):
    """The rows of Gemma, and one that fills no whole groups."""
    for n_vocabulary in (262_144, 151_669):
        p = SamplingParams(seed=6, n_logprobs=5, **STAGES[stage])
        driven = Driven(p, [5, 6, 7], [8, 9], {0, 3, n_vocabulary - 1}, n_vocabulary)
        for kind in ("smooth", "some ties"):
            for logits in rows_of(kind, 2, n_vocabulary, 5):
                assert_alike(driven.by_device(logits), driven.by_host(logits))


@pytest.mark.parametrize("stage", ["defaults", "greedy", "greedy, adjusted", "top_p", "xtc", "mirostat", "all"])
@pytest.mark.parametrize("places", [(20,), (0,), (0, 20)], ids=["open", "banned", "both"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_are_handed_to_the_host(stage, places, value):
    """N06: on banned ids too; and the token that a step ahead would look up is one that there is."""
    logits = rows_of("smooth", 1, 50, 1)[0]
    logits[list(places)] = value
    for takes_best in (False, True) if stage == "greedy" else (False,):
        driven = Driven(SamplingParams(seed=1, **STAGES[stage]), [1, 2], (), {0}, 50, takes_best=takes_best)
        assert driven.by_device(logits) is None
        assert 0 <= driven.memory.state[0] < 50
        with pytest.raises(NumericalError, match=f"{len(places)} of 50 are"):
            driven.by_host(logits)


@pytest.mark.parametrize("stage", ["defaults", "greedy", "top_p", "bias", "typical", "mirostat"])
def test_nothing_to_choose_from_is_handed_to_the_host(stage):
    p = SamplingParams(seed=1, **STAGES[stage])
    logits = rows_of("smooth", 1, 30, 1)[0]
    driven = Driven(p, [1], (), range(30), 30)
    assert driven.by_device(logits) is None
    with pytest.raises(RequestError, match="leave no token"):
        driven.by_host(logits)
    driven = Driven(p, [1], (), (), 30)
    assert driven.by_device(np.full(30, -np.inf, np.float32)) is None
    assert 0 <= driven.memory.state[0] < 30


@pytest.mark.parametrize("n_logprobs", [0, 3])
@pytest.mark.parametrize("after", [False, True])
def test_the_kernels_choice_is_the_greedy_token(n_logprobs, after):
    p = SamplingParams(temperature=0, seed=1, n_logprobs=n_logprobs, logprobs_after=after)
    driven = Driven(p, [1, 2], (), {3, 7}, 90, takes_best=True)
    for logits in rows_of("ties", 20, 90, 4):
        assert_alike(driven.by_device(logits), driven.by_host(logits))


def test_loading_another_request_leaves_nothing_of_the_one_before():
    p = SamplingParams(seed=3, mirostat_tau=2.0, repetition_penalty=1.5, frequency_penalty=0.4, penalty_window=9)
    used = Driven(p, [1, 2], [3] * 20, (), 40)
    for logits in rows_of("smooth", 20, 40, 2):
        used.by_device(logits)
    fresh = Driven(dataclasses.replace(p, seed=8), [7] * 30, [4, 5], (), 40)
    used.host = fresh.host
    used.sampler.load(fresh.host, fresh.ids, 30)
    used.position = fresh.position
    used.memory.state[1] = fresh.position
    for logits in rows_of("smooth", 20, 40, 3):
        assert_alike(used.by_device(logits), used.by_host(logits))


def test_dry_is_not_there():
    assert supports(SamplingParams())
    assert not supports(SamplingParams(dry_multiplier=0.1))
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    assert "DRY alone stays on the host" in text


class Recorded(TorchDispatchMode):
    """Names of the operations that compute; views cost a device nothing."""

    VIEWS = ("view", "slice", "select", "alias", "detach", "as_strided", "_unsafe_view", "split")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name not in self.VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def operations(p, takes_best=False):
    """What a step consists of, by tensors without values: whoever would look at one fails."""
    driven = Driven(p, [1, 2, 3], n_vocabulary=262_144, takes_best=takes_best)

    def empty(tensor):
        return torch.empty_like(tensor, device="meta")

    for name, value in list(vars(driven.sampler).items()):
        if isinstance(value, torch.Tensor):
            setattr(driven.sampler, name, empty(value))
    memory = driven.memory
    shared = {name: empty(getattr(memory, name)) for name in ("state", "history", "logits", "banned")}
    driven.sampler._memory = dataclasses.replace(memory, device=torch.device("meta"), **shared)
    with Recorded() as recorded:
        driven.sampler.step()
    return recorded.names


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("after", [False, True])
def test_a_step_can_be_captured(stage, after):
    """No value comes to the host, none is made there and copied."""
    names = operations(SamplingParams(seed=1, n_logprobs=5, logprobs_after=after, **STAGES[stage]))
    for forbidden in ("_local_scalar_dense", "nonzero", "scalar_tensor", "lift_fresh", "masked_select", "unique2"):
        assert forbidden not in names


def test_a_step_is_few_operations_where_most_requests_are():
    """Each is a launch or two of two microseconds, whatever its size."""
    assert len(operations(SamplingParams(seed=1))) <= 42
    assert len(operations(SamplingParams(temperature=0), takes_best=True)) <= 10
    assert operations(SamplingParams(seed=1, top_k=0, min_p=0.0)).count("sort") == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=0, top_p=1, typical_p=0.9),
        SamplingParams(mirostat_tau=5.0),
        SamplingParams(
            top_k=0, top_p=0.9, typical_p=0.5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5,
            frequency_penalty=0.2, n_logprobs=20, logit_bias={1: 2.0},
        ),
    ],
)  # fmt: skip
def test_a_sampler_takes_no_more_than_memory_was_planned_for(params: SamplingParams) -> None:
    n_vocabulary = 1 << 16
    host, memory = Sampler(params, [1, 2], frozenset()), memory_for(n_vocabulary)
    logits = torch.randn(n_vocabulary, generator=torch.Generator().manual_seed(0))
    with LiveBytes() as live, torch.inference_mode():
        sampler = DeviceSampler(params, host.banned_ids, memory)
        sampler.load(host, [1, 2, 3], 2)
        sampler.foresee(2)
        kernel(memory, logits)
        sampler.step()
    planned = sampler_bytes(n_vocabulary, memory.plan.capacity)
    assert 0.2 * planned < live.most < planned
