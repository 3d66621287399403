"""What a sampler promises about a request: its seed, its log-probabilities, and what it refuses."""

import math
from pathlib import Path

import numpy as np
import pytest
from slow_sampler import final, kept, params, row, soft

from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams, make_seed
from bytefloor.errors import NumericalError, RequestError, ShapeError

# Seeds -----------------------------------------------------------------------------------------------------------


def tokens_of(sampler, n=30, company=None):
    rng = np.random.default_rng(0)
    out = []
    for position in range(n):
        logits = rng.normal(size=50).astype(np.float32)
        if company is not None:
            company.sample(logits, position)
        out.append(sampler.sample(logits, position).id)
    return out


def test_a_draw_does_not_depend_on_company():
    """P08"""
    alone = tokens_of(Sampler(params(seed=42), []))
    for mate in (params(seed=None), params(seed=42), params(seed=7)):
        assert tokens_of(Sampler(params(seed=42), []), company=Sampler(mate, [])) == alone


def test_zero_is_a_seed():
    """P08"""
    first, second = Sampler(params(seed=0), []), Sampler(params(seed=0), [])
    assert first.seed == second.seed == 0
    assert tokens_of(first) == tokens_of(second) != tokens_of(Sampler(params(seed=1), []))


def test_the_reported_seed_reproduces():
    """P08"""
    sampler = Sampler(params(seed=None), [])
    assert sampler.seed != Sampler(params(seed=None), []).seed
    assert tokens_of(Sampler(params(seed=sampler.seed), [])) == tokens_of(sampler)


def test_a_made_seed_survives_a_json_number():
    """P08: a client that reads numbers as doubles must echo the very same seed."""
    assert all(int(float(seed)) == seed for seed in (make_seed() for _ in range(1000)))


def test_a_draw_depends_on_the_position_not_on_the_draws_before():
    logits = np.random.default_rng(1).normal(size=50).astype(np.float32)
    sampler = Sampler(params(seed=4), [])
    in_order = [sampler.sample(logits, i).id for i in range(20)]
    assert [Sampler(params(seed=4), []).sample(logits, i).id for i in reversed(range(20))] == in_order[::-1]


# Log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.1}])
def test_logprobs_are_the_models_own(changes):
    """P10"""
    rng = np.random.default_rng(3)
    sampler = Sampler(params(n_logprobs=5, repetition_penalty=1.3, logit_bias={4: 9.0}, **changes), [1, 2, 3])
    for position in range(30):
        logits = (3 * rng.normal(size=1000)).astype(np.float32)
        exact = logits.astype(np.float64) - math.log(math.fsum(math.exp(float(v)) for v in logits))
        sampled = sampler.sample(logits, position)
        best = np.argsort(-exact, kind="stable")[:5].tolist()
        assert [token for token, _ in sampled.top] == best
        assert [value for _, value in sampled.top] == pytest.approx(exact[best].tolist(), abs=1e-12)
        assert sampled.logprob == pytest.approx(float(exact[sampled.id]), abs=1e-12)


def test_logprobs_are_at_most_zero_descending_and_sum_to_one():
    """P10"""
    for logits in (row(*range(20)), row(80, *[0] * 19), row(*[0] * 20), row(3e38, *[-3e38] * 19)):
        sampled = Sampler(params(n_logprobs=20), []).sample(logits, 0)
        values = [value for _, value in sampled.top]
        assert all(value <= 0 for value in values)
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) == pytest.approx(1)
        assert dict(sampled.top)[sampled.id] == sampled.logprob


def test_the_sampled_token_always_has_its_logprob():
    """P10: also when it is not among the n best."""
    sampled = Sampler(params(n_logprobs=2, logit_bias={3: 100.0}), []).sample(row(3, 2, 1, 0), 0)
    assert sampled.id == 3
    assert [token for token, _ in sampled.top] == [0, 1]
    assert sampled.logprob == pytest.approx(-math.log(sum(math.exp(v) for v in range(4))))


def test_no_logprobs_unless_asked_and_none_for_impossible_tokens():
    assert Sampler(params(), []).sample(row(1, 2), 0).top == ()
    top = Sampler(params(n_logprobs=3), []).sample(row(1, -math.inf, 2), 0).top
    assert [token for token, _ in top] == [2, 0]


def test_logprobs_after_sampling_are_those_drawn_from():
    """P10"""
    distribution, token = final([3, 2, 1], top_k=2)
    assert distribution == pytest.approx(soft({0: 3.0, 1: 2.0}))
    sampled = Sampler(params(temperature=0.0, n_logprobs=5, logprobs_after=True), []).sample(row(3, 2, 1), 0)
    assert (sampled.logprob, sampled.top) == (0.0, ((0, 0.0),))
    assert token in distribution


# Refusals --------------------------------------------------------------------------------------------------------


