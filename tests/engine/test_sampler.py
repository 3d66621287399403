"""The sampler's stages, one by one, on sets and numbers known by hand."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_sampler import final, kept, params, row, slow_dry, soft

from bytefloor.engine.penalties import Repeats
from bytefloor.engine.sampler import Sampler
from bytefloor.errors import RequestError

# Order -----------------------------------------------------------------------------------------------------------


def test_cuts_come_before_temperature_unless_asked_otherwise():
    """P02"""
    assert kept([3, 2, 1], top_p=0.8, temperature=0.5) == {0, 1}
    assert kept([3, 2, 1], top_p=0.8, temperature=0.5, temperature_first=True) == {0}


def test_min_p_and_temperature_order():
    """P02: p = .67 .24 .09 before, .51 .31 .19 after a temperature of 2."""
    assert kept([3, 2, 1], min_p=0.3, temperature=2.0) == {0, 1}
    assert kept([3, 2, 1], min_p=0.3, temperature=2.0, temperature_first=True) == {0, 1, 2}


def test_temperature_last_still_tempers_what_is_left():
    distribution, _ = final([3, 2, 1], top_p=0.8, temperature=0.5)
    assert distribution == pytest.approx({0: 1 / (1 + math.exp(-2)), 1: 1 / (1 + math.exp(2))})


def test_top_k_comes_before_top_p():
    # After top-k the masses are .55 .45; before it .44 .36 .2.
    assert kept(np.log([0.44, 0.36, 0.2]), top_k=2, top_p=0.54) == {0}
    assert kept(np.log([0.44, 0.36, 0.2]), top_p=0.54) == {0, 1}


def test_typical_comes_before_top_p():
    # Typical keeps {1, 2}, of which top-p keeps the first; top-p first would keep only the peak.
    assert kept(np.log([0.4, 0.15, 0.15, 0.1, 0.1, 0.1]), typical_p=0.25, top_p=0.3) == {1}


def test_top_p_comes_before_min_p():
    # Min-p first would leave .625 .375, of which the first alone reaches .6.
    assert kept(np.log([0.5, 0.3, 0.1, 0.1]), top_p=0.6, min_p=0.5) == {0, 1}


def test_min_p_comes_before_xtc():
    # XTC first would drop 0 and 1, and min-p then keep 2 and 3.
    logits = np.log([0.5, 0.2, 0.16, 0.14])
    assert kept(logits, min_p=0.35, xtc_probability=1.0, xtc_threshold=0.15) == {1}


def test_bans_and_bias_come_before_the_penalties():
    # Bias lifts -1 to 2, then the penalty divides; penalty first would give -2 + 3 = 1 as well as 0 for id 1.
    distribution, _ = final([-1, 0], prompt=[0], logit_bias={0: 3.0}, repetition_penalty=4.0)
    assert distribution[0] == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_repetition_comes_before_presence():
    distribution, _ = final([3, 0], written=[0], repetition_penalty=2.0, presence_penalty=1.0)
    assert distribution[0] == pytest.approx(1 / (1 + math.exp(-0.5)))  # 3 / 2 - 1, not (3 - 1) / 2


def test_each_cut_sees_what_the_one_before_left():
    logits = np.log([0.3, 0.2, 0.2, 0.1, 0.1, 0.1])
    assert kept(logits, top_k=3, top_p=0.42) == {0}  # .3 / .7 = .43
    assert kept(logits, top_p=0.42) == {0, 1}


# Each cut on sets known by hand ----------------------------------------------------------------------------------


def test_min_p_has_its_effect_at_a_large_vocabulary():
    """P03"""
    logits = np.full(262_144, -4.0, np.float32)
    logits[[7, 200_000, 262_143]] = [5.0, 3.0, 2.0]
    for others in ({}, {"top_k": 1000}, {"top_p": 0.999999}):
        assert kept(logits, min_p=0.1, **others) == {7, 200_000}


def test_top_k_keeps_exactly_k_the_lower_ids_among_equals():
    assert kept([1, 2, 2, 2, 0], top_k=2) == {1, 2}
    assert kept([0, 0, 0], top_k=1) == {0}
    assert kept([0, 1], top_k=500) == {0, 1}


def test_top_p_keeps_the_token_that_crosses():
    logits = np.log([0.5, 0.3, 0.2])
    assert kept(logits, top_p=0.0) == {0}
    assert kept(logits, top_p=0.49) == {0}
    assert kept(logits, top_p=0.51) == {0, 1}
    assert kept(logits, top_p=0.81) == {0, 1, 2}


def test_typical_prefers_the_surprise_nearest_to_the_entropy():
    # Entropy 1.63 nats; the surprises .92, 1.90 and 2.30 are .71, .27 and .68 away from it.
    logits = np.log([0.4, 0.15, 0.15, 0.1, 0.1, 0.1])
    assert kept(logits, typical_p=0.1) == {1}
    assert kept(logits, typical_p=0.25) == {1, 2}
    assert kept(logits, typical_p=0.35) == {1, 2, 3}
    assert kept(logits, typical_p=0.7) == {0, 1, 2, 3, 4, 5}


def test_xtc_removes_all_top_choices_but_the_least():
    logits = np.log([0.1, 0.4, 0.3, 0.15, 0.05])
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.12) == {0, 3, 4}
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.35) == {0, 1, 2, 3, 4}  # a single one is no choice
    assert kept(logits, xtc_probability=0.0, xtc_threshold=0.12) == {0, 1, 2, 3, 4}
    assert kept([0, 0, 0], xtc_probability=1.0) == {0}


def test_xtc_at_threshold_zero_never_leaves_only_banned_tokens():
    assert kept([3, 2, 1, 0], xtc_probability=1.0, xtc_threshold=0.0, banned={3}) == {2}


# Greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9, 9e-7])
def test_no_temperature_is_greedy(temperature):
    """P04"""
    sampler = Sampler(params(temperature=temperature), [])
    with np.errstate(all="raise"):
        assert [sampler.sample(row(1, 3, 3, -40), i).id for i in range(50)] == [1] * 50


def test_a_low_temperature_overflows_nowhere():
    """P04"""
    with np.errstate(over="raise", invalid="raise"):
        for temperature_first in (False, True):
            distribution, token = final(
                [3e38, -3e38, 1.0], temperature=1e-6, temperature_first=temperature_first, min_p=0.05
            )
            assert token == 0
            assert distribution == {0: 1.0}


def test_greedy_respects_bans_bias_and_penalties():
    greedy = {"temperature": 0.0}
    assert final([5, 4, 3], banned={0}, **greedy)[1] == 1
    assert final([5, 4, 3], logit_bias={0: -math.inf, 2: 3.0}, **greedy)[1] == 2
    assert final([5, 4, 3], prompt=[0], repetition_penalty=2.0, **greedy)[1] == 1
    assert final([5, 4, 3], written=[0], presence_penalty=1.5, **greedy)[1] == 1
    assert final([5, 4, 3], prompt=[1, 2, 0, 1, 2], dry_multiplier=2.0, **greedy)[1] == 1


@pytest.mark.parametrize("cut", [{"typical_p": 0.1}, {"xtc_probability": 1.0}, {"mirostat_tau": 5.0}])
def test_no_cut_changes_greedy(cut):
    assert final(np.log([0.5, 0.3, 0.2]), temperature=0.0, **cut) == ({0: 1.0}, 0)


# Penalties -------------------------------------------------------------------------------------------------------


def test_repetition_penalty_multiplies_negative_logits():
    """P06: -2 with 1.5 becomes -3, and 3 becomes 2."""
    distribution, _ = final([-2, 3, 0], prompt=[0, 1], repetition_penalty=1.5)
    assert distribution[0] / distribution[2] == pytest.approx(math.exp(-3))
    assert distribution[1] / distribution[2] == pytest.approx(math.exp(2))


def test_which_tokens_count():
    """P07: repetition looks at prompt and output, presence and frequency at the output only ("Paris Paris")."""
    paris = 0
    flat = [1.0, 1.0]
    assert final(flat, prompt=[paris, paris], presence_penalty=1.0, frequency_penalty=1.0)[0][0] == pytest.approx(0.5)
    assert final(flat, prompt=[paris, paris], repetition_penalty=2.0)[0][0] == pytest.approx(1 / (1 + math.exp(0.5)))
    assert final(flat, written=[paris], repetition_penalty=2.0)[0][0] == pytest.approx(1 / (1 + math.exp(0.5)))
    both = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert final(flat, written=[paris, paris], **both)[0][0] == pytest.approx(1 / (1 + math.e))


def test_the_window_counts_from_the_end():
    """P07: the window holds 1 2 of 0 1 2, whether the three were given or written."""
    flat = [1.0, 1.0, 1.0, 1.0]
    for history in ({"prompt": [0, 1, 2]}, {"prompt": [0], "written": [1, 2]}, {"written": [0, 1, 2]}):
        distribution, _ = final(flat, **history, repetition_penalty=2.0, penalty_window=2)
        assert distribution[0] == distribution[3] > distribution[1] == distribution[2]
    distribution, _ = final(flat, written=[0, 1, 2], presence_penalty=1.0, penalty_window=2)
    assert distribution[0] == distribution[3] > distribution[1] == distribution[2]


def test_a_sampled_token_joins_the_history():
    sampler = Sampler(params(temperature=0.0, presence_penalty=2.0), [])
    assert [sampler.sample(row(3, 2, 0.5), i).id for i in range(4)] == [0, 1, 0, 0]


def test_windows_of_none_and_all():
    long = [0] + [1] * 300
    flat = [1.0, 1.0, 1.0]
    assert final(flat, prompt=long, repetition_penalty=2.0, penalty_window=0)[0][0] == pytest.approx(1 / 3)
    distribution, _ = final(flat, prompt=long, repetition_penalty=2.0, penalty_window=-1)
    assert distribution[0] == distribution[1] < distribution[2]
    distribution, _ = final(flat, prompt=long, repetition_penalty=2.0)
    assert distribution[1] < distribution[0] == distribution[2]


# Loops too: only there does a match outgrow the window.
histories = st.lists(st.integers(0, 3), max_size=60) | st.builds(
    lambda loop, n: loop * n, st.lists(st.integers(0, 3), max_size=4), st.integers(1, 15)
)


@settings(deadline=None)
@given(histories, histories, st.integers(-1, 40), st.sampled_from([(), ((3,),), ((0, 1), (2,)), ((1, 1, 1),)]))
def test_dry_matches_against_the_quadratic_one(prompt, written, window, breakers):
    repeats = Repeats(prompt, window, breakers)
    for n in range(len(written) + 1):
        for allowed in (1, 2, 5):
            tokens, lengths = repeats.longest(allowed)
            found = dict(zip(tokens.tolist(), lengths.tolist(), strict=True))
            slow = slow_dry([*prompt, *written[:n]], window, breakers, 1.0, 2.0, 0)
            wanted = {token: int(math.log2(v)) for token, v in slow.items() if math.log2(v) >= allowed}
            assert found == wanted
        if n < len(written):
            repeats.add(written[n])


def test_dry_by_hand():
    # "a b c d a b c": the end "a b c" was followed by d; length 3, allowed 2, so multiplier * base.
    abc = [0, 1, 2, 3, 0, 1, 2]
    distribution, _ = final([0.0] * 5, prompt=abc, dry_multiplier=0.8, dry_base=1.75)
    assert distribution[3] / distribution[4] == pytest.approx(math.exp(-0.8 * 1.75))
    # A breaker inside the repeated part leaves "b c" and then only "c".
    distribution, _ = final([0.0] * 5, prompt=abc, dry_multiplier=0.8, dry_breakers=((0,),))
    assert distribution[3] / distribution[4] == pytest.approx(math.exp(-0.8))
    distribution, _ = final([0.0] * 5, prompt=abc, dry_multiplier=0.8, dry_breakers=((0, 1),))
    assert distribution[3] == pytest.approx(distribution[4])


def test_dry_on_a_long_loop_stays_finite_and_fast():
    start = time.perf_counter()
    sampler = Sampler(params(dry_multiplier=5.0, dry_base=4.0, logprobs_after=True), [0, 1] * 50_000)
    with np.errstate(over="raise", invalid="raise"):
        sampled = sampler.sample(row(9, 0, 0), 100_000)
    assert sampled.id != 0
    assert math.isfinite(sampled.logprob)
    assert time.perf_counter() - start < 2


# Mirostat --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [2.0, 4.0, 6.0])
def test_mirostat_converges_to_its_surprise(tau):
    logits = (-1.1 * np.log(np.arange(1, 5001))).astype(np.float32)
    sampler = Sampler(params(mirostat_tau=tau, seed=2, logprobs_after=True), [])
    surprise = [-sampler.sample(logits, i).logprob / math.log(2) for i in range(2000)]
    assert np.mean(surprise[500:]) == pytest.approx(tau, abs=0.1)


def test_mirostat_step_by_hand():
    logits = np.log(row(0.5, 0.25, 0.15, 0.1))
    p = params(mirostat_tau=1.0, mirostat_eta=0.5, seed=9, n_logprobs=20, logprobs_after=True)
    sampler, bound = Sampler(p, []), 2.0
    for position in range(20):
        chosen = {token for token, q in enumerate([0.5, 0.25, 0.15, 0.1]) if -math.log2(q) <= bound + 1e-6} | {0}
        sampled = sampler.sample(logits, position)
        assert {token for token, _ in sampled.top} == chosen
        bound -= 0.5 * (-sampled.logprob / math.log(2) - 1.0)


def test_mirostat_replaces_the_cuts_and_takes_the_temperature_first():
    tempered = soft(dict(enumerate([6.0, 4.0, 2.0])))
    distribution, _ = final([3, 2, 1], mirostat_tau=50.0, top_k=1, top_p=0.1, min_p=1.0, temperature=0.5)
    assert distribution == pytest.approx(tempered)


@pytest.mark.parametrize("cut", [{"typical_p": 0.9}, {"xtc_probability": 0.5}])
def test_mirostat_with_a_cut_it_would_ignore_is_refused(cut):
    with pytest.raises(RequestError, match=next(iter(cut))):
        params(mirostat_tau=5.0, **cut)