def test_nan_logits_are_an_error_that_names_position_and_count():
    """N06"""
    for changes in ({}, {"temperature": 0.0}, {"mirostat_tau": 3.0}):
        sampler = Sampler(params(**changes), [])
        with pytest.raises(NumericalError, match=r"position 80123: 2 of 5 are NaN"):
            sampler.sample(row(1, math.nan, 2, 3, math.nan), 80_123)
        with pytest.raises(NumericalError, match="5 of 5 are NaN"):
            sampler.sample(np.full(5, math.nan, np.float32), 1)


def test_a_refused_row_leaves_the_sampler_as_it_was():
    """N06"""
    p = params(mirostat_tau=3.0, repetition_penalty=1.5, dry_multiplier=1.0)
    hurt, well = Sampler(p, [1, 2]), Sampler(p, [1, 2])
    with pytest.raises(NumericalError):
        hurt.sample(np.full(50, math.nan, np.float32), 0)
    assert tokens_of(hurt) == tokens_of(well)


def test_infinite_logits():
    with pytest.raises(NumericalError, match=r"position 3: 1 of 2 are \+inf"):
        Sampler(params(), []).sample(row(1, math.inf), 3)
    with pytest.raises(NumericalError, match="all 2 are -inf"):
        Sampler(params(), []).sample(row(-math.inf, -math.inf), 3)
    assert final([-math.inf, 0])[1] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_is_refused(temperature):
    with pytest.raises(RequestError, match="leave no token"):
        final([1, 2], banned={0}, logit_bias={1: -100}, temperature=temperature)


def test_padding_rows_are_never_sampled():
    """R12: 151,936 rows, 151,669 tokens; the padding is even the best."""
    logits = np.zeros(151_936, np.float32)
    logits[151_669:] = 20.0
    logits[77] = 9.0
    mask = np.arange(151_936) >= 151_669
    for banned in (frozenset(range(151_669, 151_936)), mask):
        for changes in ({}, {"temperature": 0.0}, {"top_k": 40}, {"min_p": 0.05}, {"mirostat_tau": 4.0}):
            sampler = Sampler(params(**changes), [], banned)
            assert all(sampler.sample(logits, i).id < 151_669 for i in range(10))


def test_bans_past_the_rows_are_harmless():
    """R12: the tokenizer may also be the larger one."""
    assert final([1, 2], banned={1, 5000})[1] == 0


def test_bias_of_minus_100_bans_exactly():
    for bias in (-100, -100.0, -500.0, -math.inf):
        assert kept([50, 0], logit_bias={0: bias}) == {1}
    assert kept([200, 0], logit_bias={0: -99.0}) == {0, 1}


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match="logit_bias names token id 9"):
        final([1, 2], logit_bias={9: 1.0})
    with pytest.raises(RequestError, match="prompt names token id 2"):
        final([1, 2], prompt=[0, 2])
    sampler = Sampler(params(), [])
    sampler.sample(row(1, 2), 0)
    with pytest.raises(RequestError, match="token id 2"):
        sampler.accept(2)
    with pytest.raises(RequestError, match="token id -1"):
        sampler.accept(-1)


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match="int64"):
        Sampler(params(), []).sample(np.array([1, 2]), 0)
    with pytest.raises(ShapeError, match=r"\[1, 2\]"):
        Sampler(params(), []).sample(np.zeros((1, 2), np.float32), 0)
    sampler = Sampler(params(), [])
    sampler.sample(row(1, 2), 0)
    with pytest.raises(ShapeError, match="was 2 for this request, found 3"):
        sampler.sample(row(1, 2, 3), 1)


OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("typical_p", 2),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -math.inf),
    ("penalty_window", -2),
    ("dry_multiplier", -1.0),
    ("dry_base", 0.5),
    ("dry_allowed_length", 0),
    ("dry_window", -5),
    ("xtc_probability", 1.1),
    ("xtc_threshold", math.nan),
    ("mirostat_tau", -1.0),
    ("mirostat_eta", math.nan),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 0.5),
    ("n_logprobs", 21),
    ("temperature_first", 1),
    ("logprobs_after", None),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {"1": 0.0}),
    ("logit_bias", [1]),
    ("dry_breakers", ((),)),
    ("dry_breakers", ((-1,),)),
    ("dry_breakers", (1, 2)),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=lambda x: str(x))
def test_parameters_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(RequestError, match=rf"{name}.*expected"):
        SamplingParams(**{name: value})


def test_a_refusal_names_value_and_range():
    with pytest.raises(RequestError, match=r"^top_p = nan: expected a number from 0 to 1$"):
        SamplingParams(top_p=math.nan)


def test_params_keep_copies():
    bias, breakers = {1: 2.0}, [[1, 2]]
    p = SamplingParams(logit_bias=bias, dry_breakers=breakers)
    bias[2] = 1.0
    breakers[0].append(3)
    assert p.logit_bias == {1: 2.0}
    assert p.dry_breakers == ((1, 2),)
    assert hash(p) == hash(SamplingParams(logit_bias={1: 2.0}, dry_breakers=((1, 2),)))


def test_every_parameter_is_in_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    for name in SamplingParams.__dataclass_fields__:
        assert f"`{name}`" in text
